"""Code of the registered model: MLflow copies this file next to the weights and runs it to load them.

It generates text for prompts from safetensors, JSON and the code packaged with the model. Nothing is unpickled.
Parameters are max_tokens, temperature (0 takes the likeliest token) and seed. The same input gives the same text on the
same hardware.
"""

from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext


class ServedModel(PythonModel):
    """A text model for `mlflow models serve` and `mlflow.pyfunc.load_model`."""

    def load_context(self, context: PythonModelContext) -> None:
        """Read the packaged artifact `export`, and verify every byte of it."""
        from holdfast.model.files import Folder
        from holdfast.model.hugging_face import load_exported
        from holdfast.model.verified import ExportRecord, VerifiedFiles

        folder = Path(context.artifacts["export"])
        record = folder / "holdfast-export.json"
        files = VerifiedFiles(Folder(folder), ExportRecord.parse(record.read_bytes(), str(record)))
        self.decoder, self.tokenizer = load_exported(files)

    def predict(
        self,
        context: PythonModelContext,  # noqa: ARG002 - MLflow's interface
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> list[str]:
        """The continuation of each text in the column `prompt`."""
        from holdfast.model.generate import generate

        chosen = params or {}
        return [
            generate(
                self.decoder,
                self.tokenizer,
                prompt,
                tokens=int(chosen.get("max_tokens", 64)),
                temperature=float(chosen.get("temperature", 0.8)),
                seed=int(chosen.get("seed", 0)),
            )
            for prompt in model_input["prompt"].explode()  # a cell may hold a list of prompts
        ]


set_model(ServedModel())

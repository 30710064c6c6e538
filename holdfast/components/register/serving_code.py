"""Code of a registered model that a user's class serves: MLflow copies this file next to the weights and runs it.

The class is `registration.serve` of the spec, from the code that was registered with the model. It is created with the
folder of the verified export. Holdfast need not be installed.
"""

import importlib
import json
from pathlib import Path
from typing import Any

from blake3 import blake3
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext

SERVED = "holdfast-serve.json"  # the class, its arguments, and the digests of the files of the export


class ServedCode(PythonModel):
    """A model for `mlflow models serve` and `mlflow.pyfunc.load_model`."""

    def load_context(self, context: PythonModelContext) -> None:
        """Verify every byte of the export, and create the class with its folder."""
        folder = Path(context.artifacts["export"])
        served = json.loads((folder / SERVED).read_text(encoding="utf-8"))
        for name, blocks in served["files"].items():
            _require_same(folder / name, blocks, served["block_bytes"])
        module = importlib.import_module(served["module"])
        if not Path(str(module.__file__)).resolve().is_relative_to(folder.resolve()):
            origin = f"{served['module']} is loaded from {module.__file__}, which is not the code of this model"
            raise ValueError(f"{origin}; load the model in another process")
        self.model = getattr(module, served["class"])(folder, **served["arguments"])

    def predict(  # type: ignore[no-untyped-def] # MLflow checks values against annotations
        self,
        context: PythonModelContext,  # noqa: ARG002 - MLflow's interface
        model_input,
        params: dict[str, Any] | None = None,  # noqa: ARG002 - MLflow's interface
    ):
        """What the method `predict` of the class returns for the input."""
        return self.model.predict(model_input)


def _require_same(path: Path, blocks: list[str], block_bytes: int) -> None:
    """Raise ValueError unless a file has the blocks that were exported."""
    with path.open("rb") as file:
        for block in blocks:
            if blake3(file.read(block_bytes)).hexdigest(length=len(block) // 2) != block:
                raise ValueError(f"{path}: is not the file that was registered; download the model again")
        if file.read(1):
            raise ValueError(f"{path}: is longer than the file that was registered; download the model again")


set_model(ServedCode())

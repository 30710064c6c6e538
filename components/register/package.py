"""The folder that MLflow calls a model: the export, the code that reads it, a signature and pinned requirements.

Promises a folder that loads without Holdfast being installed, without a pickle and without running the model here, so
that the step needs neither torch nor an accelerator.
"""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from holdfast.components.model.exported import fetch_exported
from holdfast.components.store import Store
from holdfast.components.tracking.connection import quiet_mlflow

PACKED_PARTS = (
    "spec",
    "model",
)  # what serving.py needs of `holdfast.components`; neither imports another part to load a model
SERVING = "serving.py"
_REQUIREMENTS = ("mlflow", "torch", "safetensors", "tokenizers", "numpy", "pydantic", "pyyaml", "croniter", "blake3")
_TORCH = "2.13.0"  # when this step runs without torch


def package(store: Store, export: str, folder: Path) -> Path:
    """Write the model of the export under the key prefix `export` into `folder`/model, and return that folder.

    Raises MissingError if there is no export. Beside the result, `folder` needs room for one more copy of the weights.
    """
    quiet_mlflow()
    import pandas as pd
    from mlflow import pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema

    signature = ModelSignature(
        inputs=Schema([ColSpec(DataType.string, "prompt")]),
        outputs=Schema([ColSpec(DataType.string)]),
        params=ParamSchema(
            [
                ParamSpec("max_tokens", DataType.long, 64),
                ParamSpec("temperature", DataType.double, 0.8),
                ParamSpec("seed", DataType.long, 0),
            ]
        ),
    )
    target = folder / "model"
    pyfunc.save_model(
        path=str(target),
        python_model=str(Path(__file__).with_name(SERVING)),
        artifacts={"export": str(fetch_exported(store, export, folder / "export"))},
        code_paths=[str(_code(folder / "code" / "holdfast"))],
        signature=signature,
        input_example=pd.DataFrame({"prompt": ["Once upon a time"]}),
        pip_requirements=requirements(),
    )
    described = Model.load(str(target))
    flavor = described.flavors["python_function"]
    flavor["model_code_path"] = SERVING  # MLflow looks for it beside MLmodel, and writes where it lay before
    flavor["artifacts"]["export"]["uri"] = f"{store.url}/{export}"
    described.save(str(target / "MLmodel"))
    return target


def requirements() -> list[str]:
    """What the packed code needs, pinned to the versions installed here."""
    return [f"{name}=={_version(name)}" for name in _REQUIREMENTS]


def _version(name: str) -> str:
    try:
        return version(name).split("+")[0]  # not the local part: it names one build of torch
    except PackageNotFoundError:
        if name == "torch":
            return _TORCH
        raise


def _code(folder: Path) -> Path:
    """The source of the parts that the model needs, as the package `holdfast`."""
    source = Path(__file__).parents[2]
    (folder / "components").mkdir(parents=True)
    for package in ("", "components"):
        shutil.copy(source / package / "__init__.py", folder / package)
    for part in PACKED_PARTS:
        shutil.copytree(
            source / "components" / part, folder / "components" / part, ignore=shutil.ignore_patterns("__pycache__")
        )
    return folder

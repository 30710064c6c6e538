"""MLflow package of a run's export: code that reads it, a signature and pinned requirements.

The export loads where Holdfast is not installed, without a pickle. The model does not run here, so the step needs
neither torch nor an accelerator. No weights are copied: they are in the same folder as the package, and are checked
when they are loaded.
"""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from holdfast.model.verified import ExportRecord
from holdfast.tracking.connection import quiet_mlflow

PACKED_PARTS = ("spec", "model")  # parts of `holdfast` that serving.py needs; to load a model they import no other
MARKER = "MLmodel"  # MLflow's marker of a model folder
SERVING = "serving.py"
RECORD = "holdfast-export.json"  # digests of the weights, which serving.py checks
_REQUIREMENTS = ("mlflow", "torch", "tokenizers", "numpy", "pydantic", "pyyaml", "blake3")
_TORCH = "2.13.0"  # if this step runs without torch


def describe_model(folder: Path, record: ExportRecord, uri: str) -> list[Path]:
    """Write into `folder` all files of an MLflow model except its weights. The weights go to the same folder, are
    those of `record`, and came from `uri`. Returns the files with MARKER last, so a model that has it is complete."""
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
    code = folder.with_name(f"{folder.name}-code") / "holdfast"
    pyfunc.save_model(
        path=str(folder),
        python_model=str(Path(__file__).with_name(SERVING)),
        code_paths=[str(_code(code))],
        signature=signature,
        input_example=pd.DataFrame({"prompt": ["Once upon a time"]}),
        pip_requirements=requirements(),
    )
    shutil.rmtree(code.parent)
    described = Model.load(str(folder))
    flavor = described.flavors["python_function"]
    flavor["model_code_path"] = SERVING  # relative to MLmodel; MLflow writes the original location
    flavor["artifacts"] = {"export": {"path": ".", "uri": uri}}
    described.save(str(folder / MARKER))
    (folder / RECORD).write_text(record.model_dump_json(indent=1), encoding="utf-8")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return sorted(files, key=lambda path: path.name == MARKER)


def requirements() -> list[str]:
    """The requirements of the packaged code, pinned to the versions installed here."""
    return [f"{name}=={_version(name)}" for name in _REQUIREMENTS]


def _version(name: str) -> str:
    try:
        return version(name).split("+")[0]  # without the local part, which names one build of torch
    except PackageNotFoundError:
        if name == "torch":
            return _TORCH
        raise


def _code(folder: Path) -> Path:
    """The source of the parts that the model needs, as the package `holdfast`."""
    source = Path(__file__).parents[2]
    folder.mkdir(parents=True)
    shutil.copy(source / "__init__.py", folder)
    for part in PACKED_PARTS:
        shutil.copytree(source / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    return folder

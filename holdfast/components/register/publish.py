"""Location of a registered model for MLflow: in the store, next to the weights, which are not copied.

Weights pass through no temporary folder. A registry takes the store's address of the model, and readers load it from
the store, as they would load MLflow's artifacts. One case differs: an MLflow server on another machine refuses a path
of this machine's folder store. The files are then sent from where they are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.model.exported import require_intact
from holdfast.model.verified import ExportRecord
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json_object
from holdfast.tracking.artifacts import bounded
from holdfast.tracking.connection import quiet_mlflow, registry_uri
from holdfast.tracking.registrations import content_digest

if TYPE_CHECKING:
    from mlflow import MlflowClient

# MLflow package of a run's export: code that reads it, a signature and pinned requirements.
#
# The export loads where Holdfast is not installed, without a pickle. The model does not run here, so the step needs
# neither torch nor an accelerator. No weights are copied: they are in the same folder as the package, and are checked
# when they are loaded.

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
    return [pinned(name) for name in _REQUIREMENTS]


def pinned(name: str) -> str:
    """The requirement of a package at the version that is installed here."""
    return f"{name}=={_version(name)}"


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


Describe = Callable[[Path, ExportRecord, str], list[Path]]  # see `describe_model`
SEND_SECONDS = 300.0  # for about 50 KB in a dozen files


def publish(
    client: MlflowClient,
    uri: str,
    mlflow_run_id: str,
    name: str,
    store: Store,
    export: str,
    *,
    expected: str = "",
    describe: Describe = describe_model,
) -> str:
    """Make the export under the key prefix `export` a model that the MLflow at `uri` can refer to, and return its
    source. `name` is its folder among the artifacts of the MLflow run if it must be sent. `describe` writes MLflow's
    files. Every byte of the export is read and checked first against the digest `expected`. Raises MissingError and
    DataError."""
    record = require_intact(store, export, expected)
    folder = export.rstrip("/")
    if store.url.startswith(("s3://", "gs://")) or not registry_uri(uri).startswith("http"):
        if not _is_described(store, export):
            _describe(store, export, record, describe)
        return f"{store.url}/{folder}"
    artifacts = bounded(lambda: client.list_artifacts(mlflow_run_id, name), "listing artifacts")
    if not any(Path(file.path).name == MARKER for file in artifacts):
        with temporary_folder("register") as temporary:
            marker = _described(describe, Path(temporary) / "model", record, f"{store.url}/{export}")[-1]
            marker = marker.rename(Path(temporary) / MARKER)
            described = str(Path(temporary) / "model")  # small: a store that does not answer shows here
            bounded(lambda: client.log_artifacts(mlflow_run_id, described, name), "sending the model", SEND_SECONDS)
            for file in record.files:
                path = store.local_path(f"{folder}/{file}")
                client.log_artifact(mlflow_run_id, str(path), "/".join([name, *file.split("/")[:-1]]))
            client.log_artifact(mlflow_run_id, str(marker), name)
    return f"{client.get_run(mlflow_run_id).info.artifact_uri}/{name}"


def _described(describe: Describe, folder: Path, record: ExportRecord, uri: str) -> list[Path]:
    """The files that `describe` wrote. Raises DataError if the export has a file of the same name."""
    files = describe(folder, record, uri)
    for path in files:
        if (name := path.relative_to(folder).as_posix()) in record.files:
            raise DataError(
                f"{uri}: has a file {name}, which registration in MLflow writes; export it under another name, by a "
                "changed script"
            )
    return files


def _describe(store: Store, export: str, record: ExportRecord, describe: Describe) -> None:
    """Write MLflow's files next to the weights, then their digests."""
    digests = {}
    with temporary_folder("register") as temporary:
        folder = Path(temporary) / "model"
        for path in _described(describe, folder, record, f"{store.url}/{export}"):
            name, data = str(path.relative_to(folder)), path.read_bytes()
            store.put(f"{export.rstrip('/')}/{name}", data)
            digests[name] = content_digest(data)
    store.put(layout.package_record(export), json.dumps(digests, indent=1).encode())


def changed_package(store: Store, export: str) -> Iterator[tuple[str, str]]:
    """The files for MLflow that differ from what was written, each with the problem. Empty without a record of such
    files."""
    key = layout.package_record(export)
    try:
        digests = read_json_object(store, key)
    except MissingError:
        return
    except DataError:
        yield key.rpartition("/")[2], "is no record of files"
        return
    for name, expected in digests.items():
        try:
            if content_digest(store.get(f"{export.rstrip('/')}/{name}")) != expected:
                yield name, "is not the file that was registered; register the run again, it is written anew"
        except MissingError:
            yield name, "is missing"


def _is_described(store: Store, export: str) -> bool:
    """Whether an earlier call wrote all files, and they are unchanged. They hold code that runs when the model is
    loaded."""
    return store.stat(layout.package_record(export)) is not None and not any(changed_package(store, export))

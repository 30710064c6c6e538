"""MLflow's files for the export of a training script: which of three kinds of model it is, and how it loads.

- With `registration.serve`: a `python_function` that runs the user's class, from the code of the run.
- A folder in the layout of transformers, with safetensors: the flavor `transformers`, written without loading it.
- Any other folder: the flavor `holdfast`, which names the files. MLflow lists it, and cannot serve it.

No code of the user runs here, and no weights are copied.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from holdfast.code import fetch_code
from holdfast.code.packages import LOCK_FILE, requirements_of
from holdfast.components.register.publish import MARKER, pinned
from holdfast.model.files import SMALL_BYTES
from holdfast.model.verified import BLOCK_BYTES, ExportRecord
from holdfast.spec import Spec
from holdfast.spec.errors import DataError
from holdfast.spec.functions import Function
from holdfast.spec.json_parsing import parse_json_object
from holdfast.store import Store, read_bounded
from holdfast.tracking.connection import quiet_mlflow

SERVING_CODE, SERVED = "serving_code.py", "holdfast-serve.json"  # see serving_code.py, which runs where MLflow loads it
# torch writes pickles with these names. transformers loads the last two if it finds no safetensors of their names.
PICKLES = (".pkl", ".pickle", ".joblib", ".pt", ".pth", ".ckpt", "pytorch_model.bin", "adapter_model.bin")
# Tasks of transformers' pipelines and their classes, by the end of an architecture's name.
TASKS = {
    "ForCausalLM": ("text-generation", "TextGenerationPipeline"),
    "LMHeadModel": ("text-generation", "TextGenerationPipeline"),
    "ForSequenceClassification": ("text-classification", "TextClassificationPipeline"),
    "ForTokenClassification": ("token-classification", "TokenClassificationPipeline"),
    "ForMaskedLM": ("fill-mask", "FillMaskPipeline"),
}
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
)


def describe_script_model(
    spec: Spec, store: Store, export: str, folder: Path, record: ExportRecord, uri: str
) -> list[Path]:
    """Write into `folder` all files of an MLflow model except the weights, which are those of `record` and came from
    `uri`. Returns them with MARKER last. Raises DataError for a pickled or empty export."""
    _require_plain(record, uri)
    quiet_mlflow()
    if spec.registration.serve is not None:
        _describe_code(spec.registration.serve, fetch_code(store, str(spec.code)), folder, record, uri)
    elif (config := _transformers_config(store, export, record)) is not None:
        _describe_transformers(config, store, export, folder, record)
    else:
        _describe_folder(spec, folder, record)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return sorted(files, key=lambda path: path.name == MARKER)


def _require_plain(record: ExportRecord, uri: str) -> None:
    if not record.files:
        raise DataError(f"{uri}: the export has no files; call session.export with a module or a folder with files")
    for name in record.files:
        if name.lower().endswith(PICKLES):
            raise DataError(f"{uri}: {name} has a name of pickled files, whose loading runs code; write safetensors")


def _transformers_config(store: Store, export: str, record: ExportRecord) -> dict[str, Any] | None:
    """The `config.json` of an export in the layout of transformers with a known task, or None."""
    if "config.json" not in record.files or not any(name.endswith(".safetensors") for name in record.files):
        return None
    key = f"{export.rstrip('/')}/config.json"
    try:
        config = parse_json_object(read_bounded(store, key, SMALL_BYTES), f"{store.url}/{key}", finite=False)
    except DataError:
        return None
    return config if _task(config) is not None and not config.get("auto_map") else None


def _task(config: dict[str, Any]) -> tuple[str, str, str] | None:
    """Architecture, task and pipeline of a model."""
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    return next(((name, *task) for end, task in TASKS.items() if name.endswith(end)), None)


def _describe_transformers(
    config: dict[str, Any], store: Store, export: str, folder: Path, record: ExportRecord
) -> None:
    """The flavor `transformers`. Its weights are in the folder itself, and its tokenizer is copied: MLflow reads that
    from another folder."""
    from mlflow import pyfunc
    from mlflow.models import Model

    folder.mkdir(parents=True)
    task = _task(config)
    assert task is not None
    architecture, name, pipeline = task
    version = str(config.get("transformers_version") or "")
    packages = [f"transformers=={version}" if version else "transformers", pinned("torch")]
    flavor: dict[str, Any] = {
        "task": name,
        "instance_type": pipeline,
        "pipeline_model_type": architecture,
        "source_model_name": export.rstrip("/"),
        "model_binary": ".",
        "components": [],
        "transformers_version": version,
        "code": None,
    }
    if str(config.get("dtype") or config.get("torch_dtype") or "") in ("float16", "bfloat16", "float32"):
        flavor["torch_dtype"] = f"torch.{config.get('dtype') or config.get('torch_dtype')}"
    if "tokenizer.json" in record.files:
        tokenizer = folder / "components" / "tokenizer"
        tokenizer.mkdir(parents=True)
        for file in (file for file in _TOKENIZER if file in record.files):
            store.download(f"{export.rstrip('/')}/{file}", tokenizer / file)
        flavor |= {"components": ["tokenizer"], "tokenizer_type": "AutoTokenizer"}
    model = Model()
    model.add_flavor("transformers", **flavor)
    _write_requirements(folder, packages)
    pyfunc.add_to_model(model, loader_module="mlflow.transformers", python_env="python_env.yaml")
    model.save(str(folder / MARKER))


def _describe_code(serve: Function, code: Path, folder: Path, record: ExportRecord, uri: str) -> None:
    """A `python_function` of the user's class, with the files of its bundle. Nothing of them is imported."""
    from mlflow import pyfunc
    from mlflow.models import Model

    lock = code / LOCK_FILE
    wanted = requirements_of(lock.read_text(encoding="utf-8-sig")) if lock.is_file() else {}
    packages = [*wanted.values(), *(pinned(name) for name in ("mlflow", "blake3") if name not in wanted)]
    pyfunc.save_model(
        path=str(folder),
        python_model=str(Path(__file__).with_name(SERVING_CODE)),
        code_paths=[str(path) for path in sorted(code.iterdir())],
        pip_requirements=packages,
    )
    for path in [folder / "code", *(folder / "code").rglob("*")]:  # a bundle's files are read-only
        path.chmod(0o755 if path.is_dir() else 0o644)
    for cache in list((folder / "code").rglob("__pycache__")):
        shutil.rmtree(cache)
    described = Model.load(str(folder))
    flavor = described.flavors["python_function"]
    flavor["model_code_path"] = SERVING_CODE
    flavor["artifacts"] = {"export": {"path": ".", "uri": uri}}
    described.save(str(folder / MARKER))
    served = {
        "module": serve.file.removesuffix(".py"),
        "class": serve.function_name,
        "arguments": serve.keywords,
        "block_bytes": BLOCK_BYTES,
        "files": {name: list(file.blocks) for name, file in record.files.items()},
    }
    (folder / SERVED).write_text(json.dumps(served, indent=1), encoding="utf-8")


def _describe_folder(spec: Spec, folder: Path, record: ExportRecord) -> None:
    """The flavor `holdfast`: what the folder has, and that MLflow cannot load it."""
    from mlflow.models import Model

    folder.mkdir(parents=True)
    model = Model()
    model.add_flavor(
        "holdfast",
        kind="folder",
        script=spec.train.script,
        code=spec.code,
        export_digest=record.digest,
        files={name: file.size for name, file in record.files.items()},
        note="MLflow cannot load these files; add registration.serve to the spec to serve them.",
    )
    model.save(str(folder / MARKER))


def _write_requirements(folder: Path, packages: list[str]) -> None:
    """The files of an environment that MLflow reads."""
    from mlflow.utils.environment import _PythonEnv

    packages = [*packages, pinned("mlflow")]
    (folder / "requirements.txt").write_text("\n".join(packages) + "\n", encoding="utf-8")
    _PythonEnv.current().to_yaml(str(folder / "python_env.yaml"))

"""Hugging Face layout: the weights of a checkpoint as a folder, and such a folder as a source."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from holdfast.checkpoint import Checkpoint, TensorBox
from holdfast.corpus.chat import read_settings, templates_next_to
from holdfast.dataset import Dataset
from holdfast.model.config.base import Base
from holdfast.model.decoder import SCORE
from holdfast.model.export import DTYPES, ExportFile, Rows, export_files, peft_files
from holdfast.model.hub import require_weights
from holdfast.model.hugging_face import open_weights, require_fit
from holdfast.model.initialise import AVERAGE
from holdfast.model.lora import adapter_shapes, frozen_matrices, merging_rows, stored_rows
from holdfast.runtime.environment import cache_dir
from holdfast.runtime.logs import log
from holdfast.spec import Spec
from holdfast.store import Store


class HuggingFace:
    """See Source. It has weights and no moments."""

    def __init__(self, location: str) -> None:
        """Open a folder or an s3:// URL. Raises MissingError or DataError."""
        self.where = location
        self._weights = open_weights(location, cache_dir())

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See Source."""
        return self._weights.shapes.get(name)

    def boxes(self, name: str) -> Iterator[TensorBox]:
        """See Source."""
        shape, first = self._weights.shapes[name], 0
        for part in self._weights.rows(name):
            yield TensorBox(name, shape, (first, *(0 for _ in shape[1:])), part)
            first += len(part)


def model_files(checkpoint: Checkpoint, spec: Spec, dataset: Dataset) -> list[ExportFile]:
    """The files of a checkpoint's model, before any of them is generated. Adapters are merged into their base, and
    are also exported separately if `peft` can load them. With `training.ema.export`, the weights are their averages.
    Raises DataError if the base has changed or cannot be read."""
    own: Rows = averaged_rows(checkpoint) if spec.training.ema.export else checkpoint.rows
    rows = own
    adapters, base = list[ExportFile](), checkpoint.manifest.base
    if base is not None and spec.training.lora.rank is not None:
        location = spec.model.init_from or base.location
        require_weights(location, base.digest)
        weights = open_weights(location, cache_dir())
        require_fit(weights, spec.model, dataset.vocabulary)
        lora = spec.training.lora
        shapes = adapter_shapes(spec.model, dataset.vocabulary, lora)
        if spec.model.family != "phi3":  # its matrices are fused in `transformers`; adapters of their parts do not load
            whole = {SCORE: (1, spec.model.hidden)} if spec.model.head == "scalar" else {}
            adapters = peft_files(shapes, whole, own, lora, location)
        stored = stored_rows(weights.rows, frozen_matrices(spec.model, dataset.vocabulary, lora), lora.base)
        rows = merging_rows(stored, shapes, own, lora)
        if spec.model.head == "scalar":  # it is trained as a whole
            rows = _with_head(rows, own)
    base_documents = read_base(spec, dataset)
    files = export_files(
        spec.model,
        dataset.vocabulary,
        rows,
        tokenizer_json=dataset.tokenizer_json(),
        end_of_text=spec.data.tokenizer.end_of_text,
        chat_template=dataset.chat_template,
        base=base_documents,
        dtype=_dtype(spec, base_documents),
    )
    return sorted(adapters + files)


def averaged_rows(checkpoint: Checkpoint) -> Rows:
    """The rows of the averages of a checkpoint's weights, and of weights without one. They were never trained."""

    def rows(name: str, *bounds: Any) -> Iterator[torch.Tensor]:
        averaged = AVERAGE + name
        return checkpoint.rows(averaged if averaged in checkpoint.tensors else name, *bounds)

    return rows


def _with_head(rows: Rows, trained: Rows) -> Rows:
    return lambda name, *bounds: (trained if name == SCORE else rows)(name, *bounds)


def _dtype(spec: Spec, base: Base | None) -> str:
    """The type of the exported weights, as config.json names it. A base without a type of DTYPES is fp32."""
    if spec.model.export_dtype != "base":
        return {"fp32": "float32", "bf16": "bfloat16"}[spec.model.export_dtype]
    settings = base.config if base is not None else {}
    name = settings.get("dtype", settings.get("torch_dtype"))
    return name if isinstance(name, str) and name in DTYPES else "float32"


def read_base(spec: Spec, dataset: Dataset) -> Base | None:
    """The parts of the tuned model that the export of a run keeps. None for a run with new weights and without
    conversations. Raises what reading files raises."""
    if spec.model.init_from is None and dataset.manifest.chat is None:
        return None
    origin = spec.model.init_from
    tokenizer_folder = (spec.data.tokenizer.path or "").rpartition("/")[0]
    weights = _documents(f"{origin.rstrip('/')}/", "model.init_from") if origin else _Documents({}, {}, {}, {})
    if origin and not weights.config:
        log.warning("%s: has no config.json any more, so the export keeps nothing of it", origin)
    tokens = weights
    if spec.data.tokenizer.kind == "file" and f"{tokenizer_folder}/" != f"{(origin or '').rstrip('/')}/":
        documents = _documents(f"{tokenizer_folder}/" if tokenizer_folder else "", "data.tokenizer.path")
        tokens = documents if documents.tokenizer_config else weights
        tokenizer_folder = tokenizer_folder if documents.tokenizer_config else (origin or "").rstrip("/")
    chat = dataset.manifest.chat
    if chat is not None and chat.get("text"):
        templates = {"default": chat["text"], **chat.get("named", {})}
    else:
        templates = templates_next_to(f"{tokenizer_folder}/" if tokenizer_folder else "", tokens.tokenizer_config)
    # The dataset has the settings used to render the template, even if the file is missing.
    tokenizer_config = {**((chat or {}).get("specials") or {}), **tokens.tokenizer_config}
    return Base(
        config=weights.config,
        generation_config=weights.generation_config,
        tokenizer_config=tokenizer_config,
        special_tokens_map=tokens.special_tokens_map,
        templates=templates,
    )


class _Documents(NamedTuple):
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_config: dict[str, Any]
    special_tokens_map: dict[str, Any]


def _documents(folder: str, named: str) -> _Documents:
    """The JSON documents of a folder that the spec's field `named` refers to. Missing ones are empty."""
    documents = [
        read_settings(f"{folder}{name}.json", named)
        for name in ("config", "generation_config", "tokenizer_config", "special_tokens_map")
    ]
    return _Documents(*documents)


def export_hugging_face(
    checkpoint: Checkpoint,
    spec: Spec,
    dataset: Dataset,
    target: Store,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[str]:
    """Stream the model of a checkpoint into `target`. Returns the names of its files. Raises DamageError for data
    that cannot be verified."""
    files = model_files(checkpoint, spec, dataset)
    total, done = sum(file.size for file in files), 0

    def reported_content(file: ExportFile, before: int) -> Iterator[bytes | memoryview]:
        for data in file.content():
            yield data
            before += len(data)
            progress(before, total)

    for file in files:
        target.put_stream(file.name, file.size, lambda file=file, before=done: reported_content(file, before))  # type: ignore[misc]
        done += file.size
    return [file.name for file in files]

"""The weights of a checkpoint as a folder in the Hugging Face layout, and such a folder as a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.components.checkpoint import Checkpoint, TensorBox
from holdfast.components.dataset import Dataset
from holdfast.components.model.export import ExportFile, Rows, export_files
from holdfast.components.model.hugging_face import open_weights, require_fit
from holdfast.components.model.imported import require_weights
from holdfast.components.model.lora import adapter_shapes, merging_rows
from holdfast.components.model.peft_files import peft_files
from holdfast.components.runtime.environment import cache_dir
from holdfast.components.spec import Spec
from holdfast.components.store import Store


class HuggingFace:
    """See Source. Has weights and no moments."""

    def __init__(self, location: str) -> None:
        """A folder or an s3:// URL. Raises MissingError or DataError."""
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
    """The files of the model of a checkpoint, none of them made yet. Adapters are merged into their base, and are there
    by themselves as well. Raises DataError for a base that is another one by now, or cannot be read."""
    rows: Rows = checkpoint.rows
    adapters, base = list[ExportFile](), checkpoint.manifest.base
    if base is not None and spec.training.lora.rank is not None:
        location = spec.model.init_from or base.location
        require_weights(location, base.digest)
        weights = open_weights(location, cache_dir())
        require_fit(weights, spec.model, dataset.vocabulary)
        shapes = adapter_shapes(spec.model, dataset.vocabulary, spec.training.lora)
        adapters = peft_files(shapes, checkpoint.rows, spec.training.lora, location)
        rows = merging_rows(weights.rows, shapes, checkpoint.tensor, spec.training.lora)
    files = export_files(
        spec.model,
        dataset.vocabulary,
        rows,
        tokenizer_json=dataset.tokenizer_json(),
        end_of_text=spec.data.tokenizer.end_of_text,
        chat_template=dataset.chat_template,
    )
    return sorted(adapters + files)


def export_hugging_face(
    checkpoint: Checkpoint,
    spec: Spec,
    dataset: Dataset,
    target: Store,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[str]:
    """Write the model of a checkpoint into `target`, streaming; the names of its files. Raises DamageError for what
    cannot be verified."""
    files = model_files(checkpoint, spec, dataset)
    total, done = sum(file.size for file in files), 0

    def told(file: ExportFile, before: int) -> Iterator[bytes | memoryview]:
        for data in file.content():
            yield data
            before += len(data)
            progress(before, total)

    for file in files:
        target.put_stream(file.name, file.size, lambda file=file, before=done: told(file, before))  # type: ignore[misc]
        done += file.size
    return [file.name for file in files]

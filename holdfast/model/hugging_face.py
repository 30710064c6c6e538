"""Reader of the Hugging Face layout: a folder of safetensors, config.json and tokenizer. `export` writes it.

Weights that do not fit a spec are refused with the field to change. Only JSON and safetensors are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.model.config.fixed_fields import problems_with_weights
from holdfast.model.config.reader import ReadConfig, read_config
from holdfast.model.decoder import Decoder
from holdfast.model.export import INDEX
from holdfast.model.files import SMALL_BYTES, TOKENIZER_BYTES, Files, Folder, read_bytes
from holdfast.model.initialise import parameter_shapes
from holdfast.model.published import Rows, published, rows_of, shape_of
from holdfast.model.tensor_files import (
    DTYPES,
    MXFP4_BLOCK,
    SLAB_BYTES,
    Place,
    Source,
    read_header,
    read_part,
    read_rows,
)
from holdfast.spec.errors import DataError, MissingError, Problem, SpecError, shown
from holdfast.spec.model import Model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Placement of a decoder on several accelerators of one process, for models that do not fit one.
#
# Each accelerator has a run of consecutive layers. The results are those of one accelerator of that kind. Only one of
# them computes at a time.


def empty_on(devices: Sequence[torch.device], shape: Model, vocabulary: int, end_of_text: int | None = None) -> Decoder:
    """A decoder with unfilled weights. Embedding and head are on the first device."""
    if len(devices) == 1:
        return Decoder.empty(shape, vocabulary, devices[0], end_of_text)
    decoder = Decoder.empty(shape, vocabulary, "meta", end_of_text)
    layers = len(decoder.model.layers)
    for index, layer in enumerate(decoder.model.layers):
        place = devices[index * len(devices) // layers]
        layer.to_empty(device=place)
        _bring_inputs(layer, place)
    for module in (decoder.model.embed_tokens, decoder.model.norm, decoder.lm_head, decoder.score):
        if module is not None:
            module.to_empty(device=devices[0])
    _bring_inputs(decoder.model.norm, devices[0])
    for name, buffer in list(decoder.named_buffers(recurse=False)):
        setattr(decoder, name, torch.empty_like(buffer, device=devices[0]))
    decoder.reset_buffers()
    return decoder


def _bring_inputs(module: nn.Module, device: torch.device) -> None:
    def bring(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(value.to(device) if isinstance(value, Tensor) else value for value in inputs)

    module.register_forward_pre_hook(bring)


BLOCKS, SCALES = "_blocks", "_scales"  # name suffixes of a tensor in MXFP4
INDEX_BYTES = 256 * 2**20  # a million tensors


class Weights(NamedTuple):
    """A model in the Hugging Face layout with checked names, shapes and config. Tensors are read on demand."""

    files: Files
    shape: Model
    vocabulary: int
    end_of_text: int | None  # eos_token_id
    shapes: dict[str, tuple[int, ...]]  # by canonical name, in order
    places: dict[str, list[tuple[int, Source]]]  # the published tensors of each, with their first rows
    stops: tuple[int, ...] = ()  # all tokens that end text: eos_token_id

    def tensor(self, name: str) -> Tensor:
        """One tensor, fp32 on the CPU. Raises DataError if its bytes do not match the header."""
        return self.part(name, ())

    def part(self, name: str, place: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, fp32 on the CPU. Only its rows are read. Raises DataError as `tensor` does."""
        if len(self.places[name]) == 1:
            return read_rows(self.files, name, self.places[name][0][1], place)
        first, last, _ = place[0].indices(self.shapes[name][0]) if place else (0, self.shapes[name][0], 1)
        overlaps = [
            (max(first - start, 0), min(last - start, piece.shape[0]), piece) for start, piece in self.places[name]
        ]
        return torch.cat(
            [
                read_rows(self.files, name, piece, (slice(low, high), *place[1:]))
                for low, high, piece in overlaps
                if low < high
            ]
            or [torch.empty(0, *self.shapes[name][1:])[(slice(None), *place[1:])]]
        )

    def rows(self, name: str, first: int = 0, stop: int | None = None) -> Iterator[Tensor]:
        """The rows of a tensor in [first, stop), SLAB_BYTES at a time, as `part` returns them; `stop` None means the
        end."""
        shape = self.shapes[name]
        stop = shape[0] if stop is None else stop
        rows = max(1, SLAB_BYTES // max(1, 4 * math.prod(shape[1:])))
        return (self.part(name, (slice(low, min(low + rows, stop)),)) for low in range(first, stop, rows))

    def fill(self, name: str, target: Tensor) -> None:
        """Copy a tensor into another one on any device, SLAB_BYTES at a time."""
        rows = max(1, SLAB_BYTES // max(1, math.prod(target.shape[1:]) * target.element_size()))
        with torch.no_grad():
            for first in range(0, len(target), rows):
                part = slice(first, first + rows)
                target[part].copy_(self.part(name, (part,)))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in the canonical order, one at a time."""
        return ((name, self.tensor(name)) for name in self.shapes)


def read_hugging_face(where: Path | Files) -> Weights:
    """Open a model in the Hugging Face layout. Raises MissingError or DataError that names the mismatch."""
    files = Folder(where) if isinstance(where, Path) else where
    found = read_config(f"{files.where}/config.json", _read_json(files, "config.json"))
    shape, vocabulary = found.shape, found.vocabulary
    rows = published(shape, vocabulary)
    places_by_name = _locate(files, rows, found)
    head = places_by_name.pop("lm_head.weight", None) if shape.tie_embeddings else None
    places = {
        name: [(part.first, _source(places_by_name, file, part)) for file, part in parts]
        for name, parts in rows_of(rows).items()
    }
    shapes = parameter_shapes(shape, vocabulary)
    weights = Weights(files, shape, vocabulary, found.end_of_text, shapes, places, found.stops)
    if head is not None:
        slab = max(1, SLAB_BYTES // (shape.hidden * 8))
        for first in range(0, vocabulary, slab):
            part = (slice(first, first + slab),)
            repeated = read_part(files, "lm_head.weight", head, part)
            if not torch.equal(repeated, weights.part("model.embed_tokens.weight", part)):
                raise DataError(f"{files.where}: lm_head.weight is not the embedding, though the config ties them")
    return weights


def open_weights(location: str, cache_dir: Path) -> Weights:
    """Open `model.init_from`: a folder, or an s3:// or hf:// URL, whose files are copied once into `cache_dir`."""
    from holdfast.model.hub import hub_folder, is_hub  # a served model has no store

    if is_hub(location):
        return read_hugging_face(hub_folder(location, ["*.safetensors", "*.json"]))
    from holdfast.store import in_bucket, local_folder, open_store

    if not in_bucket(location):
        return read_hugging_face(Path(location.removeprefix("file://")).expanduser())

    def wanted(name: str) -> bool:
        return name.endswith((".safetensors", ".json")) and "/" not in name

    folder = local_folder(open_store(location), "", cache_dir / "weights", wanted)
    if folder is None:
        raise MissingError(f"{location}: has no .safetensors or .json; name a folder in the Hugging Face layout")
    return read_hugging_face(folder)


def require_fit(weights: Weights, shape: Model, vocabulary: int) -> None:
    """Refuse weights that do not fit a spec's model. Raises SpecError with every different field."""
    problems = problems_with_weights(shape, weights.shape)
    if vocabulary != weights.vocabulary:
        remedy = "bring the tokenizer of those weights (kind: file)"
        if vocabulary < weights.vocabulary:
            remedy += f"; if it is theirs, they have rows to spare: write rows: {weights.vocabulary}"
        problems.append(
            Problem(
                "data.tokenizer",
                vocabulary,
                f"gives a vocabulary of another size than the {weights.vocabulary} of model.init_from",
                remedy,
            )
        )
    if problems:
        raise SpecError(problems, f"spec and {weights.files.where}")


def load_exported(
    where: Path | Files, devices: Sequence[torch.device] = (torch.device("cpu"),)
) -> tuple[Decoder, Tokenizer]:
    """The decoder (fp32, in evaluation mode) and the tokenizer of a model in the Hugging Face layout. The weights go
    directly to `devices`. Additional memory is needed only for some rows."""
    from tokenizers import Tokenizer

    weights = read_hugging_face(where)
    tokenizer = read_bytes(weights.files, "tokenizer.json", TOKENIZER_BYTES)
    if tokenizer is None:
        raise MissingError(f"{weights.files.where}/tokenizer.json: no such file; the export is not complete")
    decoder = empty_on(devices, weights.shape, weights.vocabulary, weights.end_of_text)
    for name, tensor in decoder.state_dict().items():
        weights.fill(name, tensor)
    decoder.stops = weights.stops
    try:
        return decoder.eval(), Tokenizer.from_str(tokenizer.decode())
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise DataError(f"{weights.files.where}/tokenizer.json: is no tokenizer: {shown(str(error))}") from None


def _locate(files: Files, rows: Mapping[str, list[Rows]], found: ReadConfig) -> dict[str, Place]:
    """The location of each published tensor, after checking names and shapes in the files' headers. A tensor in MXFP4
    has two: its name with BLOCKS and with SCALES."""
    places: dict[str, Place] = {}
    for file in _weight_files(files):
        places |= read_header(files, file)
    places = _of_text(places)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parts in rows.items():
        shape = shape_of(parts)
        if parts[0].experts and len(shape) == 3 and name not in places and name + BLOCKS in places:
            experts, columns, height = shape
            if columns % MXFP4_BLOCK:
                raise DataError(
                    f"{files.where}: {name + BLOCKS} has rows of {columns} numbers; MXFP4 needs multiples of "
                    f"{MXFP4_BLOCK}"
                )
            shapes[name + BLOCKS] = (experts, height, columns // MXFP4_BLOCK, MXFP4_BLOCK // 2)
            shapes[name + SCALES] = (experts, height, columns // MXFP4_BLOCK)
        else:
            shapes[name] = shape
    tied = found.shape.tie_embeddings
    derived = {name for name in places if name.endswith(".rotary_emb.inv_freq")}
    for index in range(found.shape.layers, found.shape.layers + min(found.more_layers, len(places))):
        derived |= {name for name in places if name.startswith(f"model.layers.{index}.")}
    if tied:
        derived.add("lm_head.weight")  # some writers repeat the embedding; `read_hugging_face` compares the two
    if missing := sorted(shapes.keys() - places.keys()):
        raise DataError(f"{files.where}: {_some(missing)} missing; the config asks for {len(shapes)} tensors")
    if extra := sorted(places.keys() - shapes.keys() - derived):
        raise DataError(f"{files.where}: {_some(extra)} not part of a model of this config")
    chosen = [*shapes, "lm_head.weight"] if tied and "lm_head.weight" in places else list(shapes)
    for name in chosen:
        shape = shapes["model.embed_tokens.weight" if name not in shapes else name]
        if places[name].shape != shape:
            raise DataError(
                f"{files.where}: {name} has the shape {list(places[name].shape)}; the config asks for {list(shape)}"
            )
        if name.endswith((BLOCKS, SCALES)) and places[name].dtype != "U8":
            raise DataError(f"{files.where}: {name} is {places[name].dtype}; MXFP4 needs U8")
    return {name: places[name] for name in chosen}


def _of_text(places: Mapping[str, Place]) -> dict[str, Place]:
    """The tensors of the language model, by the names of a model without images. transformers 4 and 5 write other
    names for the language model of Gemma 3."""
    if not any(".language_model." in f".{name}" for name in places):
        return dict(places)
    named = {}
    for name, place in places.items():
        before, inside, after = name.rpartition("language_model.")
        if inside:
            named[after if after.startswith(("model.", "lm_head.")) else before + after] = place
        elif name.startswith("lm_head."):
            named[name] = place
    return named


def _source(places: Mapping[str, Place], file: str, rows: Rows) -> Source:
    """Where these rows of a canonical tensor are."""
    if file not in places:
        return Source(places[file + BLOCKS], rows.shape, rows.experts, places[file + SCALES])
    place = places[file]
    if not rows.experts and place.shape != rows.shape:  # one of several tensors in the published one
        size = DTYPES[place.dtype].itemsize if place.dtype in DTYPES else 0
        start = place.start + rows.at * math.prod(rows.shape[1:]) * size
        place = place._replace(shape=rows.shape, start=start)
    return Source(place, rows.shape, rows.experts)


def _weight_files(files: Files) -> list[str]:
    if files.size("model.safetensors") is not None:
        return ["model.safetensors"]
    if files.size(INDEX) is None:
        raise MissingError(
            f"{files.where}: has neither model.safetensors nor {INDEX}; convert the weights to safetensors"
        )
    weight_map = _read_json(files, INDEX, INDEX_BYTES).get("weight_map") or {}
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise DataError(f"{files.where}/{INDEX}: weight_map is no object that names a file for each tensor")
    names = sorted(set(weight_map.values()))
    if bad := [name for name in names if Path(name).name != name or name in ("", ".", "..") or "\0" in name]:
        raise DataError(f"{files.where}/{INDEX}: {shown(bad[0])} is not a plain file name")
    return names


def _read_json(files: Files, name: str, most: int = SMALL_BYTES) -> dict[str, Any]:
    data = read_bytes(files, name, most)
    if data is None:
        raise MissingError(f"{files.where}/{name}: no such file; name a folder in the Hugging Face layout")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{files.where}/{name}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{files.where}/{name}: not a JSON object")
    return value


def _some(names: list[str]) -> str:
    text = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return text + (" are" if len(names) > 1 else " is")

"""Writer of the Hugging Face layout: safetensors, config.json and tokenizer of a model, generated as bytes in order.

The same tensors give the same bytes as the safetensors library. The result loads in `transformers` as the class of its
family. Only the currently requested rows are in memory. `hugging_face` reads the layout.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.model.config.base import Base
from holdfast.model.config.writer import config
from holdfast.model.published import Rows as PublishedRows
from holdfast.model.published import published, shape_of
from holdfast.spec.errors import DataError
from holdfast.spec.model import Model
from holdfast.spec.training import Lora

MAX_SHARD_BYTES = 5 * 10**9
# By the name in config.json: the name in safetensors, and the type. Weights are trained in fp32.
DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16)}
INDEX = "model.safetensors.index.json"

# A tensor by its canonical name, some rows at a time: all rows, or a range [first, last) (of experts).
Rows = Callable[..., Iterator[Tensor]]


class ExportFile(NamedTuple):
    """A file of an export."""

    name: str
    size: int  # bytes
    content: Callable[[], Iterator[bytes | memoryview]]  # from the first byte at every call


def export_files(
    shape: Model,
    vocabulary: int,
    rows: Rows,
    *,
    tokenizer_json: str,
    end_of_text: str,
    chat_template: str | None = None,
    base: Base | None = None,
    dtype: str = "float32",
) -> list[ExportFile]:
    """The files of a model, sorted by name, before any of them is generated. `base` has the settings of the tuned
    model. The weights are rounded once to `dtype`, a key of DTYPES.

    Raises DataError if the tokenizer has no `end_of_text`. The content of a shard raises it if `rows` returns a tensor
    of another size than the model's.
    """
    end_id = token_id(tokenizer_json, end_of_text)
    weights = published(shape, vocabulary)
    shapes = {name: shape_of(parts) for name, parts in weights.items()}
    shards = _plan(shapes, MAX_SHARD_BYTES, dtype)

    def read(name: str) -> Iterator[Tensor]:
        return (part for place in weights[name] for part in published_rows(name, place, rows))

    files = []
    placed: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files.append(tensor_file(file, {name: shapes[name] for name in sorted(names)}, read, dtype))
        placed |= dict.fromkeys(names, file)
    documents = (base or Base()).documents(config(shape, vocabulary, end_id), end_of_text, end_id)
    if dtype != "float32":
        documents["config.json"] = {**documents["config.json"], "dtype": dtype, "torch_dtype": dtype}
    if len(shards) > 1:
        total = sum(math.prod(shape) for shape in shapes.values())
        metadata = {"total_parameters": total, "total_size": total * DTYPES[dtype][1].itemsize}
        documents[INDEX] = {"metadata": metadata, "weight_map": placed}
    files += [document_file(name, document) for name, document in documents.items()]
    files.append(_document("tokenizer.json", tokenizer_json))
    if base is not None and chat_template is None and set(base.templates) == {"default"}:
        chat_template = base.templates["default"]
    if chat_template is not None and len(base.templates if base else ()) < 2:  # several are in tokenizer_config.json
        files.append(_document("chat_template.jinja", chat_template))
    return sorted(files)


def published_rows(name: str, place: PublishedRows, rows: Rows) -> Iterator[Tensor]:
    """The content of a published tensor, or of its part for one canonical tensor."""
    tensor, first, shape, _, experts = place
    if experts:  # each expert's matrix, transposed; of a vector, its part
        height = shape[0] // experts
        for start in range(0, shape[0], height):
            matrix = torch.cat(list(rows(tensor, start, start + height)))
            yield (matrix.T if len(shape) > 1 else matrix)[None]
        return
    # For a tensor published whole, request all its rows, so that surplus rows are detected.
    yield from rows(tensor) if name == tensor else rows(tensor, first, first + shape[0])


def token_id(tokenizer_json: str, token: str) -> int:
    """The id of a token. Raises DataError if the tokenizer cannot be read or does not have it."""
    from tokenizers import Tokenizer

    try:
        number = Tokenizer.from_str(tokenizer_json).token_to_id(token)
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        raise DataError(f"tokenizer.json: not a Hugging Face tokenizer: {error}") from None
    if number is None:
        raise DataError(f"tokenizer.json: has no token {token!r}; set data.tokenizer.end_of_text to one that it has")
    return int(number)


def _plan(shapes: Mapping[str, tuple[int, ...]], max_bytes: int, dtype: str) -> list[list[str]]:
    """The names in each shard, filled in order. A tensor above the limit has a separate shard."""
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * DTYPES[dtype][1].itemsize
        if shards[-1] and shard_bytes + size > max_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += size
    return shards


def tensor_file(file: str, shapes: Mapping[str, tuple[int, ...]], rows: Rows, dtype: str = "float32") -> ExportFile:
    """A safetensors file of these tensors as `dtype`, in order. The library writes files only from whole tensors. Its
    format: the length of the header in 8 bytes, the header, padded to a multiple of 8, and the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end, (label, kind) = 0, DTYPES[dtype]
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * kind.itemsize
        header[name] = {"dtype": label, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start_of_file = len(text).to_bytes(8, "little") + text

    def content() -> Iterator[bytes | memoryview]:
        yield start_of_file
        for name, shape in shapes.items():
            count = 0
            for part in rows(name):
                if tuple(part.shape[1:]) != shape[1:]:
                    raise DataError(f"{name}: the model needs {list(shape)}, and rows of {list(part.shape[1:])} came")
                count += len(part)
                yield _bytes(name, part, kind)
            if count != shape[0]:
                raise DataError(f"{name}: the model needs {list(shape)}, and {count} rows came")

    return ExportFile(file, len(start_of_file) + end, content)


def _bytes(name: str, rows: Tensor, dtype: torch.dtype) -> memoryview:
    rounded = rows.detach().to(device="cpu", dtype=dtype)
    if dtype is torch.float16 and rounded.isinf().any():
        raise DataError(f"{name}: a weight exceeds the largest number of float16; use model.export_dtype: bf16")
    array: np.ndarray = rounded.contiguous().flatten().view(torch.uint8).numpy()
    return array.data.cast("B")


def _document(name: str, text: str) -> ExportFile:
    data = text.encode()
    return ExportFile(name, len(data), partial(_once, data))


def _once(data: bytes) -> Iterator[bytes]:
    yield data


def document_file(name: str, document: object) -> ExportFile:
    """A JSON file."""
    return _document(name, json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


# Adapters in the layout of `peft`: adapter_model.safetensors and adapter_config.json, generated in order.

FOLDER = "adapter"  # within an export: `transformers` would treat a model next to adapter_config.json as its base
PREFIX = "base_model.model."  # before a tensor's name in `transformers`
HUB = "hf://"
EXPERTS = ".mlp.experts."  # in the names of their adapters
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj"}


def peft_files(
    shapes: Mapping[str, tuple[int, ...]],
    whole: Mapping[str, tuple[int, ...]],
    rows: Callable[[str], Iterator[Tensor]],
    lora: Lora,
    base: str,
) -> list[ExportFile]:
    """The files of adapters with these shapes for the weights at `base` (see `model.init_from`), and of matrices that
    are trained as a `whole`: a scalar head. Their names begin with FOLDER.

    `peft` adapts the experts of a layer as one parameter. It wraps their module once for each of the two parameters,
    and the wrapper of the second has that of the first as its base layer. The second matrices of all experts lie side
    by side, expert by expert for each column.

    In a mixture, `peft` takes modules with the names of feed-forward matrices for experts of files that are older than
    the stacked parameters, and doubles their rank. So the matrices of dense layers and shared experts are named as
    parameters too.
    """
    files: dict[str, tuple[str, tuple[int, ...], int]] = {}  # the canonical name, shape and experts of each tensor
    parameters = set[str]()
    for tensor, canonical_shape in {**shapes, **whole}.items():
        layer, is_of_experts, matrix = tensor.partition(EXPERTS)
        if not is_of_experts:
            files[PREFIX + tensor] = tensor, canonical_shape, 1
            continue
        which, _, end = matrix.partition(".")
        parameters.add(f"mlp.experts.{which}_proj")
        wrapper = "base_layer." if which == "gate_up" and f"{layer}{EXPERTS}down.{end}" in shapes else ""
        (rows_count, columns), experts = canonical_shape, 1
        if end.startswith("lora_B"):
            experts = shapes[f"{layer}{EXPERTS}{which}.lora_A.weight"][0] // columns
        shape = (rows_count // experts, experts * columns)
        files[f"{PREFIX}{layer}{EXPERTS}{wrapper}{end}"] = tensor, shape, experts

    def named(name: str) -> Iterator[Tensor]:
        tensor, _, experts = files[name]
        if experts == 1:
            return rows(tensor)
        return iter([torch.cat(list(rows(tensor))).unflatten(0, (experts, -1)).permute(1, 2, 0).flatten(1)])

    modules = {tensor.rpartition(".lora_")[0].rpartition(".")[2] for tensor in shapes if EXPERTS not in tensor}
    if parameters:
        parameters |= {f"{name}.weight" for name in modules & FEED_FORWARD}
        modules -= FEED_FORWARD
    location, _, revision = base.removeprefix(HUB).partition("@") if base.startswith(HUB) else (base, "", "")
    config = {
        "base_model_name_or_path": location,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": [name.removesuffix(".weight") for name in whole] or None,
        "peft_type": "LORA",
        "r": lora.rank,
        "revision": revision or None,
        "target_modules": sorted(modules),
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        "task_type": "SEQ_CLS" if whole else "CAUSAL_LM",
        "use_rslora": lora.rslora,
    }
    return [
        document_file(f"{FOLDER}/adapter_config.json", config),
        tensor_file(
            f"{FOLDER}/adapter_model.safetensors",
            {name: files[name][1] for name in sorted(files)},
            named,
        ),
    ]

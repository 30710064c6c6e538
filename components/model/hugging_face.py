"""The Hugging Face layout: a folder of safetensors, config.json and tokenizer, written from a model and read into one.

Promises that the same tensors give the same bytes, that what is written loads in `transformers` as LlamaForCausalLM,
and that what does not fit a spec is refused with the field to change. Nothing but JSON and safetensors is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from holdfast.components.model.decoder import Decoder
from holdfast.components.model.initialise import parameter_shapes
from holdfast.components.spec.errors import DataError, MissingError, Problem, SpecError
from holdfast.components.spec.model import Model

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MAX_SHARD_BYTES = 5 * 10**9
ITEM_BYTES = 4  # weights are exported as they are trained: fp32
INDEX = "model.safetensors.index.json"

# field of the spec -> key of config.json, and what a missing key means
_SHAPE_KEYS: dict[str, tuple[str, Any]] = {
    "layers": ("num_hidden_layers", 32),
    "hidden": ("hidden_size", 4096),
    "heads": ("num_attention_heads", 32),
    "kv_heads": ("num_key_value_heads", None),
    "ffn": ("intermediate_size", 11008),
    "context": ("max_position_embeddings", 2048),
    "norm_epsilon": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
    "init_std": ("initializer_range", 0.02),
}
_REQUIRED: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
}


def write_hugging_face(
    folder: Path,
    shape: Model,
    vocabulary: int,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    tokenizer_json: str,
    end_of_text: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write a model into `folder` and return the names of its files, sorted.

    `tensors` come in the order of `parameter_shapes`; only one shard of them is in memory. Raises DataError when a
    tensor is missing, out of order or of another shape, and when the tokenizer has no `end_of_text`.
    """
    end_id = token_id(tokenizer_json, end_of_text)
    folder.mkdir(parents=True, exist_ok=True)
    names = _write_weights(folder, parameter_shapes(shape, vocabulary), iter(tensors), max_shard_bytes)
    documents = {
        "config.json": config(shape, vocabulary, end_id),
        "generation_config.json": {"bos_token_id": end_id, "eos_token_id": end_id, "do_sample": True},
        "tokenizer_config.json": {
            "bos_token": end_of_text,
            "clean_up_tokenization_spaces": False,
            "eos_token": end_of_text,
            "model_max_length": shape.context,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }
    for name, document in documents.items():
        _write_json(folder / name, document)
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    return sorted([*names, *documents, "tokenizer.json"])


def config(shape: Model, vocabulary: int, end_id: int) -> dict[str, Any]:
    """What config.json says about a model whose documents end with the token `end_id`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_id,
        "dtype": "float32",
        "eos_token_id": end_id,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": shape.init_std,
        "intermediate_size": shape.ffn_width,
        "max_position_embeddings": shape.context,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.key_value_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "rope_theta": shape.rope_theta,  # where readers older than transformers 5 look
        "tie_word_embeddings": shape.tie_embeddings,
        "torch_dtype": "float32",  # likewise
        "use_cache": True,
        "vocab_size": vocabulary,
    }


def token_id(tokenizer_json: str, token: str) -> int:
    """The id of a token. Raises DataError when the tokenizer cannot be read or does not have it."""
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_str(tokenizer_json).token_to_id(token)
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        raise DataError(f"tokenizer.json: not a Hugging Face tokenizer: {error}") from None
    if found is None:
        raise DataError(f"tokenizer.json: has no token {token!r}; set data.tokenizer.end_of_text to one that it has")
    return int(found)


def _write_weights(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterator[tuple[str, Tensor]], max_bytes: int
) -> list[str]:
    shards = _plan(shapes, max_bytes)
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(dict(_take(shard, shapes, tensors)), folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(shard, file)
    if extra := next(tensors, None):
        raise DataError(f"{extra[0]}: a tensor beyond the {len(shapes)} of this model")
    if len(shards) == 1:
        return ["model.safetensors"]
    total = sum(math.prod(shape) for shape in shapes.values())
    metadata = {"total_parameters": total, "total_size": total * ITEM_BYTES}
    _write_json(folder / INDEX, {"metadata": metadata, "weight_map": placed})
    return [INDEX, *sorted(set(placed.values()))]


def _plan(shapes: Mapping[str, tuple[int, ...]], max_bytes: int) -> list[list[str]]:
    """Names of each shard, filled in order; a tensor above the limit has a shard of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * ITEM_BYTES
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _take(
    names: Iterable[str], shapes: Mapping[str, tuple[int, ...]], tensors: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        given, tensor = next(tensors, ("nothing", torch.empty(0)))
        if given != name or tuple(tensor.shape) != shapes[name]:
            raise DataError(
                f"{name}: expected next, of shape {list(shapes[name])}; got {given} of shape {list(tensor.shape)}"
            )
        yield name, tensor.detach().to(device="cpu", dtype=torch.float32).contiguous()


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


class Weights(NamedTuple):
    """A model in the Hugging Face layout, its names, shapes and config checked; tensors are read on demand."""

    folder: Path
    shape: Model
    vocabulary: int
    end_of_text: int | None  # eos_token_id
    files: dict[str, str]  # tensor -> file in `folder`

    def tensor(self, name: str) -> Tensor:
        """One tensor, fp32 on the CPU. Raises DataError when its bytes are not what the header says."""
        return _read_tensor(self.folder / self.files[name], name)

    def part(self, name: str, place: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, likewise; nothing else of it is read."""
        return _read_tensor(self.folder / self.files[name], name, place)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in the canonical order, one at a time."""
        return ((name, self.tensor(name)) for name in self.files)


def read_hugging_face(folder: Path) -> Weights:
    """Open a Llama in the Hugging Face layout. Raises MissingError or DataError, naming what does not fit."""
    path = folder / "config.json"
    settings = _read_json(path)
    architectures = settings.get("architectures") or ["LlamaForCausalLM"]
    if architectures != ["LlamaForCausalLM"]:
        raise DataError(f"{path}: architectures is {architectures}; only ['LlamaForCausalLM'] can be read")
    for key, needed in _REQUIRED.items():
        if settings.get(key, needed) != needed:
            raise DataError(f"{path}: {key} is {settings[key]!r}; only {needed!r} can be read")
    shape = _shape(path, settings)
    vocabulary = settings.get("vocab_size", 32000)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise DataError(f"{path}: vocab_size is {vocabulary!r}; a positive number is needed")
    end_of_text = settings.get("eos_token_id")
    if isinstance(end_of_text, list):
        end_of_text = end_of_text[0] if end_of_text else None
    files = _locate(folder, parameter_shapes(shape, vocabulary), tied=shape.tie_embeddings)
    weights = Weights(folder, shape, vocabulary, end_of_text, files)
    if shape.tie_embeddings and (head := files.pop("lm_head.weight", None)):
        repeated = _read_tensor(folder / head, "lm_head.weight")
        if not torch.equal(repeated, weights.tensor("model.embed_tokens.weight")):
            raise DataError(f"{folder}: lm_head.weight is not the embedding, though the config ties them")
    return weights


def open_weights(location: str, cache_dir: Path) -> Weights:
    """Open `model.init_from`: a folder, or an s3:// URL, whose files are copied into `cache_dir` once."""
    if not location.startswith("s3://"):
        return read_hugging_face(Path(location.removeprefix("file://")).expanduser())
    from holdfast.components.store import local_folder, open_store

    def wanted(name: str) -> bool:
        return name.endswith((".safetensors", ".json")) and "/" not in name

    folder = local_folder(open_store(location), "", cache_dir / "weights", wanted)
    if folder is None:
        raise MissingError(f"{location}: has no .safetensors or .json; name a folder in the Hugging Face layout")
    return read_hugging_face(folder)


def require_fit(weights: Weights, shape: Model, vocabulary: int) -> None:
    """Refuse weights that are not of a spec's model. Raises SpecError with every field that differs."""
    problems = [
        Problem(f"model.{field}", ours, f"is {theirs!r} in the weights of model.init_from", f"write {field}: {theirs}")
        for field, ours, theirs in (
            (field, getattr(shape, attribute), getattr(weights.shape, attribute))
            for field, attribute in (
                ("layers", "layers"),
                ("hidden", "hidden"),
                ("heads", "heads"),
                ("kv_heads", "key_value_heads"),
                ("ffn", "ffn_width"),
                ("rope_theta", "rope_theta"),
                ("norm_epsilon", "norm_epsilon"),
                ("tie_embeddings", "tie_embeddings"),
            )
        )
        if ours != theirs
    ]
    if vocabulary != weights.vocabulary:
        problems.append(
            Problem(
                "data.tokenizer",
                vocabulary,
                f"gives a vocabulary of another size than the {weights.vocabulary} of model.init_from",
                "bring the tokenizer of those weights (kind: file)",
            )
        )
    if problems:
        raise SpecError(problems, f"spec and {weights.folder}")


def load_exported(folder: Path) -> tuple[Decoder, Tokenizer]:
    """The decoder (fp32, on the CPU, in evaluation mode) and the tokenizer of a folder in the Hugging Face layout."""
    from tokenizers import Tokenizer

    weights = read_hugging_face(folder)
    decoder = Decoder.empty(weights.shape, weights.vocabulary, end_of_text=weights.end_of_text)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(weights.tensor(name))
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MissingError(f"{path}: no such file; the export is not complete")
    return decoder.eval(), Tokenizer.from_file(str(path))


def _shape(path: Path, settings: Mapping[str, Any]) -> Model:
    rope = dict(settings.get("rope_parameters") or {})
    scaling = settings.get("rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or (scaling and scaling.get("rope_type", scaling.get("type")) != "default"):
        raise DataError(f"{path}: rotary positions are scaled ({scaling or rope}); only unscaled ones can be read")
    values = {field: settings.get(key, default) for field, (key, default) in _SHAPE_KEYS.items()}
    values["rope_theta"] = rope.get("rope_theta", settings.get("rope_theta", 10_000.0))
    try:
        shape = Model.model_validate(values)
    except ValidationError as error:
        detail = error.errors()[0]
        key = _SHAPE_KEYS.get(str(detail["loc"][0]), ("rope_theta", None))[0]
        raise DataError(f"{path}: {key} is {detail['input']!r}: {detail['msg']}") from None
    if shape.hidden % shape.heads or shape.heads % shape.key_value_heads:
        raise DataError(
            f"{path}: {shape.heads} heads do not divide a width of {shape.hidden}, "
            f"or are not a multiple of {shape.key_value_heads} key/value heads"
        )
    if settings.get("head_dim") not in (None, shape.head_width):
        raise DataError(f"{path}: head_dim is {settings['head_dim']}; only hidden_size / heads can be read")
    return shape


def _locate(folder: Path, shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> dict[str, str]:
    """Where each tensor is, after checking names and shapes in the files' headers."""
    files = _weight_files(folder)
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    found[name] = (file, tuple(opened.get_slice(name).get_shape()))
        except FileNotFoundError:
            raise MissingError(f"{folder / file}: no such file, though {INDEX} lists it") from None
        except (SafetensorError, OSError) as error:
            raise DataError(f"{folder / file}: not a whole safetensors file: {error}; download it again") from None
    derived = {name for name in found if name.endswith(".rotary_emb.inv_freq")}
    if tied:
        derived.add("lm_head.weight")  # some writers repeat the embedding; `read_hugging_face` compares the two
    if missing := sorted(shapes.keys() - found.keys()):
        raise DataError(f"{folder}: {_some(missing)} missing; the config asks for {len(shapes)} tensors")
    if extra := sorted(found.keys() - shapes.keys() - derived):
        raise DataError(f"{folder}: {_some(extra)} not part of a Llama of this config")
    for name, shape in shapes.items():
        if found[name][1] != shape:
            raise DataError(f"{folder}: {name} has the shape {list(found[name][1])}; the config asks for {list(shape)}")
    kept = [*shapes, "lm_head.weight"] if tied and "lm_head.weight" in found else list(shapes)
    return {name: found[name][0] for name in kept}


def _read_tensor(path: Path, name: str, place: tuple[slice, ...] = (slice(None),)) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_slice(name)[place]
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: {name} cannot be read: {error}") from None
    return tensor.float()


def _weight_files(folder: Path) -> list[str]:
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if not (folder / INDEX).is_file():
        raise MissingError(f"{folder}: has neither model.safetensors nor {INDEX}; convert the weights to safetensors")
    files = sorted(set((_read_json(folder / INDEX).get("weight_map") or {}).values()))
    if bad := [file for file in files if Path(file).name != file]:
        raise DataError(f"{folder / INDEX}: {bad[0]!r} is not a plain file name")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingError(f"{path}: no such file; name a folder in the Hugging Face layout") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: not a JSON object")
    return value


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return shown + (" are" if len(names) > 1 else " is")

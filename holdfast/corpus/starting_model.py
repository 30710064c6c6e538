"""`model.from`: the fields of a spec that a published model determines, filled in before a run is submitted.

Promises that the resulting spec is the same as with the fields written out, and that a field that contradicts the
model is refused, also if the spec names `model.init_from` directly. Every later part sees a plain spec. Weights are not
read here: the train step checks them.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from holdfast.corpus.chat import ending_of_turns, read_settings, read_template
from holdfast.corpus.files import read_user_file
from holdfast.corpus.tokenizer import MAX_FILE_BYTES
from holdfast.dataset.vocabulary import token_ids
from holdfast.model.config.base import OWN
from holdfast.model.config.fixed_fields import fixed_fields, problems_with_weights
from holdfast.model.config.reader import ReadConfig, read_config
from holdfast.model.hub import hub_commit, is_hub, parse_place
from holdfast.spec import Spec
from holdfast.spec.data import Data
from holdfast.spec.errors import DataError, HoldfastError, MissingError, Problem, SpecError
from holdfast.spec.load import FROM, written_leaves
from holdfast.spec.model import Model
from holdfast.store import in_bucket

log = logging.getLogger("holdfast.corpus")

_NAME = f"model.{FROM}"
_LAYOUT = "name a folder in the Hugging Face layout, s3://bucket/folder or hf://owner/name[@revision][/folder]"


def fill_from_model(tree: dict[str, Any]) -> list[Problem]:
    """Replace `model.from` in the tree of a spec by the fields that the model determines.

    Returns the fields that contradict the model. They then have the model's value, so that rules can check the rest.
    Raises DataError for a model that no family expresses, MissingError, and what reading the Hub or S3 raises.
    """
    model = tree["model"]
    source = model.pop(FROM)
    if not isinstance(source, str) or not source:
        return [Problem(_NAME, source, "is not the place of a model", _LAYOUT)]
    place = _pinned(source)
    try:
        config = read_settings(f"{place}/config.json", _NAME)
    except MissingError as error:
        if in_bucket(place):
            error.problem = Problem(_NAME, source, "is in a bucket that does not exist", _LAYOUT)
        raise
    if not config:
        lost = "://" not in source and not Path(source).is_dir()
        raise _missing(_NAME, source, "is no folder" if lost else "has no config.json", _LAYOUT)
    read = read_config(f"{place}/config.json", config)
    problems = _fill_model(model, source, place, config, read)
    data = tree.get("data")
    if isinstance(data, dict) and isinstance(tokenizer := data.setdefault("tokenizer", {}), dict):
        problems += _fill_tokenizer(data, tokenizer, source, place, config, read)
    return problems


def problems_with_start(spec: Spec, *, remote: bool) -> list[Problem]:
    """The fields that contradict the config.json of `model.init_from`. Buckets and the Hub are read only if `remote`.

    Empty if the config cannot be read from here: the train step checks the weights in any case. Raises DataError for a
    config that no family expresses.
    """
    location = spec.model.init_from
    if location is None or ("://" in location and not location.startswith("file://") and not remote):
        return []
    path = f"{location.rstrip('/')}/config.json"
    try:
        settings = read_settings(path, "model.init_from")
    except (DataError, SpecError):
        raise
    except (HoldfastError, OSError) as error:
        log.debug("%s is not read here: %s", path, error)
        return []
    if not settings:
        return []
    read = read_config(path, settings)
    problems = problems_with_weights(spec.model, read.shape)
    rows = spec.data.tokenizer.rows
    if rows is not None and rows != read.vocabulary:
        message = f"is {read.vocabulary} in the weights of model.init_from"
        problems.append(Problem("data.tokenizer.rows", rows, message, f"write rows: {read.vocabulary}"))
    return problems


def require_start(spec: Spec) -> None:
    """Raise SpecError with every field that contradicts `model.init_from`, if that can be read from here."""
    if problems := problems_with_start(spec, remote=True):
        raise SpecError(problems, f"spec and {spec.model.init_from}")


def teacher_of(spec: Spec) -> Model | None:
    """The shape of the teacher of a distillation, with the context of the run. None without a teacher, and if its
    config.json cannot be read from here."""
    location = spec.training.distillation.teacher
    if location is None:
        return None
    path = f"{location.rstrip('/')}/config.json"
    try:
        shape = read_config(path, read_settings(path, "training.distillation.teacher")).shape
    except HoldfastError as error:
        log.warning("training.distillation.teacher: the plan does not count it: %s", error)
        return None
    return shape.model_copy(update={"context": spec.model.context})


def _missing(field: str, value: str, message: str, remedy: str) -> MissingError:
    error = MissingError(f"{field}: {value} {message}; {remedy}")
    error.problem = Problem(field, value, message, remedy)
    return error


def _pinned(source: str) -> str:
    """The place of a model without a trailing slash; on the Hub with the commit that its revision names now."""
    if not is_hub(source):
        return source.rstrip("/") or source
    place = parse_place(source.rstrip("/"))
    inside = f"/{place.path}" if place.path else ""
    return f"hf://{place.repository}@{hub_commit(source.rstrip('/'), _NAME)}{inside}"


def _fill_model(
    model: dict[str, Any], source: str, place: str, config: Mapping[str, Any], read: ReadConfig
) -> list[Problem]:
    problems = []
    if (given := model.get("init_from")) not in (None, source, place):
        message = f"and {_NAME} = {source} both say where the weights are"
        problems.append(Problem("model.init_from", given, message, "remove one of them"))
    model["init_from"] = place
    fixed, written = fixed_fields(read.shape), dict(written_leaves(model))
    for field in fixed:
        if written.get(field) is None and (value := _get(read.shape, field)) is not None:
            _set(model, field, value)
    try:
        actual = fixed_fields(Model.model_validate(model), read.shape)
    except ValidationError:
        actual = fixed  # the loader reports them
    for field, value in fixed.items():
        if written.get(field) is not None and actual[field] != value:
            problems.append(
                Problem(
                    f"model.{field}",
                    written[field],
                    f"is {value!r} in the weights of {_NAME} = {source}",
                    "remove the field, or use other weights",
                )
            )
            group = field.partition(".")[0]
            if group == "rope_scaling":  # fields of another kind are not used
                model[group] = read.shape.rope_scaling.model_dump(exclude_unset=True)
            else:
                _set(model, field, _get(read.shape, field))
    if read.shape.head != "tokens":
        model.setdefault("head", read.shape.head)
    longest = config.get("max_position_embeddings")
    longest = max(longest if isinstance(longest, int) else 0, read.shape.context)
    context = model.get("context")
    if context is None:
        model["context"] = read.shape.context
    elif isinstance(context, int) and context > longest:
        problems.append(
            Problem(
                "model.context",
                context,
                f"is longer than the context of {_NAME} = {source}, whose max_position_embeddings is {longest}",
                f"use at most {longest}",
            )
        )
        model["context"] = longest
    return problems


def _fill_tokenizer(
    data: dict[str, Any],
    tokenizer: dict[str, Any],
    source: str,
    place: str,
    config: Mapping[str, Any],
    read: ReadConfig,
) -> list[Problem]:
    problems = []
    if (kind := tokenizer.get("kind", "file")) == "bpe":
        message = f"trains other tokens than those of {_NAME} = {source}"
        problems.append(Problem("data.tokenizer.kind", kind, message, "remove the field"))
    tokenizer["kind"] = kind = "file" if kind == "bpe" else kind
    path = tokenizer.get("path") or f"{place}/tokenizer.json"
    tokenizer["path"] = path
    if kind != "file" or not isinstance(path, str):
        return problems  # the loader reports it
    text = _read_tokenizer(path, source, place)
    ids = token_ids(text)
    rows, count = tokenizer.get("rows"), 1 + max(ids.values())
    if count > read.vocabulary:
        message = f"has {count} tokens, and the embedding of {_NAME} = {source} has {read.vocabulary} rows"
        problems.append(Problem("data.tokenizer.path", path, message, "name the tokenizer of these weights"))
    elif rows is not None and rows != read.vocabulary:
        message = f"is {read.vocabulary} in the weights of {_NAME} = {source}"
        problems.append(Problem("data.tokenizer.rows", rows, message, "remove the field"))
    if count < read.vocabulary:
        tokenizer["rows"] = read.vocabulary
    end = tokenizer.get("end_of_text")
    if end is None:
        try:
            ending = _end_of_text(data, text, ids, config, read)
        except ValidationError:
            return problems  # the loader reports it
        if ending is None:
            message = f"is not named by {source}: neither tokenizer_config.json nor config.json has an end token"
            problems.append(
                Problem("data.tokenizer.end_of_text", None, message, "write the token that ends a document")
            )
        else:
            tokenizer["end_of_text"] = ending
    elif isinstance(end, str) and end not in ids:
        message = f"is no token of {path}"
        remedy = "remove the field to use the end token of the model, or write one of its tokens"
        problems.append(Problem("data.tokenizer.end_of_text", end, message, remedy))
    return problems


def _read_tokenizer(path: str, source: str, place: str) -> str:
    name = _NAME if path == f"{place}/tokenizer.json" else "data.tokenizer.path"
    raw = read_user_file(path, name, MAX_FILE_BYTES, missing=None)
    if raw is None:
        remedy = "save the model's fast tokenizer there, or name its tokenizer.json in data.tokenizer.path"
        raise _missing(name, source if name == _NAME else path, "has no tokenizer.json", remedy)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise DataError(f"{name}: {path} is not UTF-8; name a Hugging Face tokenizer.json") from None


def _end_of_text(
    data: dict[str, Any], tokenizer_json: str, ids: dict[str, int], config: Mapping[str, Any], read: ReadConfig
) -> str | None:
    """The token that ends a document: what the template ends the assistant's turns with, the end of documents of an
    export of Holdfast, `eos_token` of the tokenizer, or else the first `eos_token_id` of config.json. Raises
    ValidationError for a section `data` that is refused."""
    by_id = {number: token for token, number in ids.items()}
    if data.get("kind") in ("chat", "preferences"):
        template = read_template(Data.model_validate({"sources": [{"uri": "x"}], **data}))
        if template.text and (ending := ending_of_turns(tokenizer_json, template)) is not None:
            return ending
    own = by_id.get(read.end_of_text) if config.get(OWN) and read.end_of_text is not None else None
    folder = str(data["tokenizer"]["path"]).rpartition("/")[0]
    eos = read_settings(f"{folder}/tokenizer_config.json" if folder else "tokenizer_config.json", _NAME).get(
        "eos_token"
    )
    eos = eos.get("content") if isinstance(eos, dict) else eos
    return own or (eos if eos in ids else None) or by_id.get(-1 if read.end_of_text is None else read.end_of_text)


def _get(shape: Model, field: str) -> Any:
    value: Any = shape
    for name in field.split("."):
        value = getattr(value, name)
    return value


def _set(section: dict[str, Any], field: str, value: Any) -> None:
    *sections, name = field.split(".")
    for part in sections:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            return  # the loader reports it
    section[name] = value

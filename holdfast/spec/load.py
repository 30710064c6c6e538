"""From YAML text and `key=value` overrides to a checked spec.

Promises that one error reports all problems of a spec, each with the field, the value and the remedy. Leaves the checks
of single fields to the models, and of combinations to the rules.
"""

import copy
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from holdfast.spec import rules, strict_yaml
from holdfast.spec.errors import MissingError, Problem, SpecError
from holdfast.spec.fields import allowed, find, section_of
from holdfast.spec.functions import USE
from holdfast.spec.redaction import names_secret
from holdfast.spec.section import RefusedFieldError
from holdfast.spec.training import AUTO
from holdfast.spec.tree import SPEC_VERSION, Spec

MAX_BYTES = 256 * 2**10
DEEPEST = 32  # maximum parts of the name of a field
Places = dict[strict_yaml.Path, str]
# Replaces `model.from` in the tree of a spec by the fields that the model determines. Returns the fields that disagree.
Fill = Callable[[dict[str, Any]], Sequence[Problem]]
FROM = "from"  # key of the section `model`
# Placeholders for required fields that were refused, so that the rules can check the remaining fields.
REQUIRED: dict[tuple[str, ...], object] = {
    ("name",): "x",
    ("data",): {"sources": [{"uri": "x"}]},
    ("data", "sources"): [{"uri": "x"}],
}

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "dict": "names with values",
    "model": "a group of fields",
}
_OWN_FUNCTION = "FILE.py:FUNCTION, such as mine.py:focal"
_OUT_OF_RANGE = ("greater_than_equal", "greater_than", "less_than_equal", "less_than")


def load_spec(path: str | Path, overrides: Iterable[str] = (), fill: Fill | None = None) -> Spec:
    """Read and check the spec at `path`, as `parse_spec` does. Raises MissingError or SpecError."""
    return parse_spec(read_spec_text(Path(path)), overrides, source=str(path), fill=fill)


def read_spec_text(path: Path) -> str:
    """The text of the spec at `path`. Raises MissingError, and SpecError if it is not text or too large for a spec."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise MissingError(f"{path}: no such file; use the path of a spec, such as examples/quickstart.yaml") from None
    except OSError as error:
        raise MissingError(f"{path}: cannot be read ({error.strerror}); use the path of a readable file") from None
    if len(raw) > MAX_BYTES:
        raise SpecError(
            [Problem("(file)", f"over {MAX_BYTES} bytes", "is too large for a spec", "check that the path is right")],
            str(path),
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = Problem(
            "(file)", raw[max(0, error.start - 10) : error.start + 10], "is not UTF-8", "save it as UTF-8"
        )
        raise SpecError([problem], str(path)) from None


def parse_spec(
    text: str | Mapping[str, Any], overrides: Iterable[str] = (), source: str = "spec", fill: Fill | None = None
) -> Spec:
    """Check a spec, given as YAML text or as a dictionary. Raises SpecError with every problem found.

    Without `fill`, `model.from` is refused: only the machine that submits a run reads the model.
    """
    if isinstance(text, str):
        tree, places = _read(text, source)
    else:
        tree, places = copy.deepcopy(dict(text)), {}
    if tree.get("parallel") == AUTO:
        tree["parallel"] = {"auto": True}  # so that --set can set fields of the section
    for override in overrides:
        _note(places, _apply(tree, override))
    problems: Sequence[Problem] = ()
    if isinstance(model := tree.get("model"), dict) and FROM in model:
        source_of_model = model[FROM]
        try:
            problems = (fill or _refuse_from)(tree)
        except MissingError as error:
            _raise_with_fields(error, source_of_model, tree, places, source)
    return _checked(tree, places, source, problems)


def _refuse_from(tree: dict[str, Any]) -> list[Problem]:
    value = tree["model"].pop(FROM)
    remedy = "submit it with `holdfast run`, or write the fields that `holdfast validate` prints instead of it"
    return [Problem(f"model.{FROM}", value, "is replaced by fields of the spec before a step reads it", remedy)]


def _raise_with_fields(
    error: MissingError, source_of_model: object, tree: dict[str, Any], places: Places, source: str
) -> NoReturn:
    """Raise the error of a model that is missing, with every refused field of the spec if there are any. Rules need
    the model's shape, so they are not checked."""
    try:
        Spec.model_validate(tree)
    except ValidationError as refused:
        message = str(error).removeprefix(f"model.{FROM}: ")
        unknown = Problem(f"model.{FROM}", source_of_model, message, "name a model that can be read")
        problems = [error.problem or unknown, *_problems(refused.errors(include_url=False))]
        raise SpecError([_placed(problem, places) for problem in problems], source) from None
    raise error


def _read(text: str, source: str) -> tuple[dict[str, Any], Places]:
    """The tree of a YAML text, and the places of its fields. Raises SpecError."""
    if len(text) > MAX_BYTES:
        raise SpecError(
            [Problem("(spec)", f"{len(text)} characters", "is too large for a spec", "check that the text is right")],
            source,
        )
    try:
        tree, lines = strict_yaml.read_placed(text)
    except strict_yaml.YamlRefusedError as error:
        place = _in_file(source, error.place) if error.place else ""
        remedy = "indent with spaces instead of tabs" if r"character '\t'" in str(error) else "correct the syntax"
        problem = Problem("(spec)", None, f"not valid YAML: {error}", remedy, place)
        raise SpecError([problem], source) from None
    if not isinstance(tree, dict):
        raise SpecError(
            [Problem("(spec)", tree, "is not a mapping of sections", "start from examples/quickstart.yaml")], source
        )
    return tree, {path: _in_file(source, place) for path, place in lines.items()}


def _checked(tree: dict[str, Any], places: Places, source: str, found: Sequence[Problem]) -> Spec:
    """The spec of a tree. `found` are problems that are known already."""
    version = tree.get("version", SPEC_VERSION)
    if isinstance(version, int) and version > SPEC_VERSION:
        raise SpecError(
            [
                Problem(
                    "version",
                    version,
                    "comes from a newer Holdfast",
                    f"upgrade Holdfast, or write version: {SPEC_VERSION}",
                    _place_of(("version",), places),
                )
            ],
            source,
        )
    try:
        spec = Spec.model_validate(tree)
        problems = [*found, *rules.problems(spec)]
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [*found, *_problems(details)]
        if (part := _without(tree, details)) is not None:
            problems += rules.problems_of_part(part)
    if problems:
        raise SpecError([_placed(problem, places) for problem in problems], source)
    return spec


def written_leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values in the tree of a spec, by dotted name. A list counts as one value."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from written_leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def place_problems(problems: Iterable[Problem], path: Path, overrides: Iterable[str] = ()) -> SpecError:
    """The error for problems that were found after the spec at `path` was read, each with its line."""
    tree, places = _read(read_spec_text(path), str(path))
    for override in overrides:
        _note(places, _apply(tree, override))
    return SpecError([_placed(problem, places) for problem in problems], str(path))


def written_spec(spec: Spec) -> dict[str, Any]:
    """The fields that a person gave, without defaults; `parse_spec` reads them back to an equal spec."""
    tree = spec.model_dump(mode="json", exclude_unset=True)
    return {name: value for name, value in tree.items() if name != "data" or value}  # empty for a script without data


def dump_written(spec: Spec) -> str:
    """`written_spec` as YAML."""
    return strict_yaml.write(written_spec(spec))


def dump_spec(spec: Spec) -> str:
    """The spec as YAML with every default written out; `parse_spec` reads it back to an equal spec."""
    return strict_yaml.write(spec.model_dump(mode="json"))


def _in_file(source: str, place: strict_yaml.Place) -> str:
    return f"{source}:{place[0]}:{place[1]}"


def _note(places: Places, path: strict_yaml.Path) -> None:
    """From now on the field at `path`, and what is below it, comes from the command line."""
    for place in [place for place in places if place[: len(path)] == path]:
        del places[place]
    for length in range(len(path), 0, -1):
        places.setdefault(path[:length], "--set")


def _placed(problem: Problem, places: Places) -> Problem:
    return replace(problem, place=_place_of(tuple(problem.field.split(".")), places))


def _place_of(path: strict_yaml.Path, places: Places) -> str:
    """The place of a field, or else of the group around it. Empty if neither is given."""
    return next((places[path[:length]] for length in range(len(path), 0, -1) if path[:length] in places), "")


def _without(tree: dict[str, Any], details: list[ErrorDetails]) -> Spec | None:
    """The spec without the refused fields, for rules that do not need them. None if more than those is wrong."""
    tree = copy.deepcopy(tree)
    refused: set[tuple[str, ...]] = set()
    for detail in details:
        path, info = _field_of(detail["loc"])
        if info is not None:
            refused.add(path)
        node: Any = tree
        for name in path[:-1]:
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(path[-1], None)
            if info is None and (meant := _meant(detail["loc"])) and meant[-1] not in node:
                refused.add(meant)  # its default is not what the author wrote
    for path in refused & REQUIRED.keys():
        section = tree
        for name in path[:-1]:
            section = section.setdefault(name, {})
        section[path[-1]] = REQUIRED[path]
    try:
        spec = Spec.model_validate(tree)
    except ValidationError:  # there are more faults: the problems of fields are reported first
        return None
    for path in refused:
        with suppress(RefusedFieldError, KeyError):  # its section was also refused
            del reduce(getattr, path[:-1], spec).__dict__[path[-1]]
    return spec


def _meant(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The field that the author of an unknown key probably meant. Empty if none is close."""
    section, _, _ = find(location)
    close = _close(str(location[-1]), section.model_fields) if section else []
    return (*map(str, location[:-1]), close[0]) if close else ()


def _close(key: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(key[:100], known, 1, cutoff=0.8 if names_secret(key) else 0.5)


def _field_of(location: tuple[int | str, ...]) -> tuple[tuple[str, ...], FieldInfo | None]:
    """The field that contains a location: for an item, its list or mapping. None for a key that is not a field."""
    path: tuple[str, ...] = ()
    info: FieldInfo | None = None
    for part in location:
        if isinstance(part, int):
            break
        _, field, item = find((*path, part))
        if item:
            break
        path, info = (*path, part), field
    return path, info


def _apply(tree: dict[str, Any], override: str) -> strict_yaml.Path:
    """Set the field that `override` names, and create missing sections. Returns its path."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SpecError([Problem("--set", override, "is not key=value", "write it as training.steps=50")], "overrides")
    if len(keys) > DEEPEST:
        message = f"names a field of {len(keys)} parts; no field has more than {DEEPEST}"
        raise SpecError([Problem("--set", override, message, "use a field of docs/spec.md")], "overrides")
    try:
        value = strict_yaml.read(text)
    except strict_yaml.YamlRefusedError:
        value = text
    node: Any = tree
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        index: Any = key
        if isinstance(node, list):
            index = int(key) if re.fullmatch(r"[0-9]{1,6}", key) else len(node)
            if index >= len(node):
                remedy = f"use an index below {len(node)}" if node else "set the whole list, because it is empty"
                problem = Problem(".".join(keys[: depth + 1]), override, "is not an item of the list", remedy)
                raise SpecError([problem], "overrides")
        elif isinstance(node, dict):
            if not last and node.get(key) is None:
                node[key] = {}
        else:
            problem = Problem(".".join(keys[:depth]), override, "has no fields below it", "name the field itself")
            raise SpecError([problem], "overrides")
        if last:
            node[index] = value
        else:
            node = node[index]
    return tuple(keys)


def _problems(details: list[ErrorDetails]) -> list[Problem]:
    """One problem for each fault. A list whose items were refused is not also reported as too short."""
    locations = [detail["loc"] for detail in details]
    return [
        _problem(detail)
        for detail in details
        if not (
            detail["type"] == "too_short"
            and any(other[: len(detail["loc"])] == detail["loc"] != other for other in locations)
        )
    ]


def _problem(detail: ErrorDetails) -> Problem:
    location, kind = detail["loc"], detail["type"]
    field = ".".join(_printable(part) for part in location)
    section, info, item = find(location)
    if info is None:
        return _unknown_key(field, str(location[-1]), detail["input"], list(section.model_fields) if section else [])
    remedy = _remedy(detail, info, item)
    value: object = _shown(str(location[-1]), detail["input"]) if item else detail["input"]
    match kind:
        case "missing":
            value, message = None, "is required"
            inner = section_of(info.annotation)
            remedy = (
                f"add it: {allowed(info, item)}. {info.description}" if inner is None else f"add the section {field}"
            )
        case "literal_error":
            message = "is not one of the choices"
            choices = re.findall(r"`([^`]*)`", allowed(info, item))
            if close := difflib.get_close_matches(str(value), choices, 1):
                remedy = f"did you mean {close[0]!r}? {remedy}"
        case "string_pattern_mismatch":
            message = "has a form that is not allowed"
        case "string_too_short":
            message = "is too short"
        case "too_short":
            message = "has too few items"
        case "too_long":
            message = "has too many items"
        case _ if kind in _OUT_OF_RANGE:
            message = "is out of range"
        case _ if kind.split("_")[0] in _KINDS:
            message = f"is {'empty, and so not' if value is None else 'not'} {_KINDS[kind.split('_')[0]]}"
            if value is None and (inner := section_of(info.annotation)):
                message = "is empty"
                remedy = f"write its fields below it ({', '.join(inner.model_fields)}), or leave it out"
        case _:
            message = detail["msg"][0].lower() + detail["msg"][1:]
    return Problem(field, value, message, remedy)


def _remedy(detail: ErrorDetails, info: FieldInfo, item: bool) -> str:
    """What to write in a field, or in an item of its list."""
    if detail.get("ctx", {}).get("pattern") == USE:
        return f"use {_OWN_FUNCTION}. {info.description}"
    own = f" A function of your own is {_OWN_FUNCTION}." if detail["loc"][-2:] == ("objective", "kind") else ""
    return f"use {allowed(info, item)}. {info.description}{own}"


def _shown(key: str, value: object) -> object:
    return "(hidden)" if names_secret(key) else value


def _unknown_key(field: str, key: str, value: object, known: list[str]) -> Problem:
    secret = names_secret(key)
    close = _close(key, known)
    if secret:
        value = "(hidden)"
        if not close:
            remedy = "remove it; credentials come from the environment, never from a spec"
            return Problem(field, value, "is not a field of the spec", remedy)
    remedy = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
    return Problem(field, value, "is not a field of the spec", remedy)


def _printable(part: int | str) -> str:
    text = str(part)
    if len(text) > 60:
        text = text[:57] + "..."
    return text if text.isprintable() else repr(text)

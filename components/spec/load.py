"""From YAML text and `key=value` overrides to a checked spec.

Promises that whatever is wrong is said at once, for every field, with the value and the remedy. Leaves the meaning of
single fields to the models and of combinations to the rules.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from components.spec import rules
from components.spec.errors import MissingError, Problem, SpecError
from components.spec.tree import SPEC_VERSION, Spec

MAX_BYTES = 1 << 20


class _StrictLoader(yaml.SafeLoader):
    """YAML without duplicate keys and without aliases, which a bounded file could use to grow without bound."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(
                None, None, "aliases (*name) are not supported; write the value out", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "keys must be plain words", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_spec(path: str | Path, overrides: Iterable[str] = ()) -> Spec:
    """Read and check the spec at `path`. Raises MissingError or SpecError."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise MissingError(f"{path}: no such file; name a spec such as examples/quickstart.yaml") from None
    except (IsADirectoryError, PermissionError) as error:
        raise MissingError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise SpecError(
            [Problem("(file)", f"over {MAX_BYTES} bytes", "is too large for a spec", "is it the right file?")],
            str(path),
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = Problem(
            "(file)", raw[max(0, error.start - 10) : error.start + 10], "is not UTF-8", "save it as UTF-8"
        )
        raise SpecError([problem], str(path)) from None
    return parse_spec(text, overrides, source=str(path))


def parse_spec(text: str, overrides: Iterable[str] = (), source: str = "spec") -> Spec:
    """Check a spec given as YAML text. Raises SpecError with every problem found."""
    if len(text) > MAX_BYTES:
        raise SpecError(
            [Problem("(spec)", f"{len(text)} characters", "is too large for a spec", "is it the right text?")], source
        )
    try:
        tree = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader with more refusals
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "(spec)"
        message = getattr(error, "problem", None) or "cannot be read"
        raise SpecError([Problem(where, None, f"not valid YAML: {message}", "mend the syntax")], source) from None
    if not isinstance(tree, dict):
        raise SpecError(
            [Problem("(spec)", tree, "is not a mapping of sections", "start from examples/quickstart.yaml")], source
        )
    version = tree.get("version", SPEC_VERSION)
    if isinstance(version, int) and version > SPEC_VERSION:
        raise SpecError(
            [
                Problem(
                    "version",
                    version,
                    "comes from a newer Holdfast",
                    f"upgrade Holdfast, or write version: {SPEC_VERSION}",
                )
            ],
            source,
        )
    for override in overrides:
        _apply(tree, override)
    try:
        spec = Spec.model_validate(tree)
    except ValidationError as error:
        raise SpecError([_problem(detail) for detail in error.errors()], source) from None
    if problems := rules.problems(spec):
        raise SpecError(problems, source)
    return spec


def dump_spec(spec: Spec) -> str:
    """The spec as YAML with every default written out; `parse_spec` reads it back to an equal spec."""
    return yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _apply(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SpecError([Problem("--set", override, "is not key=value", "write it as training.steps=50")], "overrides")
    try:
        value = yaml.load(text, Loader=_StrictLoader)  # noqa: S506
    except yaml.YAMLError:
        value = text
    node: Any = tree
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                where = ".".join(keys[: depth + 1])
                raise SpecError(
                    [Problem(where, override, "names no item of a list", f"use an index below {len(node)}")],
                    "overrides",
                )
            index: Any = int(key)
        elif isinstance(node, dict):
            index = key
            if not last and node.get(key) is None:
                node[key] = {}
        else:
            where = ".".join(keys[:depth])
            raise SpecError([Problem(where, override, "has no fields below it", "name the field itself")], "overrides")
        if last:
            node[index] = value
        else:
            node = node[index]


def _problem(detail: ErrorDetails) -> Problem:
    location = [str(part) for part in detail["loc"]]
    field = ".".join(location)
    value: object = detail["input"]
    section, info = _describe(location)
    message = detail["msg"][0].lower() + detail["msg"][1:]
    remedy = f"{info}" if info else "see `holdfast schema`"
    match detail["type"]:
        case "extra_forbidden":
            known = list(section.model_fields) if section else []
            close = difflib.get_close_matches(location[-1], known, 1, cutoff=0.5)
            message = "is not a field of the spec"
            remedy = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        case "missing":
            value, message = None, "is required"
        case "literal_error":
            choices: Sequence[str] = (
                detail.get("ctx", {}).get("expected", "").replace("'", "").replace(" or ", ", ").split(", ")
            )
            close = difflib.get_close_matches(str(value), choices, 1)
            message = "is not one of the choices"
            remedy = (f"did you mean {close[0]!r}? " if close else "") + f"choices: {', '.join(choices)}"
    return Problem(field, value, message, remedy)


def _describe(location: list[str]) -> tuple[type[BaseModel] | None, str]:
    """The section a location lies in, and the description of the field it names."""
    section: type[BaseModel] | None = Spec
    description = ""
    for part in location:
        if part.isdigit():
            continue
        if section is None or part not in section.model_fields:
            return section, description if section is None else ""
        field = section.model_fields[part]
        description = field.description or ""
        candidates = [field.annotation, *get_args(field.annotation)]
        inner = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if inner is None:
            return section, description
        section = inner
    return section, description

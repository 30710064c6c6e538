"""Functions of user code that a spec names where they are used: `"mine.py:focal"`.

A function is given as text, or as a group of fields: `{use: "mine.py:focal", gamma: 2.0}`. Keys that are no fields are
arguments of the function. `holdfast.code` finds the function, and fills `digest` with that of the source it reaches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from holdfast.spec.errors import DataError
from holdfast.spec.json_parsing import parse_json_object
from holdfast.spec.section import Section, runtime_field

if TYPE_CHECKING:
    from holdfast.spec.tree import Spec

USE = r"^[^:]+\.py:[A-Za-z_][A-Za-z0-9_]*$"
MAX_ARGUMENTS = 4096  # bytes of JSON


def _also_text(schema: dict[str, Any]) -> None:
    """Let editors accept the short form, and arguments next to the fields."""
    schema["type"] = ["object", "string"]
    schema["additionalProperties"] = True


class Function(Section):
    """A function of your own code. Keys that are no fields are passed to it by name. See docs/your-own-code.md."""

    model_config = ConfigDict(json_schema_extra=_also_text)

    use: str = runtime_field(
        ...,
        "The function: a Python file, relative to the folder of the spec, and the name of a function in it.",
        pattern=USE,
    )
    arguments: str = Field(
        "{}",
        max_length=MAX_ARGUMENTS,
        description="Arguments by name: a mapping, which is kept as JSON. Arguments can also be written next to `use`.",
    )
    digest: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{64}$",
        description="Digest of the source that the function reaches. Holdfast fills it in; leave it out.",
    )

    @model_validator(mode="before")
    @classmethod
    def _arguments_are_json(cls, value: object) -> object:
        if isinstance(value, str):
            return cls._of_text(value)
        if not isinstance(value, Mapping) or not value.get("use"):
            return value
        fields = {name: item for name, item in value.items() if name in cls.model_fields}
        inline = {str(name): item for name, item in value.items() if name not in cls.model_fields}
        given = fields.pop("arguments", {})
        try:
            named = parse_json_object(given, "arguments") if isinstance(given, str) else given
            text = json.dumps({**named, **inline}, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (DataError, ValueError, TypeError, RecursionError):
            raise PydanticCustomError("arguments", "has arguments that are no names with JSON values") from None
        return fields if text == "{}" else {**fields, "arguments": text}

    @classmethod
    def _of_text(cls, value: str) -> dict[str, object]:
        return {"use": value}

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments by name."""
        return parse_json_object(self.arguments, f"the arguments of {self.use}")

    @property
    def file(self) -> str:
        """The file of the function."""
        return self.use.rpartition(":")[0]

    @property
    def function_name(self) -> str:
        """The name of the function in its file."""
        return self.use.rpartition(":")[2]


@dataclass(frozen=True)
class Role:
    """A place in the spec that names functions."""

    field: str  # with [] for the items of a list
    given: int  # values that Holdfast passes
    in_ranks: bool = False  # whether ranks call it
    is_class: bool = False  # whether it is a class, which is created with these values


ROLES = (
    Role("data.sources[].reader", 2),
    Role("data.cleaning.filters[]", 1),
    Role("training.objective", 2, in_ranks=True),
    Role("training.schedule.factor", 2, in_ranks=True),
    Role("training.optimizer.build", 1, in_ranks=True),
    Role("training.grpo.rewards[]", 2, in_ranks=True),
    Role("training.grpo.environment", 2, in_ranks=True),
    Role("evaluation.load", 1),
    Role("evaluation.metrics[]", 2),
    Role("registration.serve", 1, is_class=True),
    Role("telemetry.observers[]", 2, in_ranks=True),
)


@dataclass(frozen=True)
class Named:
    """A function that a spec names."""

    field: str  # as in `data.sources.0.reader`
    role: Role
    function: Function


def functions_of(spec: Spec) -> Iterator[Named]:
    """All functions that a spec names. With a training script, a metric gets only the model that `evaluation.load`
    returns."""
    for named in _named(spec, ROLES):
        is_alone = spec.train.script is not None and named.role.field == "evaluation.metrics[]"
        yield replace(named, role=replace(named.role, given=1)) if is_alone else named


def rank_functions(spec: object) -> dict[str, dict[str, Any]]:
    """The functions that ranks call, by field, as JSON values. `spec` is a spec, or an object with its sections."""
    roles = [role for role in ROLES if role.in_ranks]
    return {named.field: named.function.model_dump(mode="json") for named in _named(spec, roles)}


def code_arguments(code: str | None, functions: Mapping[str, Any]) -> list[str]:
    """The arguments of a rank with the digest of its code, and the functions that it may call. They are on its command
    line, so that a record in the store can change neither."""
    if not functions:
        return []
    return ["--code", code or "", "--functions", json.dumps(functions, sort_keys=True, separators=(",", ":"))]


def require_functions(spec: object, given: str, source: str) -> None:
    """Raises DataError if the record `source` names other functions than the command line of a rank (`given`)."""
    expected = parse_json_object(given or "{}", "--functions")
    if rank_functions(spec) != expected:
        raise DataError(
            f"{source}: names other functions than the command line of the rank ({', '.join(expected) or 'none'}); "
            "it was changed after the launch, and none of them is run"
        )


def _named(spec: object, roles: Sequence[Role]) -> Iterator[Named]:
    for role in roles:
        for field, value in _values(spec, role.field.split("."), ""):
            if isinstance(value, Function) and value.use:
                yield Named(field, role, value)


def _values(section: Any, path: list[str], prefix: str) -> Iterator[tuple[str, Any]]:
    if not path:
        yield prefix.rstrip("."), section
        return
    name, rest = path[0].removesuffix("[]"), path[1:]
    value = getattr(section, name)
    if path[0].endswith("[]"):
        for number, item in enumerate(value):
            yield from _values(item, rest, f"{prefix}{name}.{number}.")
    else:
        yield from _values(value, rest, f"{prefix}{name}.")

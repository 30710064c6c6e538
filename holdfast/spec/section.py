"""The base class of every section of the spec: strict and frozen, with a role for each field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class RefusedFieldError(Exception):
    """Access to a field that is missing because its value was refused."""


class Section(BaseModel):
    """A group of fields. Unknown keys are refused. A loaded section never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("not_a_flag", "takes no true or false")
        return value

    if not TYPE_CHECKING:  # a type checker would then accept every name

        def __getattr__(self, name: str) -> Any:
            """Called for a field that was refused and therefore removed. See `problems_of_part`."""
            if name in type(self).model_fields:
                raise RefusedFieldError(f"{type(self).__name__}.{name} was refused")
            return super().__getattr__(name)


# What a field decides: the identity of the model, how the model is computed, or neither.
Role = Literal["identity", "plan", "neither"]


def runtime_field(default: Any, description: str, **constraints: Any) -> Any:
    """A field that cannot change the trained weights. It is neither in the run id nor in the plan."""
    return Field(default, description=description, json_schema_extra={"role": "neither"}, **constraints)


def plan_field(default: Any, description: str, **constraints: Any) -> Any:
    """A field that sets how the model is computed. It is in the plan of every checkpoint, not in the run id."""
    return Field(default, description=description, json_schema_extra={"role": "plan"}, **constraints)


def role_of(section: type[Section], field: str) -> Role:
    """What `field` of `section` decides. A field without a role is part of the identity."""
    extra = section.model_fields[field].json_schema_extra
    role: Any = extra.get("role") if isinstance(extra, dict) else None
    return role or "identity"

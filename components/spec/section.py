"""The base of every section of the spec: strict, frozen, and honest about what influences the weights."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A group of fields. Unknown keys are refused; a loaded section never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("not_a_flag", "takes no true or false")
        return value


def knob(default: Any, description: str, **constraints: Any) -> Any:
    """A field that cannot change the trained weights, and so is left out of the run id."""
    return Field(default, description=description, json_schema_extra={"influences_weights": False}, **constraints)


def influences_weights(section: type[Section], field: str) -> bool:
    """Whether `field` of `section` is part of a run's identity."""
    extra = section.model_fields[field].json_schema_extra
    return not (isinstance(extra, dict) and extra.get("influences_weights") is False)

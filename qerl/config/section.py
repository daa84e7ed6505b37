"""What all sections of the configuration share: the strict base model, the bounded number types, and rules on single values."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Le, Lt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LARGEST: dict[type, float] = {int: 1e9, float: 1e36}
"""No integer and no number of a configuration is larger, unless its own bound says so: products of settings would leave the 64 bits of
records, and numbers the range of float32."""
MIN_TEMPERATURE = 1e-3
"""Lowest temperature of sampling apart from 0: far below it, logits divided by it leave the range of float32."""
RULE = "rule"
"""Type of the error of a value that breaks a rule beyond its type and bounds; its context has the rule in words, under the same name."""


def _broken(rule: str) -> PydanticCustomError:
    return PydanticCustomError(RULE, "expected {rule}", {RULE: rule})


def _check_temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise _broken(f"at least {MIN_TEMPERATURE:g} where it is not 0 (greedy), since logits are divided by it")
    return value


def _check_each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise _broken("each named once")
    return names


Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Temperature = Annotated[float, Field(ge=0), AfterValidator(_check_temperature)]
EachOnce = AfterValidator(_check_each_once)
"""Of a list of names."""


class Section(BaseModel):
    """Base of all sections: strict types, no unknown keys, immutable, docstrings as descriptions, numbers within ``LARGEST``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any, info: ValidationInfo) -> Any:
        if any(isinstance(bound, Le | Lt) for bound in cls.model_fields[str(info.field_name)].metadata):
            return value
        # Integers in lists are seeds.
        numbers = [n for n in value if isinstance(n, float)] if isinstance(value, tuple) else [value]
        for number in numbers:
            most = LARGEST.get(type(number))
            if most is not None and abs(number) > most:
                raise _broken(f"at most {most:g}")
        return value

"""`changed`: as `dataclasses.replace`, but the same object where nothing differs.

Most of what follows an event changes nothing, and making frozen values anew was half of what a turn cost.
"""

from __future__ import annotations

from dataclasses import Field, replace
from typing import Any, ClassVar, Protocol, TypeVar


class Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Value = TypeVar("Value", bound=Dataclass)


def changed(value: Value, **facts: Any) -> Value:
    """Raises AttributeError for a field that it has not."""
    for name, fact in facts.items():
        if (was := getattr(value, name)) is not fact and was != fact:
            return replace(value, **facts)
    return value

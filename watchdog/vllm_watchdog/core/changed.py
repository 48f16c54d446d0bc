"""`changed`: as `dataclasses.replace`, but the same object where nothing differs.

Most of what follows an event changes nothing, and making frozen values anew was half of what a turn cost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value", bound="DataclassInstance")


def changed(value: Value, **facts: Any) -> Value:
    """Raises AttributeError for a field that it has not."""
    same = all(getattr(value, name) == fact for name, fact in facts.items())
    return value if same else replace(value, **facts)

"""New values of old ones: `replace`, and `changed`, which keeps the same object where nothing differs.

Making frozen values anew is most of what a turn costs.  One without slots is copied at one go, by its `__dict__`: that takes
a tenth of what `dataclasses.replace` needs for the thirty fields of an engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol, TypeVar


class Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


Value = TypeVar("Value", bound=Dataclass)


def replace(value: Value, /, **facts: Any) -> Value:
    """Raises TypeError for a field that it has not."""
    held = getattr(value, "__dict__", None)
    if held is None:
        return dataclasses.replace(value, **facts)
    if not facts.keys() <= held.keys():
        raise TypeError(f"{type(value).__name__} has no field {', '.join(sorted(facts.keys() - held.keys()))}")
    new = object.__new__(type(value))
    new.__dict__.update(held, **facts)
    if (told := getattr(new, "changed", None)) is not None:
        told(facts.keys())
    return new


def changed(value: Value, **facts: Any) -> Value:
    """Raises AttributeError for a field that it has not."""
    for name, fact in facts.items():
        if (was := getattr(value, name)) is not fact and was != fact:
            return replace(value, **facts)
    return value

"""Values of the core to and from JSON: a dataclass becomes an object whose `_` is its class name.

Journal, state file and API all use it, so whatever the core holds can be written down and folded again.
Types come from the annotations: enums, tuples, unions and nested dataclasses.  Unknown classes and keys are errors.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from functools import cache
from math import isinf
from types import ModuleType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

PLAIN = frozenset((str, int, bool, type(None)))
type_error = "cannot decode {} as {}"


def encode(value: Any) -> Any:
    """What `json.dumps` takes.  Infinity becomes the string "inf", which JSON has no number for."""
    if type(value) in PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"_": type(value).__name__} | {name: encode(getattr(value, name)) for name in _fields(type(value))}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, float) and isinf(value):
        return str(value)
    return value


@cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


class Codec:
    """Decodes the dataclasses that the given modules define.  Raises ValueError for anything that does not fit."""

    def __init__(self, *modules: ModuleType) -> None:
        self._classes = {
            name: thing
            for module in modules
            for name, thing in vars(module).items()
            if isinstance(thing, type) and dataclasses.is_dataclass(thing) and thing.__module__ == module.__name__
        }

    def decode(self, data: Any) -> Any:
        """The dataclass that `encode` wrote."""
        if not isinstance(data, dict) or not isinstance(data.get("_"), str) or data["_"] not in self._classes:
            raise ValueError(f"not a known record: {str(data)[:80]}")
        kind = self._classes[data["_"]]
        hints = _hints(kind)
        if unknown := set(data) - set(hints) - {"_"}:
            raise ValueError(f"{kind.__name__}: unknown field {', '.join(sorted(unknown))}")
        try:
            return kind(**{name: self._as(hints[name], value) for name, value in data.items() if name != "_"})
        except TypeError as error:
            raise ValueError(f"{kind.__name__}: {error}") from None

    def _as(self, hint: Any, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if not isinstance(record := self.decode(value), hint):
                raise ValueError(type_error.format(value, hint))
            return record
        origin, args = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            return self._as_one_of(args, value)
        if origin is tuple and isinstance(value, list):
            items = args[:1] * len(value) if args[1:] == (...,) else args
            if len(items) != len(value):
                raise ValueError(type_error.format(value, hint))
            return tuple(self._as(item, part) for item, part in zip(items, value, strict=True))
        return _scalar(hint, value)

    def _as_one_of(self, hints: tuple[Any, ...], value: Any) -> Any:
        if value is None and type(None) in hints:
            return None
        for hint in hints:
            try:
                return self._as(hint, value)
            except ValueError:
                continue
        raise ValueError(type_error.format(value, hints))


def _scalar(hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    if hint is float and not isinstance(value, bool) and (isinstance(value, int | float) or value in ("inf", "-inf")):
        return float(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise ValueError(type_error.format(value, hint))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)

"""Says what is wrong with a configuration: one line a problem, `file: key.path: what, expected what`.

Never says a value that may be a secret: only short values of fields that are known to hold none, and never the value of
an unknown key, which may be a secret under a misspelt name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic_core import ErrorDetails

from vllm_watchdog.config_sources import Path_

KINDS: dict[type, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a table",
}
Context = Mapping[str, Any]
# pydantic's error type -> what was expected
EXPECTED: dict[str, Callable[[Context], str]] = {
    "int_type": lambda _: "a whole number",
    "int_from_float": lambda _: "a whole number",
    "float_type": lambda _: "a number",
    "finite_number": lambda _: "a finite number",
    "bool_type": lambda _: "true or false",
    "string_type": lambda _: "text",
    "string_sub_type": lambda _: "text",
    "path_type": lambda _: "a path",
    "tuple_type": lambda _: "a list",
    "dict_type": lambda _: "a table",
    "model_type": lambda _: "a table",
    "model_attributes_type": lambda _: "a table",
    "greater_than": lambda ctx: f"more than {ctx['gt']:g}",
    "greater_than_equal": lambda ctx: f"at least {ctx['ge']:g}",
    "less_than": lambda ctx: f"less than {ctx['lt']:g}",
    "less_than_equal": lambda ctx: f"at most {ctx['le']:g}",
    "literal_error": lambda ctx: ctx["expected"],
    "enum": lambda ctx: ctx["expected"],
    "string_too_short": lambda _: "text that is not empty",
    "string_too_long": lambda ctx: f"at most {ctx['max_length']} characters",
    "too_short": lambda _: "at least one item",
    "too_long": lambda ctx: f"at most {ctx['max_length']} items",
}
SAYABLE = {name for name in EXPECTED if name not in ("model_type", "model_attributes_type", "dict_type", "tuple_type")}
SECRET_TABLES = {"env", "headers", "args", "keys"}


class ConfigError(Exception):
    """The configuration can't be used; `problems` holds one line for each thing that is wrong with it."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def place(error: ErrorDetails) -> Path_:
    """The key that an error is about."""
    return tuple(part for part in error["loc"] if part != "[key]")


def sentence(error: ErrorDetails, root: type[BaseModel]) -> str:
    """What is wrong with the value, and what was expected."""
    path, kind = place(error), error["type"]
    if kind == "extra_forbidden":
        return f"unknown key{_meant(str(path[-1]), keys_at(root, path[:-1]))}"
    if kind == "missing":
        return "missing, expected a value"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    expected = EXPECTED[kind](error.get("ctx", {})) if kind in EXPECTED else error["msg"].split(":")[0].lower()
    return f"{_shown(error['input'], kind in SAYABLE and not _secret(root, path))}, expected {expected}"


def _meant(key: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = get_close_matches(key.replace("-", "_").lower(), known, n=1)
    if close:
        return f', expected perhaps "{close[0]}"'
    return f", expected one of {', '.join(known)}" if known else ""


def near(name: str, names: Iterable[str]) -> str:
    """The names to choose from, the likely one first."""
    names = sorted(names)
    close = get_close_matches(name, names, n=1)
    return f'perhaps "{close[0]}"' if close else f"one of {', '.join(names)}" if names else "none is configured"


def _shown(value: object, sayable: bool) -> str:
    if sayable and isinstance(value, bool):
        return f"is {str(value).lower()}"
    if sayable and isinstance(value, int | float):
        return f"is {value!r:.40}"
    if sayable and isinstance(value, str) and value.isprintable() and len(value) <= 40:
        return f'is "{value}"'
    kinds = (name for kind, name in KINDS.items() if isinstance(value, kind))
    return f"is {next(kinds, type(value).__name__)}"


def _holds_secret(annotation: object) -> bool:
    """Also within `Annotated` and `| None`."""
    return annotation is SecretStr or any(_holds_secret(part) for part in get_args(annotation))


def _secret(root: type[BaseModel], path: Path_) -> bool:
    """May the value at this path be a secret?"""
    if not SECRET_TABLES.isdisjoint(path):
        return True
    model = model_at(root, path[:-1])
    field = model.model_fields.get(str(path[-1])) if model else None
    return field is not None and _holds_secret(field.annotation)


def keys_at(root: type[BaseModel], path: Path_) -> tuple[str, ...]:
    """The keys that a table of the settings may hold; none where they are free."""
    model = model_at(root, path)
    return tuple(model.model_fields) if model else ()


def model_at(root: type[BaseModel], path: Path_) -> type[BaseModel] | None:
    """The model that describes the table at `path`; the names of a table of tables, and the places in a list of
    them, are passed over."""
    at: Any = root
    for part in path:
        if get_origin(at) is dict:
            at = get_args(at)[1]
        elif get_origin(at) is tuple:
            at = get_args(at)[0]
        elif isinstance(at, type) and issubclass(at, BaseModel) and part in at.model_fields:
            at = at.model_fields[str(part)].annotation
        else:
            return None
    return at if isinstance(at, type) and issubclass(at, BaseModel) else None

"""Where settings come from: the TOML file, files of secrets, the environment; the later one wins.

Each source becomes a plain tree of dicts before anything is validated, so that an error can say which one it is in.

- Environment: LLM_WATCHDOG_ENGINES__PRIMARY__PORT=8100 is engines.primary.port.  A variable without `__` is not ours to
  read, unless it is a whole section in JSON (LLM_WATCHDOG_ENGINES='{"big-model": {"port": 8100}}').
- Secret files: each file of $CREDENTIALS_DIRECTORY (systemd: LoadCredential=) named like the key that it holds,
  `engines.primary.api_key` or `alerts.channels.oncall.url`, with or without `config_` in front.  Files of other names
  are left alone.

Blocks only on reading small files from local disks.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

PREFIX = "LLM_WATCHDOG_"
FROM_FOLDER = "config_"     # what LoadCredential=config:FOLDER puts before the name of each file of a folder
MAX_BYTES = 1 << 20     # a configuration of a megabyte is a mistake, such as a path to a log or a model
CASED = {"env", "headers"}      # tables whose keys keep their case in the environment

Path_ = tuple[str | int, ...]
Tree = dict[Any, Any]      # of JSON: its keys are text


class Text(str):
    """A value of the environment or of a secret file: text, until a field that wants a number reads it as one."""

    __slots__ = ()


class UnreadableError(Exception):
    """A source that can't be read at all: where, and what was expected."""


class Source(PydanticBaseSettingsSource):
    """One tree of settings; `origin` is what messages call it."""

    def __init__(self, settings: type[BaseSettings], origin: str, tree: Tree) -> None:
        super().__init__(settings)
        self.origin = origin
        self.tree = tree

    def __call__(self) -> Tree:
        return self.tree

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        return self.tree.get(field_name), field_name, False

    def name_of(self, path: Path_) -> str:
        """What a user calls the key: dotted, or the variable's name."""
        if self.origin != "environment":
            return dotted(path)
        at = next((index for index, part in enumerate(path) if isinstance(part, int)), len(path))    # what follows is JSON
        return PREFIX + "__".join(map(_word, path[:at])).replace("-", "_").upper() + dotted(path[at:])

    def holds(self, path: Path_) -> bool:
        """Also within what came as one text."""
        ways = (path[:length] for length in range(1, len(path) + 1))
        return any((parent := _parent(self.tree, way)) is not None and (way == path or isinstance(parent[way[-1]], Text))
                   for way in ways)

    def drop(self, path: Path_) -> bool:
        """Forget one value, so that the rest can be looked at."""
        parent = _parent(self.tree, path)
        if parent is None:
            return False
        del parent[path[-1]]
        return True


def dotted(path: Path_) -> str:
    """`gateway.rules#2.engine`: of the second rule."""
    return "".join(f"#{part + 1}" if isinstance(part, int) else f".{_word(part)}" for part in path).removeprefix(".")


def _word(part: str | int) -> str:
    """A quoted key may hold anything, and a problem has one line."""
    return text if (text := str(part)).isprintable() else repr(text)


def _parent(tree: Tree, path: Path_) -> Tree | None:
    at: Any = tree
    for part in path[:-1]:
        if isinstance(at, list) and isinstance(part, int) and part < len(at):
            at = at[part]
        else:
            at = at.get(part) if isinstance(at, dict) else None
    return at if path and isinstance(at, dict) and path[-1] in at else None


def from_file(path: Path) -> Tree:
    """Raises UnreadableError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UnreadableError(f"{path}: larger than {MAX_BYTES >> 20} MiB, expected a configuration in TOML")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror or error}, expected a readable TOML file") from None
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path}: byte {error.start} is not UTF-8, expected TOML") from None
    except tomllib.TOMLDecodeError as error:
        raise UnreadableError(f"{path}: {_toml_place(str(error))}") from None
    except (ValueError, RecursionError):    # a number of thousands of digits, brackets a thousand deep
        raise UnreadableError(f"{path}: a value beyond what TOML readers take, expected a configuration") from None


def _toml_place(message: str) -> str:
    """tomllib's "what (at line 3, column 5)" with the place first, as everywhere else."""
    what, _, place = message.rstrip(")").rpartition(" (at ")
    return f"{place}: {what}, expected TOML" if what else f"{message}, expected TOML"


def from_environment(environ: Mapping[str, str], sections: Sequence[str]) -> Tree:
    """Variables that begin with LLM_WATCHDOG_ and hold a `__`, or name a whole section."""
    tree: Tree = {}
    for name, value in sorted(environ.items()):
        key = name.removeprefix(PREFIX)
        if key == name or not ("__" in key or key.lower() in sections):
            continue
        _put(tree, _cased(key.split("__")), _section(value) if "__" not in key else Text(value))
    return tree


def strangers(environ: Mapping[str, str], sections: Sequence[str]) -> Iterator[str]:
    """Variables of our prefix that are not read, where a key is nearly meant: `LLM_WATCHDOG_GATEWAY_LISTEN`."""
    for name in sorted(environ):
        key = name.removeprefix(PREFIX)
        first, _, rest = key.lower().partition("_")
        if key == name or "__" in key or key.lower() in sections or key.startswith("MARK"):      # an engine's mark
            continue
        near = get_close_matches(first, sections, n=1, cutoff=0.75)
        if near and rest:
            yield f"{name} is not read, did you mean {PREFIX}{near[0].upper()}__{rest.upper()}?"
        elif near:
            yield f"{name} is not read, did you mean {PREFIX}{near[0].upper()} (a whole section in JSON)?"


def _cased(parts: list[str]) -> Iterator[str]:
    keep = False
    for part in parts:
        yield part if keep else part.lower()
        keep = keep or part.lower() in CASED


def _section(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return Text(value)


def from_credentials(folder: Path | None, sections: Sequence[str]) -> Tree:
    """The files of a folder whose names begin with a section; no folder, no files.  Raises UnreadableError."""
    tree: Tree = {}
    try:
        files = sorted(folder.iterdir()) if folder else []
        for file in files:
            parts = file.name.removeprefix(FROM_FOLDER).split(".")
            if len(parts) > 1 and parts[0] in sections and file.is_file():
                with file.open(encoding="utf-8") as opened:
                    _put(tree, parts, Text(opened.read(MAX_BYTES).removesuffix("\n")))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UnreadableError(f"{folder}: {why}, expected a folder of readable text files") from None
    return tree


def _put(tree: Tree, parts: Sequence[str] | Iterator[str], value: Any) -> None:
    """Later, deeper variables go into a section that an earlier one gave as a whole."""
    *folders, last = parts
    for part in folders:
        inner = tree.get(part)
        if not isinstance(inner, dict):
            inner = tree[part] = {}
        tree = inner
    tree[last] = value


def dashed(tree: Tree) -> Iterator[Path_]:
    """Write every engine's args with dashes, as vLLM's flags are; yields those that were written twice."""
    engines = tree.get("engines")
    for name, engine in engines.items() if isinstance(engines, dict) else ():
        args = engine.get("args") if isinstance(engine, dict) else None
        if isinstance(args, dict):
            renamed: Tree = {}
            for key, value in args.items():
                head, dot, rest = key.partition(".")    # --hf-overrides.rope_scaling: what follows the dot is data
                new = head.replace("_", "-") + dot + rest
                if new in renamed:
                    yield ("engines", name, "args", new)
                renamed[new] = value
            engine["args"] = renamed

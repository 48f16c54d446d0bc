"""Reads the settings: file, secret files and environment, with every problem told at once.

`load` checks all of it; daemon and `check-config` both call it.  It starts nothing, creates nothing and writes nothing.
Blocks only on small local files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import PydanticBaseSettingsSource

from vllm_watchdog import config_checks
from vllm_watchdog.config import Settings
from vllm_watchdog.config_problems import ConfigError, place, sentence
from vllm_watchdog.config_sources import (
    Path_,
    Source,
    UnreadableError,
    dashed,
    from_credentials,
    from_environment,
    from_file,
    strangers,
)

SEARCHED = (Path("config.toml"), Path("/etc/llm-watchdog/config.toml"))


def load(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of `path` (None: ./config.toml, else /etc/llm-watchdog/config.toml), checked.

    Raises ConfigError with all that is wrong.
    """
    folder = environ.get("CREDENTIALS_DIRECTORY")
    return _checked(_sources(path, environ, Path(folder) if folder else None))


def load_to_ask(path: Path | None = None, environ: Mapping[str, str] = os.environ, also: Iterable[str] = ()) -> Settings:
    """Where the daemon is, and in which language to tell of it, for whoever only asks, and the sections in `also`: nothing
    else of it is read, since the rest may need secrets that the daemon alone can read.  Raises ConfigError."""
    sources = _sources(path, environ, None)
    for source in sources:
        alerts = source.tree.get("alerts")
        language = {"language": alerts["language"]} if isinstance(alerts, dict) and "language" in alerts else {}
        wanted = {name: source.tree[name] for name in ("daemon", *also) if name in source.tree}
        source.tree = wanted | ({"alerts": language} if language else {})
    try:
        return _settled(sources)
    except ValidationError as error:
        said: dict[Path_, str] = {}
        for item in error.errors(include_url=False):
            _say(said, sources, place(item), sentence(item, Settings))
        raise ConfigError(said.values()) from None


def _sources(path: Path | None, environ: Mapping[str, str], secrets: Path | None) -> tuple[Source, ...]:
    """One for each place; `secrets`: the folder with their files.  Raises ConfigError."""
    found = path or _first()
    origin = str(found or SEARCHED[0])
    sections = tuple(Settings.model_fields)
    try:
        Path.cwd()      # every relative path hangs on it
        sources = tuple(
            Source(Settings, name, tree)
            for name, tree in (
                ("environment", from_environment(environ, sections)),
                (str(secrets or ""), from_credentials(secrets, sections)),
                (origin, from_file(found) if found else {}),
            )
        )
    except UnreadableError as error:
        raise ConfigError([str(error)]) from None
    except FileNotFoundError:
        raise ConfigError([f"{origin}: the current directory is gone, expected one that exists"]) from None
    if not found and not any(source.tree for source in sources):
        raise ConfigError([f"{origin}: not there, nor is {SEARCHED[1]}, expected one of them "
                           "(a copy of config.example.toml), or --config PATH"])
    return sources


def misspelt(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """A sentence for each variable that looks like a key and is not read."""
    return tuple(strangers(environ, tuple(Settings.model_fields)))


def _first() -> Path | None:
    """The first of the usual files; one that we may not look at counts, since reading it says why."""
    for path in SEARCHED:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return path
        return path
    return None


def _checked(sources: tuple[Source, ...]) -> Settings:
    """Look, drop what is wrong, and look again, so that one mistake does not hide the next."""
    said: dict[Path_, str] = {}
    for source in sources:
        for path in dashed(source.tree):
            _say(said, sources, path, "written twice, with - and with _, expected once")
    while True:
        try:
            settings = _settled(sources)
            break
        except ValidationError as error:
            items = error.errors(include_url=False)
            for item in items:
                _say(said, sources, place(item), sentence(item, Settings))
            if not _drop(sources, [place(item) for item in items]):
                raise ConfigError(said.values()) from None
    for path, what in config_checks.problems(settings):
        _say(said, sources, path, what)
    if said:
        raise ConfigError(said.values())
    return settings


def _settled(sources: tuple[Source, ...]) -> Settings:
    class Settled(Settings):
        @classmethod
        def settings_customise_sources(cls, *_: Any, **__: Any) -> tuple[PydanticBaseSettingsSource, ...]:
            return sources

    return Settled()


def _say(said: dict[Path_, str], sources: tuple[Source, ...], path: Path_, what: str) -> None:
    """Once a key, in the words of the source that it is from; a key that nobody wrote belongs into the file."""
    source = next((source for source in sources if source.holds(path)), sources[-1])
    said.setdefault(path, f"{source.origin}: {source.name_of(path)}: {what}")


def _drop(sources: tuple[Source, ...], paths: Iterable[Path_]) -> bool:
    """Forget each value wherever it is written; where a value is missing, forget the table that it should be in."""
    dropped: set[Path_] = set()
    for path in paths:
        ways = [path[:length] for length in range(len(path), 0, -1)]
        if dropped.isdisjoint(ways):
            dropped.update(_deepest(sources, ways))
    return bool(dropped)


def _deepest(sources: tuple[Source, ...], ways: Iterable[Path_]) -> tuple[Path_, ...]:
    for way in ways:
        if sum(source.drop(way) for source in sources):     # from each of them, so no short cut
            return (way,)
    return ()

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from tests.system.harness import Doc, Receiver, Watchdog


class Make(Protocol):
    def __call__(self, engines: dict[str, Doc], **rest: Doc) -> Watchdog: ...


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes watchdogs of one test; each is stopped, and held against what must be true after every run."""
    made: list[Watchdog] = []

    def one(engines: dict[str, Doc], **rest: Doc) -> Watchdog:
        made.append(Watchdog(tmp_path / f"w{len(made)}", engines, **rest))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for watchdog in made:
        watchdog.finish()


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two simulated cards of 80 GiB."""
    folder = tmp_path_factory.mktemp("cards")
    (folder / "gpu.json").write_text(json.dumps({"total_bytes": 80 << 30, "count": 2}))
    return folder


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()

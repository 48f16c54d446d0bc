"""Other supervisors in the foreground, where they are installed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from tests.bench.table import program


class AbsentError(Exception):
    """A peer is not here."""


def wanted(name: str) -> str:
    found = program(name)
    if found is None:
        raise AbsentError(f"no {name}")
    return found


@contextmanager
def running(words: list[str]) -> Iterator[psutil.Process]:
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

"""The command line of a script for one card, and its course: boot, each stage by itself, the end, the table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.gpu.rig import Doc, Host


def visit(words: list[str], *, stages: Mapping[str, float], seconds: float, layout: str, port: int,
          up: tuple[str, Callable[[dict[str, Doc], Doc], bool]], make: Callable[[Host, int], object]) -> int:
    """`stages`: the methods of what `make` returns, with the seconds that each needs; `up`: what is booted, and its sign.
    The exit status."""
    reader = argparse.ArgumentParser()
    reader.add_argument("model")
    reader.add_argument("out", type=Path)
    reader.add_argument("--gpu", type=int, default=0)
    reader.add_argument("--stages", default=",".join(stages))
    reader.add_argument("--seconds", type=float, default=seconds)
    options = reader.parse_args(words)
    host = Host(options.model, options.out, options.seconds, layout, [options.gpu], port + 10 * options.gpu)
    made, (what, booted) = make(host, options.gpu), up
    try:
        host.start()
        host.tried(lambda: host.row(what, f"{host.until(booted, 300):.1f} s"))
        for name in options.stages.split(","):
            host.tried(getattr(made, name), stages[name])
    finally:
        host.end()
    print((options.out / "table.txt").read_text())
    return min(host.failed, 1)

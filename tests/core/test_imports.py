"""The house's directions: core <- config <- adapters <- app, and a core that knows no clock, thread, file or log."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import vllm_watchdog

ROOT = Path(vllm_watchdog.__file__).parent
PACKAGE = "vllm_watchdog"
ADAPTERS = ("sense", "act", "tell", "web", "gateway", "sim")
# Modules beside the rooms that adapters may use.
COMMON = frozenset({
    "cards", "config", "launch", "proc", "procfs", "cgroup", "exchange", "gateway_plan", "gateway_rules", "prompt_plan",
    "say",
})
PURE = frozenset({
    "__future__", "bisect", "collections", "dataclasses", "datetime", "difflib", "enum", "functools", "itertools", "json",
    "math", "re", "statistics", "types", "typing", "zlib",
})
MODULES = sorted(ROOT.rglob("*.py"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text("utf-8"))))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it; `from package import module` names the module."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str:
    """`core`, an adapter's folder, `app`, or `common` for the modules beside them."""
    first = name.split(".")[1] if "." in name else ""
    if first in ("core", "app", *ADAPTERS):
        return first
    return "common" if common(first) else "root"


def common(stem: str) -> bool:
    return stem in COMMON or stem.startswith("config_")


def may(room_: str, other: str) -> bool:
    known = {"core": {"core"}, "common": {"core", "common"}, "root": set()}
    known |= {adapter: {"core", "common", adapter} for adapter in ADAPTERS}
    return room_ == "app" or other in known[room_] | {"root"}


def module(path: Path) -> str:
    return ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("path", MODULES, ids=module)
def test_imports_point_one_way(path: Path) -> None:
    for name in imports(path):
        if name.split(".")[0] == PACKAGE:
            assert may(room(module(path)), room(name)), f"{module(path)} must not import {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "core").glob("*.py")), ids=module)
def test_the_core_imports_only_the_standard_librarys_data_modules(path: Path) -> None:
    foreign = {name.split(".")[0] for name in imports(path)} - PURE - {PACKAGE}
    assert not foreign, f"{module(path)} imports {', '.join(sorted(foreign))}"


@pytest.mark.parametrize("path", sorted((ROOT / "core").glob("*.py")), ids=module)
def test_the_core_asks_no_clock_and_opens_nothing(path: Path) -> None:
    calls = [node.func for node in nodes(path) if isinstance(node, ast.Call)]
    assert not {call.id for call in calls if isinstance(call, ast.Name)} & {"open", "print", "input", "exec", "eval"}
    assert not {call.attr for call in calls if isinstance(call, ast.Attribute)} & {"now", "utcnow", "today", "monotonic"}


def test_every_folder_is_a_room_that_the_rule_knows() -> None:
    folders = {path.parent.name for path in MODULES if path.parent.parent == ROOT}
    assert folders <= {"core", "app", *ADAPTERS}
    beside = {path.stem for path in MODULES if path.parent == ROOT} - {"__init__", "__main__"}
    assert {stem for stem in beside if not common(stem)} == set()


def test_the_walk_sees_what_is_imported() -> None:
    assert {"dataclasses.dataclass", "vllm_watchdog.core.plan.Limits"} <= set(imports(ROOT / "core" / "policy.py"))


@pytest.mark.parametrize(("room_", "other", "allowed"), [
    ("core", "common", False), ("core", "sense", False), ("common", "core", True), ("common", "tell", False),
    ("sense", "core", True), ("sense", "common", True), ("sense", "tell", False), ("sim", "sim", True),
    ("act", "app", False),
    ("app", "gateway", True), ("core", "app", False)])
def test_the_rule_itself(room_: str, other: str, allowed: bool) -> None:
    assert may(room_, other) is allowed

"""Do the tests notice when the core decides wrongly?  `python tests/mutants.py --sample 100 --seed 1`

Samples small wrong decisions: a row of the policy's table that is missing, goes to another phase or lacks an action; a
comparison turned around or off by its edge; a number that is off; an `and` for an `or`.  For each, the core's own test
files run against a copy of the package with that one change.  Prints each survivor and killed/total; exit 1 under
`--least` per cent.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "watchdog" / "vllm_watchdog"
TESTS = {       # module -> the test files that are asked, the quickest first
    "policy": ("test_policy.py", "test_journeys.py"),
    "liveness": ("test_liveness.py", "test_follow.py"),
    "failover": ("test_failover.py", "test_follow.py"),
    "gate": ("test_gate.py", "test_follow.py"),
    "standby": ("test_standby.py", "test_boot.py", "test_journeys.py"),
    "symptoms": ("test_symptoms.py", "test_sampled.py"),
    "lowering": ("test_lowering.py", "test_follow.py"),
    "trend": ("test_trend.py", "test_leaks.py"),
    "leaks": ("test_leaks.py", "test_sampled.py"),
    "outages": ("test_outages.py",),
    "renew": ("test_renew.py",),
    "follow": ("test_follow.py", "test_boot.py", "test_journeys.py", "test_turn.py"),
}
COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}
LIMIT_S = 60


@dataclass(frozen=True)
class Mutant:
    """One change: the source text between two places of one module is replaced."""

    module: str
    start: int
    end: int
    new: str
    what: str


def _offsets(text: str) -> list[int]:
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


class Finder:
    """Every mutant of one module."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.text = (SOURCE / "core" / f"{module}.py").read_text("utf-8")
        self.tree = ast.parse(self.text)
        self.starts = _offsets(self.text)

    def all(self) -> Iterator[Mutant]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Compare) and len(node.ops) == 1:
                yield from self._compared(node)
            elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
                yield from self._number(node)
            elif isinstance(node, ast.BoolOp):
                yield self._change(node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                yield self._change(node, node.operand)
            elif isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Dict):
                yield from self._rows(node.value)

    def _compared(self, node: ast.Compare) -> Iterator[Mutant]:
        other = COMPARED[type(node.ops[0])]
        yield self._change(node, ast.Compare(node.left, [other()], node.comparators))

    def _number(self, node: ast.Constant) -> Iterator[Mutant]:
        for value in (node.value + 1, node.value * 2) if node.value else (2**40,):
            yield self._change(node, ast.Constant(value))

    def _rows(self, table: ast.Dict) -> Iterator[Mutant]:
        """Rows of a table of decisions: removed, sent elsewhere, or with an action less."""
        for key, row in zip(table.keys, table.values, strict=True):
            if key is None or not isinstance(row, ast.Tuple):
                continue
            yield self._cut(key, row)
            first = row.elts[0]
            for phase in ("STOPPED", "SERVING", "HELD") if isinstance(first, ast.Attribute) else ():
                if phase != first.attr:
                    yield self._change(first, ast.Attribute(first.value, phase))
            if len(row.elts) > 1:
                yield self._change(row, ast.Tuple(row.elts[:-1]))

    def _place(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _cut(self, key: ast.expr, row: ast.expr) -> Mutant:
        (start, _), (_, end) = self._place(key), self._place(row)
        old = self.text.encode()[start:end].decode()
        return Mutant(self.module, start, end, "**{}", f"{self.module}:{key.lineno}: without {' '.join(old.split())}")

    def _change(self, node: ast.expr, new: ast.expr) -> Mutant:
        start, end = self._place(node)
        old, text = self.text.encode()[start:end].decode(), ast.unparse(ast.fix_missing_locations(new))
        what = f"{self.module}:{node.lineno}: {' '.join(old.split())} -> {text}"
        return Mutant(self.module, start, end, f"({text})", what)


def verdict(mutant: Mutant) -> str:
    """`killed`, `survived` where no test noticed, or `hung`, which is noticed, too."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "vllm_watchdog"
        shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
        path = package / "core" / f"{mutant.module}.py"
        source = path.read_bytes()
        path.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
        files = [str(ROOT / "tests" / "core" / name) for name in TESTS[mutant.module]]
        command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
                   "-k", "not Machine", *files]
        environ = os.environ | {"PYTHONPATH": folder, "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return "hung"
        return "survived" if done.returncode == 0 else "killed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=float, default=95.0, help="per cent that must be killed")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    found = {mutant for module in TESTS for mutant in Finder(module).all()}
    every = sorted(found, key=lambda mutant: (mutant.what, mutant.start))
    chosen = random.Random(given.seed).sample(every, min(given.sample, len(every)))
    began = time.monotonic()
    with ThreadPoolExecutor(given.jobs) as pool:
        told = list(zip(chosen, pool.map(verdict, chosen), strict=True))
    for mutant, how in told:
        if how != "killed":
            print(f"{how}  {mutant.what}")
    killed = sum(how != "survived" for _, how in told)
    print(f"{killed}/{len(chosen)} killed, of {len(every)} mutants, in {time.monotonic() - began:.0f} s")
    return 0 if killed >= given.least / 100 * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The reliability matrix: faults × standby modes × (idle, loaded), on stand-in engines.

    python -m tests.system.matrix [--runs 20] [--cell FAULT[/STANDBY[/idle|loaded]]] [--report FILE]

Each cell is one fault on a host where nothing is wrong, and holds when
- nobody but the generations that run is left, and no two engines ever lived where one is allowed, nor overfilled a card,
- the primary serves again as before (where the fault is one that only a human can mend: it is held, with the reason, until
  that is done),
- it made exactly one incident of the right class, or none where no engine failed,
- people were told once that it opened and once that it ended,
- no client of the gateway lost a request whose answer had not begun.

Hosts of a column are used again for its next fault; one on which a cell failed is thrown away.  The columns run side by
side.  Prints a table: passes of runs, and the median (and the longest) of the time without an engine; exit 1 when a cell
failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import median

from tests.system.faults import FAULTS, Fault
from tests.system.harness import Doc
from tests.system.stage import PATIENCE_S, PHASES, Stage, Watch

ROOT = Path(__file__).parents[2]
AT_ONCE = 3         # columns; on two cores more of them only wait for each other


@dataclass(frozen=True)
class Cell:
    fault: str
    standby: str
    loaded: bool

    def __str__(self) -> str:
        return f"{self.fault}/{self.standby}/{'loaded' if self.loaded else 'idle'}"


@dataclass
class Result:
    """`problems` empty: it holds.  `gap_s`: without an engine, by the incident; `lost`: what clients were told instead."""

    cell: str
    problems: list[str] = field(default_factory=list)
    gap_s: float = 0.0
    took_s: float = 0.0
    lost: Doc = field(default_factory=dict)


def cells(chosen: str = "") -> Iterator[Cell]:
    for standby, loaded, (name, fault) in product(PHASES, (False, True), FAULTS.items()):
        cell = Cell(name, standby, loaded)
        if standby in fault.standbys and f"{cell}/".startswith(f"{chosen}/" if chosen else ""):
            yield cell


def run(stage: Stage, name: str) -> Result:
    """One fault on a calm host, until it is calm again; what was not as promised."""
    fault = FAULTS[name]
    result = Result(str(Cell(name, stage.standby, stage.loaded)))
    known, before = set(stage.incidents()), stage.failed()
    began = time.monotonic()
    try:
        with Watch(stage) as watch:
            fault.strike(stage)
            _recover(stage, fault, known)
        result.problems += sorted(watch.seen)
        _judge(stage, fault, known, result)
        if stage.loaded:
            stage.answered()
    except AssertionError as error:
        result.problems.append(str(error))
    result.took_s = round(time.monotonic() - began, 2)
    result.lost = dict(stage.failed() - before)
    if result.lost and fault.ends != "gateway":
        result.problems.append(f"clients were told {result.lost}")
    return result


def _recover(stage: Stage, fault: Fault, known: set[str]) -> None:
    if fault.classes:
        stage.host.until(lambda: set(stage.incidents()) - known, "no incident")
    else:
        time.sleep(1.0)     # for what should not come
    stage.rest()


def _judge(stage: Stage, fault: Fault, known: set[str], result: Result) -> None:
    """The one incident, told twice, or none; nobody left over; and a request is answered."""
    new = {key: row for key, row in stage.incidents().items() if key not in known}
    classes = [row["class"] for row in new.values()]
    if len(new) != bool(fault.classes) or not set(classes) <= set(fault.classes):
        result.problems.append(f"incidents {classes}, expected one of {fault.classes or 'none'}")
    for key in new:
        stage.resolution_told(key)
        letters = stage.letters(key)
        if (letters["opened"], letters["resolved"]) != (1, 1):
            result.problems.append(f"{key}: told {dict(letters)}")
        result.gap_s += stage.host.ask("incident", id=key)["incident"]["down_s"]
    result.problems += [f"left: {stray}" for stray in stage.strays()]
    if (status := stage.gateway.ask()) != 200:
        result.problems.append(f"calm, but a request gets {status}")


# -- a column: one host for many cells


def column(folder: Path, wanted: list[Cell]) -> Iterator[Result]:
    """The cells of one standby mode and load, in order.  A failed one costs the next one a new host."""
    left, number = list(wanted), 0
    while left:
        number += 1
        cell, results = left[0], list[Result]()
        try:
            with Stage(folder / str(number), cell.standby, cell.loaded) as stage:
                while left and not (results and results[-1].problems):
                    results.append(run(stage, left.pop(0).fault))
                    yield results[-1]
        except (AssertionError, subprocess.TimeoutExpired) as error:
            if not results:
                left.pop(0)
            if not (results and results[-1].problems):
                yield Result(str(cell) if not results else results[-1].cell, [f"at the end of the host: {error}"])


def _child(wanted: list[Cell], folder: Path) -> int:
    for result in column(folder, wanted):
        print(json.dumps(asdict(result)), flush=True)
    return 0


def side_by_side(wanted: list[Cell], folder: Path) -> Iterator[Result]:
    """Each column in a process of its own."""
    columns = defaultdict[tuple[str, bool], list[Cell]](list)
    for cell in wanted:
        columns[cell.standby, cell.loaded].append(cell)
    children: list[subprocess.Popen[str]] = []

    def one(wanted: list[Cell]) -> list[Result]:
        children.append(_apart(wanted, folder))
        return _results(children[-1])

    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        for results in pool.map(one, columns.values()):
            yield from results
    finally:        # interrupted, or one failed: each takes its own host down
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            if child.poll() is None:
                child.terminate()
        for child in children:
            child.wait(2 * PATIENCE_S)


def _apart(wanted: list[Cell], folder: Path) -> subprocess.Popen[str]:
    name = f"{wanted[0].standby}-{'loaded' if wanted[0].loaded else 'idle'}"
    return subprocess.Popen(
        [sys.executable, "-m", "tests.system.matrix", "--column", json.dumps([asdict(cell) for cell in wanted]),
         "--folder", str(folder / name)], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _results(child: subprocess.Popen[str]) -> list[Result]:
    assert child.stdout
    results = []
    with child.stdout as lines:
        for line in lines:
            results.append(Result(**json.loads(line)))
            if results[-1].problems:
                print(f"  {results[-1].cell}: " + "\n    ".join(results[-1].problems), flush=True)
    assert child.wait() == 0, "a column itself fails"
    return results


# -- the table


def table(results: list[Result]) -> str:
    """Markdown: a row a fault, a column a standby mode and load; passes/runs, and the gap: median (longest)."""
    by_cell = defaultdict[str, list[Result]](list)
    for result in results:
        by_cell[result.cell].append(result)
    columns = [(standby, loaded) for standby in PHASES for loaded in (False, True)]
    heads = [f"{standby}, {'loaded' if loaded else 'idle'}" for standby, loaded in columns]
    lines = ["| fault | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for name in FAULTS:
        row = [_entry(by_cell.get(str(Cell(name, *column)), [])) for column in columns]
        if any(entry != "–" for entry in row):
            lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _entry(results: list[Result]) -> str:
    if not results:
        return "–"
    passed = sum(not result.problems for result in results)
    gaps = [result.gap_s for result in results if result.gap_s]
    return f"{passed}/{len(results)}" + (f", {median(gaps):.2f} ({max(gaps):.2f}) s" if gaps else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--cell", default="", metavar="FAULT[/STANDBY[/idle|loaded]]")
    parser.add_argument("--report", type=Path, help="the table, and every problem, as Markdown")
    parser.add_argument("--column", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # every `with` is left, and takes down what it started
    if options.column:
        return _child([Cell(**each) for each in json.loads(options.column)], options.folder)
    wanted, results = list(cells(options.cell)), list[Result]()
    if not wanted:
        parser.error(f"no cell {options.cell!r}; faults: {', '.join(FAULTS)}")
    for number in range(1, options.runs + 1):
        with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
            began = time.monotonic()
            fresh = list(side_by_side(wanted, Path(folder)))
        results += fresh
        failed = [result for result in fresh if result.problems]
        print(f"run {number}: {len(fresh) - len(failed)} of {len(fresh)} hold, {time.monotonic() - began:.0f} s", flush=True)
        if options.report:
            options.report.write_text(report(results), "utf-8")
    print(table(results))
    return int(any(result.problems for result in results))


def report(results: list[Result]) -> str:
    problems = [f"- {result.cell}: {'; '.join(result.problems).splitlines()[0]}" for result in results if result.problems]
    return "\n".join([table(results), "", *(problems or ["Every cell holds in every run."]), ""])


if __name__ == "__main__":
    sys.exit(main())

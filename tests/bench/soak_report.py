"""What a soak has to show, and how it is judged: counts of each host, and lines through what its processes held."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression

from tests.bench.soak_notes import Struck

LONG_S, GOAL_MIB_PER_H = 1800.0, 1.0        # a shorter run says nothing of an hour


@dataclass
class Tally:
    """What one host has to show."""

    name: str
    lasted_s: float = 0.0       # in which faults were struck; shorter than asked: it did not become calm again
    faults: Counter[str] = field(default_factory=Counter)
    incidents: int = 0
    problems: list[str] = field(default_factory=list)
    doubles: set[str] = field(default_factory=set)
    orphans: list[str] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    with_gateway: Counter[str] = field(default_factory=Counter)
    struck: list[Struck] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)     # the first of `lost` as they are told
    whole: int = 0
    cut: int = 0
    untold: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """`anon_mib`: its own part of the PSS; what it shares with others counts for less when there are more of them."""

    at_s: float
    pss_mib: float
    anon_mib: float
    fds: int
    threads: int


def sample(pid: int, at_s: float) -> Sample:
    kept, status = (Path(f"/proc/{pid}/{name}").read_text().splitlines() for name in ("smaps_rollup", "status"))

    def number(lines: list[str], key: str) -> int:
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))

    mib = (number(kept, key) / 1024 for key in ("Pss", "Pss_Anon"))
    return Sample(at_s, *mib, len(os.listdir(f"/proc/{pid}/fd")), number(status, "Threads"))


@dataclass(frozen=True)
class Trend:
    """Of one process, after the warm-up.  The slope is that of its own memory: what it shares counts for more whenever a
    neighbour ends.  Growth of the rest is the difference of the medians of the first and the last quarter."""

    mib_per_h: float
    first: Sample
    last: Sample
    fds: int
    threads: int


def trend(samples: list[Sample], warm_s: float) -> Trend:
    kept = [each for each in samples if each.at_s >= warm_s]
    slope = linear_regression([each.at_s / 3600 for each in kept], [each.anon_mib for each in kept]).slope
    quarter = max(1, len(kept) // 4)

    def growth(what: str) -> int:
        first, last = (sorted(getattr(each, what) for each in part) for part in (kept[:quarter], kept[-quarter:]))
        return int(last[len(last) // 2] - first[len(first) // 2])

    return Trend(slope, kept[0], kept[-1], growth("fds"), growth("threads"))


def judged(tallies: list[Tally], trends: dict[str, Trend], seconds: float) -> list[tuple[str, str, str, bool | None]]:
    """What, figure, goal, met."""
    def lines(name: str) -> list[str]:
        return [line for tally in tallies for line in getattr(tally, name)]

    lost = sum((tally.lost for tally in tallies), Counter[str]())
    gone = sum((tally.with_gateway for tally in tallies), Counter[str]())
    rows: list[tuple[str, str, str, bool | None]] = [
        *((f"the {tally.name} host lasted", f"{tally.lasted_s / 60:.1f} min", f"{seconds / 60:g} min",
           tally.lasted_s >= 0.99 * seconds) for tally in tallies),
        ("faults struck", str(sum(sum(tally.faults.values()) for tally in tallies)), "", None),
        ("incidents", str(sum(tally.incidents for tally in tallies)), "", None),
        ("requests answered whole / cut after they had begun",
         f"{sum(tally.whole for tally in tallies)} / {sum(tally.cut for tally in tallies)}", "", None),
        *((what, f"{len(found)}", "0", not found) for what, found in (
            ("not calm again, or not as promised", lines("problems")), ("orphans", lines("orphans")),
            ("double engines", lines("doubles")), ("lost alerts", lines("untold")), ("alerts told twice", lines("twice")))),
        ("requests lost that had not begun", f"{lost.total()} {dict(lost) or ''}".strip(), "0", not lost),
        ("... that a killed gateway had", f"{gone.total()} {dict(gone) or ''}".strip(), "", None),
    ]
    for name, each in trends.items():
        first, last = each.first, each.last
        slope = (f"{each.mib_per_h:+.2f} MiB/h ({first.anon_mib:.1f} to {last.anon_mib:.1f} MiB; "
                 f"PSS {first.pss_mib:.1f} to {last.pss_mib:.1f})")
        rows.append((f"memory of the {name} (its own, after the warm-up)", slope, f"<= {GOAL_MIB_PER_H:.0f} MiB/h",
                     each.mib_per_h <= GOAL_MIB_PER_H if seconds >= LONG_S else None))
        rows.append(("... its descriptors / threads more", f"{each.fds:+d} / {each.threads:+d}", "0 / 0",
                     each.fds <= 0 and each.threads <= 0))
    return rows


def report(rows: list[tuple[str, str, str, bool | None]], tallies: list[Tally], heading: str) -> str:
    words = {True: "yes", False: "**no**", None: ""}
    lines = [heading, "", "| | found | goal | met |", "| --- | --- | --- | --- |"]
    lines += [f"| {what} | {figure} | {goal} | {words[met]} |" for what, figure, goal, met in rows]
    for tally in tallies:
        faults = ", ".join(f"{name} {count}" for name, count in sorted(tally.faults.items()))
        lines += ["", f"{tally.name.capitalize()} host: {faults}."]
        for what in ("problems", "orphans", "losses", "doubles", "untold", "twice"):
            lines += [f"- {what}: {line.splitlines()[0]}" for line in getattr(tally, what)]
        for loss in tally.losses:
            lines += ["", "```text", loss, "```"]
    return "\n".join(lines) + "\n"

"""What of an engine grows for ever, which of its processes it is, and when its limit is met.

Fed with every sample after warm-up, judged once a minute.  A leak is told when it would meet its limit within
`leak_within_s`, by default a day: one that would not is no reason to call anybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import inf

from vllm_watchdog.core import causes
from vllm_watchdog.core.catalog import Text, Words, both
from vllm_watchdog.core.phrases import filled
from vllm_watchdog.core.plan import Thresholds
from vllm_watchdog.core.readings import Gpu, Host, Process, Tree, Unknown
from vllm_watchdog.core.symptoms import Sighting
from vllm_watchdog.core.trend import AHEAD, FEED_S, Trend, fed, minutes, rises
from vllm_watchdog.core.units import GIB, MIB, outlook

Trends = tuple[tuple[str, Trend], ...]      # by what grows: `rss`, `rss/PID`, `fds/PID`, `vram/CARD`

AFTER_S = 300.0         # of judgements that agree, before it is told
CLEAR_AFTER_S = 3600.0  # memory that is lost does not come back because it grows more slowly for a while
UNITS = {"rss": (MIB, "MiB"), "vram": (MIB, "MiB"), "fds": (1, "files")}


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes, or files, a second: `slope` as measured, `sure` and `needed` what is held against each other.

    `what` is rss, fds or vram/CARD; `who` the process that grows most, empty where nobody looked; `left` before `limit`.
    """

    what: str
    who: str
    limit: Words
    left: float
    slope: float
    sure: float
    needed: float

    @property
    def leaks(self) -> bool:
        return self.sure >= self.needed

    @property
    def eta_s(self) -> float:
        """Until the limit is met; inf: it does not grow."""
        return self.left / self.slope if self.slope > 0 else inf

    @property
    def per_min(self) -> float:
        """In MiB, or files."""
        return self.slope * 60 / self.unit[0]

    @property
    def unit(self) -> tuple[int, str]:
        return UNITS[self.what.partition("/")[0]]

    @property
    def words(self) -> Text:
        eta = outlook(self.eta_s)
        return filled(causes.GROWS, rate=f"{self.per_min:.3g}", unit=causes.UNITS[self.unit[1]], limit=both(self.limit),
                      eta=Text(eta, eta.replace("days", "天")))


# -- trends

def fed_by_tree(trends: Trends, at: float, tree: Tree) -> Trends:
    """One value in FEED_S is taken.  Trends of processes that have left are dropped."""
    known = dict(trends)
    if at - known.get("rss", Trend()).fed_at < FEED_S:
        return trends
    values: dict[str, float] = {"rss": tree.rss_bytes}
    for process in tree.processes:
        values[f"rss/{process.pid}"] = process.rss_bytes
        if process.fds is not None:
            values[f"fds/{process.pid}"] = process.fds
    cards = {key: trend for key, trend in trends if key.startswith("vram/")}
    return tuple((cards | {key: fed(known.get(key, Trend()), at, value) for key, value in values.items()}).items())


def fed_by_card(trends: Trends, at: float, gpu: Gpu) -> Trends:
    known, key = dict(trends), f"vram/{gpu.index}"
    return tuple((known | {key: fed(known.get(key, Trend()), at, gpu.used_bytes)}).items())


def fresh(before: Trends, after: Trends, key: str) -> bool:
    """Is there a new point to judge by?"""
    return minutes(dict(before).get(key, Trend())) != minutes(dict(after).get(key, Trend()))


# -- judgements

def judged(what: str, who: str, trend: Trend, limit: Words, left: float, within_s: float) -> Growth | None:
    """By the longest window that proves a leak, else by the longest.  None: too little is known."""
    found, left = None, max(left, 1.0)
    for rise in rises(trend, left):
        needed = left / min(within_s, AHEAD * rise.seen_s) if within_s else inf
        growth = Growth(what, who, limit, left, rise.slope, rise.sure, needed)
        if growth.leaks or not (found and found.leaks):
            found = growth
    return found


def of_tree(trends: Trends, tree: Tree, host: Host | Unknown, within_s: float) -> Iterator[Growth]:
    """Of resident memory as a whole, and of the open files of the process that is nearest to its limit."""
    known = dict(trends)
    if isinstance(host, Host):
        limit, left = _memory(host)
        whole = judged("rss", "", known.get("rss", Trend()), limit, left, within_s)
        if whole and whole.sure > 0:
            yield judged("rss", _mostly(known, tree, left), known["rss"], limit, left, within_s) or whole
        elif whole:
            yield whole
    files = [growth for index, process in enumerate(tree.processes)
             if (growth := _files(known, process, role(index, process), within_s))]
    yield from sorted(files, key=lambda growth: (growth.sure / growth.needed, growth.slope))[-1:]


def _memory(host: Host) -> tuple[Text, float]:
    """What limits resident memory, and how much of it is left: the host, or a cgroup that is tighter."""
    if host.cgroup_available is not None and host.cgroup_available < host.memory_available:
        return filled(causes.OF_GROUP, total=f"{(host.cgroup_total or 0) / GIB:.1f}"), host.cgroup_available
    return filled(causes.OF_HOST, total=f"{host.memory_total / GIB:.1f}"), host.memory_available


def _mostly(known: dict[str, Trend], tree: Tree, left: float) -> str:
    slopes = [(found[-1].slope, role(index, process)) for index, process in enumerate(tree.processes)
              if (found := rises(known.get(f"rss/{process.pid}", Trend()), left))]
    return max(slopes, default=(0.0, ""))[1]


def _files(known: dict[str, Trend], process: Process, who: str, within_s: float) -> Growth | None:
    if process.fds is None or process.fd_limit is None:
        return None
    trend = known.get(f"fds/{process.pid}", Trend())
    limit = filled(causes.OF_FILES, total=process.fd_limit)
    return judged("fds", who, trend, limit, process.fd_limit - process.fds, within_s)


def of_card(trends: Trends, gpu: Gpu, within_s: float) -> Iterator[Growth]:
    trend = dict(trends).get(f"vram/{gpu.index}", Trend())
    limit = filled(causes.OF_CARD, total=f"{gpu.total_bytes / GIB:.1f}")
    if growth := judged(f"vram/{gpu.index}", "", trend, limit, gpu.total_bytes - gpu.used_bytes, within_s):
        yield growth


def role(index: int, process: Process) -> str:
    """`EngineCore (PID 12)`: vLLM titles its processes, but for the first one, the API server."""
    title = process.name.removeprefix("VLLM::")
    name = "API server" if index == 0 and title == process.name else title
    return f"{name} (PID {process.pid})"


# -- what they are held against

def sightings(engine: str, growths: tuple[Growth, ...], thresholds: Thresholds) -> Iterator[Sighting]:
    """In MiB, or files, a minute.  The card's level is held against its own threshold, in `symptoms.of_gpu`."""
    for growth in growths:
        factor = 60 / growth.unit[0]
        value, threshold, words = growth.sure * factor, growth.needed * factor, partial(_told, growth)
        if growth.what == "rss":
            asked = thresholds.rss_slope_mib_per_min
            if asked is not None and growth.per_min / asked >= value / threshold:
                value, threshold = growth.per_min, asked
            if threshold == inf:
                continue
            yield Sighting("rss_leak", engine, value, threshold, AFTER_S, threshold * 0.2, words, CLEAR_AFTER_S)
        elif growth.what == "fds" and threshold < inf:
            yield Sighting("fd_leak", engine, value, threshold, AFTER_S, threshold * 0.2, words, CLEAR_AFTER_S)


def _told(growth: Growth) -> Text:
    text = causes.FILES_GROW if growth.what == "fds" else causes.RSS_GROWS_IN if growth.who else causes.RSS_GROWS
    return filled(text, growth=growth.words, who=growth.who)

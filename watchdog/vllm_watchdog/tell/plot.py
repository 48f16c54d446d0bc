"""A plot of the last minutes as one small SVG file: GPU memory by card with its threshold, host memory, KV cache.

Written by hand: three panes of lines over one time axis.  Colours read on white and on black alike, and the text takes
the reader's own colour where the file is shown inside a page.  Pure: points in, text out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import ceil

from vllm_watchdog.core.units import GIB

WIDTH, PANE, GAP, LEFT, RIGHT, TOP, BOTTOM = 760, 110, 34, 70, 20, 24, 30
MOST_POINTS = 300       # of one line: more than the pixels that tell them apart
COLOURS = ("#2f8ac4", "#d1742f", "#4c9a5b", "#a05fb4", "#b8860b", "#c2508b", "#5f7f8f", "#8a6d3b")
GREY, RED = "#8a8f98", "#d64545"


@dataclass(frozen=True, slots=True)
class Point:
    """One look: epoch seconds, bytes in use by card, bytes resident, share of the KV cache; None: not known."""

    wall: float
    cards: tuple[tuple[int, int], ...] = ()
    rss: int | None = None
    kv: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Pane:
    title: str
    top: float                                  # the value at the upper edge
    lines: tuple[Line, ...]
    thresholds: tuple[float, ...] = ()
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """An instant of the axis that is marked, and its name."""

    at: float
    name: str


@dataclass(frozen=True, slots=True)
class Marked:
    """What the points are held against: totals and thresholds by card, and the instant of the incident."""

    opened: float
    totals: tuple[tuple[int, int], ...] = ()
    warns: tuple[tuple[int, float], ...] = field(default=())


def plot(points: Sequence[Point], marked: Marked) -> str:
    """The file; empty where fewer than two points are known."""
    panes = [pane for pane in (_cards(points, marked), _rss(points), _kv(points)) if pane]
    if len(points) < 2 or not panes:
        return ""
    first, last = points[0].wall, max(points[-1].wall, points[0].wall + 1)
    return figure(panes, (first, last), Moment(marked.opened, "the incident"), "memory before the incident", _utc)


def figure(panes: Sequence[Pane], span: tuple[float, float], moment: Moment, label: str,
           told: Callable[[float], str]) -> str:
    """The panes over one axis from `span[0]` to `span[1]`, whose instants `told` puts in words."""
    height, (first, last) = TOP + len(panes) * (PANE + GAP) + BOTTOM - GAP, span
    across = (WIDTH - LEFT - RIGHT) / (last - first)
    body = [text for number, pane in enumerate(panes)
            for text in _pane(pane, TOP + number * (PANE + GAP), first, across)]
    body += _axis(span, across, height, moment, told)
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="11" role="img" aria-label="{label}">',
        f"<style>text{{fill:{GREY}}}</style>", *body, "</svg>", "",
    ))


def _cards(points: Sequence[Point], marked: Marked) -> Pane | None:
    seen = sorted({gpu for point in points for gpu, _ in point.cards})
    totals, warns = dict(marked.totals), dict(marked.warns)
    if not seen:
        return None
    lines = []
    for gpu in seen:
        values = tuple((point.wall, dict(point.cards)[gpu] / GIB) for point in points if gpu in dict(point.cards))
        lines.append(Line(f"GPU {gpu}", values))
    highest = max(value for line in lines for _, value in line.points)
    top = max([highest * 1.05, *(totals[gpu] / GIB for gpu in seen if gpu in totals)]) or 1.0
    limits = {warns[gpu] * totals[gpu] / GIB for gpu in seen if gpu in warns and gpu in totals}
    return Pane("GPU memory, GiB", top, tuple(lines), tuple(sorted(limits)), "GiB")


def _rss(points: Sequence[Point]) -> Pane | None:
    values = tuple((point.wall, point.rss / GIB) for point in points if point.rss is not None)
    if len(values) < 2:
        return None
    return Pane("host memory of the engine (RSS), GiB", max(value for _, value in values) * 1.15 or 1.0, (Line("", values),),
                unit="GiB")


def _kv(points: Sequence[Point]) -> Pane | None:
    values = tuple((point.wall, point.kv * 100) for point in points if point.kv is not None)
    return Pane("KV cache, % in use", 100.0, (Line("", values),), unit="%") if len(values) > 1 else None


def _pane(pane: Pane, y: float, first: float, across: float) -> list[str]:
    def height(value: float) -> float:
        return y + PANE - min(value / pane.top, 1.0) * PANE

    right = WIDTH - RIGHT
    out = [f'<text x="{LEFT}" y="{y - 6:.0f}">{pane.title}</text>']
    for share in (0.0, 0.5, 1.0):
        at = height(pane.top * share)
        out.append(f'<line x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="{GREY}" stroke-opacity=".35"/>')
        out.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{pane.top * share:.3g}</text>')
    for limit in pane.thresholds:
        at = height(limit)
        out.append(f'<line x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="{RED}" stroke-dasharray="5 4">'
                   f"<title>threshold {limit:.1f} {pane.unit}</title></line>")
    for number, line in enumerate(pane.lines):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{LEFT + (x - first) * across:.1f},{height(value):.1f}" for x, value in _thinned(line.points))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        if line.label:
            out.append(f'<text x="{right - 4 - 60 * (len(pane.lines) - 1 - number)}" y="{y - 6:.0f}" text-anchor="end" '
                       f'style="fill:{colour}">{line.label}</text>')
    return out


def _thinned(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    """At most `MOST_POINTS`, and always the last."""
    step = ceil(len(points) / MOST_POINTS)
    return points[::step] if (len(points) - 1) % step == 0 else (*points[::step], points[-1])


def _utc(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).strftime("%H:%M:%SZ")


def _axis(span: tuple[float, float], across: float, height: int, moment: Moment, told: Callable[[float], str]) -> list[str]:
    out, (first, last) = [], span
    for share in (0.0, 0.5, 1.0):
        at = first + (last - first) * share
        anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[share]
        x = LEFT + (at - first) * across
        out.append(f'<text x="{x:.0f}" y="{height - 10}" text-anchor="{anchor}">{told(at)}</text>')
    if first <= moment.at <= last:
        x = LEFT + (moment.at - first) * across
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}" stroke="{RED}" stroke-opacity=".8">'
                   f"<title>{moment.name}</title></line>")
    return out

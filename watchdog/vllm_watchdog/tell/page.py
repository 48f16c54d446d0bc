"""The page that an on-call engineer opens: `README.md`, `timeline.jsonl` and `memory.svg` in each incident's folder.

Written again when the incident has changed, from its own thread; the newest version of an incident wins, and a disk that
is full costs the page, not the daemon.  English first, then Chinese; every sentence is `core.story`'s or `core.lessons`'.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from vllm_watchdog.core import lessons, story
from vllm_watchdog.core import phrases as p
from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.incidents import Incident
from vllm_watchdog.core.phrases import filled
from vllm_watchdog.core.units import iso
from vllm_watchdog.say import Say
from vllm_watchdog.tell.files import owner_only_folder, replace_whole
from vllm_watchdog.tell.plot import Marked, Point, plot

WAITING = 100       # incidents whose page waits to be written
COMPLAIN_S = 60.0
LULL_S = 0.1        # a failure changes its incident five times within this, while who restarts the engine needs Python
PLOT = "memory.svg"
BEFORE_S, AFTER_S = 600.0, 300.0        # what the plot shows of the time around the opening
PROOF_LINES = 12
CELL = 160          # characters of one cell of a table


class Pages:
    """`folder`: the incidents' folder; `host`: this machine's name."""

    def __init__(self, folder: Path, clock: Callable[[], float], say: Say, host: str = "") -> None:
        self._folder, self._clock, self._say, self._host = folder, clock, say, host
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[Incident, Callable[[], Sequence[Point]]]] = {}
        self._stopping = False
        self._complained_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="pages", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_s: float) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def write(self, incident: Incident, points: Callable[[], Sequence[Point]] = tuple) -> None:
        """`points` tells the last minutes, oldest first; it is called in the thread that writes."""
        with self._changed:
            if len(self._waiting) < WAITING or incident.id in self._waiting:
                self._waiting[incident.id] = incident, points
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
                self._changed.wait_for(lambda: self._stopping, LULL_S)
                incident, points = self._waiting.pop(next(iter(self._waiting)))
            try:
                self._put(incident, points())
            except OSError as error:
                if self._clock() - self._complained_at >= COMPLAIN_S:
                    self._complained_at = self._clock()
                    self._say("page.failed", incident=incident.id, why=error.strerror or type(error).__name__)

    def _put(self, incident: Incident, points: Sequence[Point]) -> None:
        folder = self._folder / incident.id
        owner_only_folder(folder)
        replace_whole(folder / "timeline.jsonl", timeline(incident).encode())
        if drawn := plotted(incident, points):
            replace_whole(folder / PLOT, drawn.encode())
        replace_whole(folder / "README.md", page(incident, self._host, (folder / PLOT).exists()).encode())


def timeline(incident: Incident) -> str:
    """One JSON object a line: `time` (UTC), `what`, `text`, and the figures by name."""
    return "".join(
        json.dumps({"time": iso(story.wall(incident, entry.at)), "what": entry.what, "text": entry.text}
                   | dict(entry.facts), ensure_ascii=False) + "\n"
        for entry in incident.timeline
    )


def plotted(incident: Incident, points: Sequence[Point]) -> str:
    """The plot; empty where the points do not reach back to the opening: then an earlier plot is the better one."""
    opened = incident.wall_opened
    if not points or points[0].wall > opened:
        return ""
    cards = incident.levels.cards if incident.levels else ()
    marked = Marked(opened, tuple((card.gpu, card.total) for card in cards),
                    tuple((card.gpu, card.warn) for card in cards if card.warn is not None))
    return plot([point for point in points if opened - BEFORE_S <= point.wall <= opened + AFTER_S], marked)


def page(incident: Incident, host: str = "", has_plot: bool = False) -> str:
    """The whole page, in Markdown: English, then Chinese."""
    return "\n".join([*_part(incident, host, has_plot, "en"), "", "---", "", *_part(incident, host, False, "zh"), ""])


def _part(incident: Incident, host: str, has_plot: bool, language: str) -> Iterator[str]:
    """One language's half.  What to do comes before how it was."""
    def said(text: Text) -> str:
        return _one_line(text.of(language))

    yield f"# {said(story.heading(incident))}"
    yield from ("", said(story.happened(incident, host)), "", f"**{said(story.state(incident))}**", "")
    if failures := lessons.failures(incident):
        numbered = (f"{each.number}. {said(text)}" for each, text in zip(incident.failures, failures, strict=True))
        yield from (said(filled(p.FAILURES, n=incident.failures[-1].number, list="")), "", *numbered, "")
    if todo := _todo(incident, said):
        yield from (f"## {said(p.HEADINGS['todo'])}", "", *todo, "")
    yield from ("| | |", "| --- | --- |")
    yield from (f"| {said(label)} | {_cell(text)} |" for label, text in facts(incident, language))
    yield from ("", f"## {said(p.HEADINGS['proof'])}", "")
    above = () if language == "en" else lessons.proof(incident)
    proof = tuple(line for line in lessons.proof(incident, language) if line not in above)[:PROOF_LINES]
    if proof:
        yield from ("```text", *(line.replace("```", "'''") for line in proof), "```", "")
    if above:
        yield from (said(p.PROOF_ABOVE), "")
    if incident.flights:
        flights = (f"- {said(story.flight_of(each))}" for each in incident.flights)
        yield from (f"## {said(p.HEADINGS['flight'])}", "", *flights, "")
    if rows := story.memory(incident):
        head = (p.LABELS["what"], p.LABELS["used"], p.LABELS["compare"])
        yield from (f"## {said(p.HEADINGS['memory'])}", "", f"| {' | '.join(map(said, head))} |", "| --- | --- | --- |")
        yield from (f"| {' | '.join(_cell(cell.of(language)) for cell in row)} |" for row in rows)
        yield ""
    if has_plot:
        yield from (f"![{said(p.HEADINGS['memory'])}]({PLOT})", "")
    if incident.class_ != "snapshot":
        steps = [f"- `{story.clock(incident, step.at)}` {said(step.text)}" for step in story.actions(incident)]
        yield from (f"## {said(p.HEADINGS['done'])}", "", *(steps or [said(p.NO_DEEDS)]), "")
    yield said(p.FILES)


def _todo(incident: Incident, said: Callable[[Text], str]) -> list[str]:
    """What to change, numbered through; of several failures each class under a head of its own."""
    lines: list[str] = []
    number = count(1)
    for lesson in lessons.lessons(incident):
        lines += [*([""] if lines else []), f"### {said(lesson.head)}", ""] if len(incident.failures) > 1 else []
        lines += (f"{next(number)}. {said(text)}" for text in lesson.lines)
    return lines


def facts(incident: Incident, language: str) -> Iterator[tuple[Text, str]]:
    """When, what, how it ended, and what clients saw: a label and its text."""
    yield p.LABELS["when"], when(incident.wall_opened)
    yield p.LABELS["engine"], f"{incident.engine}#{incident.generation}"
    yield p.LABELS["cause"], incident.class_
    if len(incident.failures) < 2 and (ended := story.ended(incident)):
        yield p.LABELS["ended"], ended.of(language)
    if gap := story.gap(incident):
        yield p.LABELS["gap"], gap.of(language)
    for text in story.clients(incident):
        yield p.LABELS["clients"], text.of(language)


def when(wall: float) -> str:
    """UTC, and the host's own time with its zone where that differs."""
    utc = datetime.fromtimestamp(wall, UTC)
    local = utc.astimezone()
    if not local.utcoffset():
        return f"{utc:%Y-%m-%d %H:%M:%S} UTC"
    return f"{utc:%Y-%m-%d %H:%M:%S} UTC ({local:%Y-%m-%d %H:%M:%S %Z%z})"


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")[:CELL]


def _one_line(text: str) -> str:
    return " ".join(text.split())

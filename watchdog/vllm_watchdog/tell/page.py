"""The page that an on-call engineer opens: `README.md` and `timeline.jsonl` in each incident's folder.

Written again whenever the incident changes, from its own thread; the newest version of an incident wins, and a disk that
is full costs the page, not the daemon.  English first, then Chinese, from the one catalogue.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from vllm_watchdog.core.catalog import CATALOG
from vllm_watchdog.core.incidents import Incident
from vllm_watchdog.tell.files import Say, owner_only_folder, replace_whole

WAITING = 100       # incidents whose page waits to be written
COMPLAIN_S = 60.0


class Pages:
    """`folder`: the incidents' folder."""

    def __init__(self, folder: Path, clock: Callable[[], float], say: Say) -> None:
        self._folder, self._clock, self._say = folder, clock, say
        self._changed = threading.Condition()
        self._waiting: dict[str, Incident] = {}
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

    def write(self, incident: Incident) -> None:
        with self._changed:
            if len(self._waiting) < WAITING or incident.id in self._waiting:
                self._waiting[incident.id] = incident
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
                incident = self._waiting.pop(next(iter(self._waiting)))
            try:
                self._put(incident)
            except OSError as error:
                if self._clock() - self._complained_at >= COMPLAIN_S:
                    self._complained_at = self._clock()
                    self._say("page.failed", incident=incident.id, why=error.strerror or type(error).__name__)

    def _put(self, incident: Incident) -> None:
        folder = self._folder / incident.id
        owner_only_folder(folder)
        replace_whole(folder / "timeline.jsonl", timeline(incident).encode())
        replace_whole(folder / "README.md", page(incident).encode())


def timeline(incident: Incident) -> str:
    """One JSON object a line: `time` (UTC), `what`, `text`."""
    return "".join(
        json.dumps({"time": _utc(incident, entry.at), "what": entry.what, "text": entry.text}, ensure_ascii=False) + "\n"
        for entry in incident.timeline
    )


def page(incident: Incident) -> str:
    """What happened, when, what was done, what to change.  Markdown."""
    entry = CATALOG.get(incident.class_)
    resolved = "not resolved yet / 尚未恢复" if incident.wall_resolved is None else _iso(incident.wall_resolved)
    lines = [f"# {incident.id}", ""]
    if entry:
        lines += [f"**{entry.title.en}**  ", f"**{entry.title.zh}**", ""]
    if incident.page:
        lines += [f"**{_one_line(incident.page)}**", ""]
    lines += [
        "| | |", "| --- | --- |",
        f"| cause / 原因 | `{incident.class_}` |",
        f"| service, engine / 服务、引擎 | {incident.service}, {incident.engine} (generation {incident.generation}) |",
        f"| urgency / 紧急程度 | {incident.urgency} |",
        f"| opened / 开始 | {_iso(incident.wall_opened)} |",
        f"| resolved / 恢复 | {resolved} |", "",
        "## What proves it / 证据", "", *_quoted([incident.text, *(finding.text for finding in incident.findings)]), "",
    ]
    if entry and entry.advice:
        lines += ["## What to change / 建议", "", *(f"- {text.en}  \n  {text.zh}" for text in entry.advice), ""]
    lines += ["## What happened and what was done / 经过", ""]
    lines += [f"- `{_utc(incident, each.at)[11:23]}` **{each.what}** {_one_line(each.text)}" for each in incident.timeline]
    lines += ["", "Evidence lies beside this page; `bundle.txt` lists it. / 证据文件在本目录，清单见 `bundle.txt`。", ""]
    return "\n".join(lines)


def _quoted(texts: list[str]) -> list[str]:
    return ["```text", *dict.fromkeys(_one_line(text).replace("```", "'''") for text in texts if text), "```"]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _utc(incident: Incident, at: float) -> str:
    return _iso(incident.wall_opened + at - incident.opened_at)


def _iso(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

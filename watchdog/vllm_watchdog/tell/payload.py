"""What an alert says: one incident in plain words, as the JSON that a channel receives (version 1).

Pure.  It holds no command line and no secret (the core clips and masks the log line that proves a cause); every part
has a limit, so all of it stays below 32 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from vllm_watchdog.core.catalog import CATALOG, Text
from vllm_watchdog.core.commands import Alert
from vllm_watchdog.core.incidents import Incident, Urgency
from vllm_watchdog.tell.journal import iso

text_limit = 300            # characters of one line
timeline_lines = 5          # the newest
advice_lines = 8


class Language(StrEnum):
    EN = "en"
    ZH = "zh"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Writer:
    """`incidents`: the folder that holds the evidence bundles, one an incident id."""

    host: str
    incidents: Path
    language: Language = Language.BOTH

    def payload(self, alert: Alert, wall: float) -> dict[str, Any]:
        """`wall`: epoch seconds of telling."""
        incident, entry = alert.incident, CATALOG.get(alert.incident.class_)
        title = entry.title if entry else Text(incident.class_, incident.class_)
        folder = "" if alert.kind == "test" else str(self.incidents / incident.id)
        advice = entry.advice[:advice_lines] if entry else ()
        return {
            "version": 1, "kind": alert.kind, "incident": incident.id, "service": incident.service,
            "engine": incident.engine, "class": incident.class_, "urgency": incident.urgency.value,
            "title": {"en": title.en, "zh": title.zh},
            "text": "\n\n".join(self._text(tongue, alert.kind, incident, title, folder) for tongue in self._tongues),
            "advice": [tongue.of(line) for tongue in self._tongues for line in advice],
            "host": self.host, "at": iso(wall), "folder": folder,
        }

    @property
    def _tongues(self) -> tuple[_Tongue, ...]:
        return _tongues[self.language]

    def _text(self, tongue: _Tongue, kind: str, incident: Incident, title: Text, folder: str) -> str:
        head = tongue.head.format(kind=tongue.kinds.get(kind, kind), title=tongue.of(title), service=incident.service,
                                  engine=incident.engine, host=self.host)
        steps = [f"- {entry.what} {entry.text}".rstrip() for entry in incident.timeline[-timeline_lines:]]
        where = [tongue.folder.format(folder)] if folder else []
        return "\n".join([head, *(line[:text_limit] for line in (incident.text, *steps) if line), *where])


@dataclass(frozen=True, slots=True)
class _Tongue:
    name: str               # a field of catalog.Text
    head: str
    folder: str
    kinds: dict[str, str]

    def of(self, text: Text) -> str:
        return text.zh if self.name == "zh" else text.en


_en = _Tongue("en", "[{kind}] {title}: service {service}, engine {engine}, host {host}", "Evidence: {}",
              {"opened": "OPENED", "worsened": "WORSE", "resolved": "RESOLVED", "test": "TEST"})
_zh = _Tongue("zh", "【{kind}】{title}：服务 {service}，引擎 {engine}，主机 {host}", "证据目录：{}",
              {"opened": "故障", "worsened": "恶化", "resolved": "已恢复", "test": "测试"})
_tongues = {Language.EN: (_en,), Language.ZH: (_zh,), Language.BOTH: (_en, _zh)}


def trial(wall: float) -> Alert:
    """The alert that `alert test` sends."""
    return Alert("test", Incident("test", "test", "test", 0, "none", Urgency.WARNING, 0.0, wall, 0.0,
                                  text="A test of this channel; nothing is wrong."))

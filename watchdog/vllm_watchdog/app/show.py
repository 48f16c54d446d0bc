"""Documents of the daemon and rows of the history as plain text for a terminal.  Pure: text in, text out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unicodedata import east_asian_width

from vllm_watchdog.core import phrases as p
from vllm_watchdog.core import story
from vllm_watchdog.core.catalog import CATALOG, Text
from vllm_watchdog.core.incidents import Incident, Urgency
from vllm_watchdog.tell import page

GIB = 2**30
LABEL = 14          # columns of the widest label of a fact
PROOF = 240         # characters of a proving line; the page has all of it


def status(doc: dict[str, Any]) -> str:
    """The answer to `status`, as a table a human reads in five seconds."""
    paused = "; automatic actions are paused" if doc["paused"] else ""
    lines = [f"{doc['health'].upper()}{paused}   ({_when(doc['at'])})", ""]
    for service in doc["services"]:
        serving = service["serving"] or "nobody"
        lines.append(f"service {service['name']}: {serving} serves on port {service['port']}, "
                     f"{service['side']} is meant to, since {_when(service['since'])}")
        if lowered := service.get("lowered"):
            lines.append(f"  lowered to {lowered['to']} requests at a time, since {_when(lowered['since'])}: "
                         f"{lowered['why']}")
    lines += ["", *table(("ENGINE", "PHASE", "GEN", "PID", "PORT", "GPUS", "RSS", "KV", "RUN", "WAIT", "SINCE"),
                         (_engine(engine) for engine in doc["engines"]))]
    lines += [f"  {engine['name']}: {line}" for engine in doc["engines"] for line in _notes(engine)]
    lines += [f"  {name}: waits for its next start: {', '.join(keys)}" for name, keys in doc.get("pending", {}).items()]
    lines += [f"waits for a restart of the daemon: {', '.join(doc['fixed'])}"] if doc.get("fixed") else []
    lines += ["", *_gpus(doc["gpus"]), _host(doc["host"])]
    if isinstance(groups := doc.get("cgroups"), dict):
        lines.append(f"control groups: none of our own, {groups['unknown']}")
    if isinstance(doc["kernel_log"], dict):
        lines.append(f"kernel log: unknown, {doc['kernel_log']['unknown']}")
    lines += ["", *([_open(incident) for incident in doc["incidents"]] or ["no open incident"])]
    lines += [_channel(channel) for channel in doc.get("alerts", [])]
    return "\n".join(lines)


def _engine(engine: dict[str, Any]) -> tuple[str, ...]:
    tree, metrics = engine["tree"], engine["metrics"]
    known = {} if "unknown" in metrics else metrics
    return (
        engine["name"], engine["phase"], str(engine["generation"]), str(engine["pid"] or "-"), str(engine["port"]),
        ",".join(map(str, engine["gpus"])) or "-",
        f"{tree['rss_bytes'] / GIB:.1f} GiB" if tree else "-",
        _figure(known.get("kv_usage"), "{:.0%}"), _figure(known.get("running"), "{:.0f}"),
        _figure(known.get("waiting"), "{:.0f}"), _when(engine["since"]),
    )


def _notes(engine: dict[str, Any]) -> Iterator[str]:
    if engine["cause"]:
        yield f"{engine['cause']}: {engine['why']}"
    if engine["next_try"]:
        yield f"the next try is at {_when(engine['next_try'])}"
    for growth in engine["growth"]:
        if growth["leaks"] or growth["eta_s"] is not None:
            mostly = f", {growth['who']}" if growth["who"] else ""
            yield f"{'LEAK: ' if growth['leaks'] else ''}{growth['what']} grows by {growth['text']}{mostly}"
    if engine["probe"] != "ok":
        yield f"a one-token request proves nothing: {engine['probe']}"


def _gpus(gpus: Any) -> Iterator[str]:
    if isinstance(gpus, dict):
        yield f"GPUs: unknown, {gpus['unknown']}"
        return
    for gpu in gpus:
        used, total = gpu["used_bytes"] / GIB, gpu["total_bytes"] / GIB
        holders = ", ".join(f"{row['engine'] or row['name']} (PID {row['pid']}) "
                            + _figure(row["used_bytes"] and row["used_bytes"] / GIB, "{:.1f} GiB")
                            for row in gpu["processes"][:6])
        yield (f"GPU {gpu['index']} {gpu['name']}: {used:.1f} of {total:.1f} GiB ({used / total:.0%}), "
               f"{_figure(gpu['utilization'], '{}%')} busy, {_figure(gpu['temperature_c'], '{} °C')}; "
               + (holders or "no process"))


def _host(host: dict[str, Any]) -> str:
    if "unknown" in host:
        return f"host: unknown, {host['unknown']}"
    return (f"host: {host['memory_available'] / GIB:.1f} of {host['memory_total'] / GIB:.1f} GiB memory available, "
            f"{host['disk_free'] / GIB:.1f} GiB free on the log disk, load {host['load']:.1f}")


def _channel(channel: dict[str, Any]) -> str:
    delivered = _when(channel["delivered_wall"]) if channel["delivered_wall"] else "nothing yet"
    waiting = f"; {channel['waiting']} waiting" if channel["waiting"] else ""
    failing = f"; FAILING since {_when(channel['failing_since_wall'])}: {channel['failing']}" if channel["failing"] else ""
    return f"alerts to {channel['name']}: last delivered {delivered}{waiting}{failing}"


def _open(incident: dict[str, Any]) -> str:
    return f"OPEN {incident['urgency'].upper()} {incident['id']}: {incident['text']}"


def incidents(rows: Sequence[dict[str, Any]], language: str = "en") -> str:
    """The history, newest first."""
    if not rows:
        return "no incidents"
    return "\n".join(table(("WHEN", "LASTED", "STATE", "ENGINE", "WHAT", "ID"), (
        (_when(row["wall_opened"]), _lasted(row), _state(row), row["engine"], _title(row["class"], language), row["id"])
        for row in rows
    )))


def _state(row: dict[str, Any]) -> str:
    if row["class"] == "snapshot":
        return "-"
    if row["wall_resolved"] is not None:
        return "resolved"
    return "A HUMAN IS NEEDED" if row["urgency"] == Urgency.PAGE else "open"


def _title(class_: str, language: str) -> str:
    return CATALOG[class_].title.of(language) if class_ in CATALOG else class_


def incident(told: Incident, folder: Path, language: str = "en") -> str:
    """One incident as its page tells it: what, how it stands, what to do first; the timeline at the end."""
    def said(text: Text) -> str:
        return text.of(language)

    lines = [said(story.heading(told)), said(story.state(told)), ""]
    if advice := story.advice(told):
        lines += [said(p.HEADINGS["todo"]), *(f"  {number}. {said(text)}" for number, text in enumerate(advice, 1)), ""]
    lines += [f"  {_padded(said(label), LABEL)} {text}" for label, text in page.facts(told, language)]
    if proof := story.proof(told):
        lines += ["", said(p.HEADINGS["proof"]), *(f"  {line[:PROOF]}" for line in proof)]
    if told.flights:
        lines += ["", said(p.HEADINGS["flight"]), *(f"  {said(story.flight_of(each))}" for each in told.flights)]
    if rows := story.memory(told.levels):
        cells = [[cell.of(language) for cell in row] for row in rows]
        lines += ["", said(p.HEADINGS["memory"]), *(f"  {line}" for line in table(cells[0], cells[1:]))]
    if steps := story.actions(told):
        lines += ["", said(p.HEADINGS["done"]), *(f"  {story.clock(told, step.at)} {said(step.text)}" for step in steps)]
    lines += ["", f"{said(p.HEADINGS['files'])}: {folder / told.id}", "", said(p.HEADINGS["timeline"])]
    lines += [f"  {_clock(story.wall(told, entry.at))}  {entry.what:<9} {entry.text}" for entry in told.timeline]
    return "\n".join(lines)


def event(line: dict[str, Any], language: str = "en") -> str:
    """A line of the journal in words: its time, then a sentence; its fields where no sentence is known."""
    words = p.worded(line["say"], line)
    if words is not None:
        return f"{line.get('wall', '')} {words.of(language)}".lstrip()
    return worded(line)


def worded(line: Mapping[str, Any]) -> str:
    """A journal line with its fields in order: `2026-11-29T14:41:57.123Z engine.phase engine=primary#2 now=serving`."""
    left_out = ("wall", "at", "say", "decided")
    fields = " ".join(f"{key}={_quoted(value)}" for key, value in line.items() if key not in left_out)
    return f"{line.get('wall', '')} {line['say']} {fields}".strip()


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and not set(text) & {" ", "=", '"'}
    return text if plain else json.dumps(text, ensure_ascii=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell."""
    all_rows = [head, *rows]
    widths = [max(_width(row[column]) for row in all_rows) for column in range(len(head))]
    return ["  ".join(_padded(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in all_rows]


def _width(text: str) -> int:
    """Columns of a terminal: a Chinese character takes two."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def _padded(text: str, width: int) -> str:
    return text + " " * (width - _width(text))


def _figure(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _when(wall: float | None) -> str:
    return "-" if wall is None else datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _clock(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).strftime("%H:%M:%S.%f")[:-3]


def _lasted(row: dict[str, Any]) -> str:
    if row["wall_resolved"] is None:
        return "open"
    seconds = row["wall_resolved"] - row["wall_opened"]
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"

"""Documents of the daemon and rows of the history as plain text for a terminal.  Pure: text in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

GIB = 2**30


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
    failing = f": {channel['failing']}" if channel["failing"] else ""
    return f"alerts to {channel['name']}: last delivered {delivered}{waiting}{failing}"


def _open(incident: dict[str, Any]) -> str:
    return f"OPEN {incident['urgency'].upper()} {incident['id']}: {incident['text']}"


def incidents(rows: Sequence[dict[str, Any]]) -> str:
    """The history, newest first."""
    if not rows:
        return "no incidents"
    return "\n".join(table(("OPENED", "LASTED", "URGENCY", "ENGINE", "CAUSE", "ID"), (
        (_when(row["wall_opened"]), _lasted(row), row["urgency"], row["engine"], row["class"], row["id"])
        for row in rows
    )))


def incident(row: dict[str, Any], folder: Path) -> str:
    """One incident: what, when, the lines that prove it, what was done, where the evidence lies."""
    whole = row["incident"]
    lines = [
        row["id"],
        f"  cause     {row['class']}: {whole['text']}",
        f"  engine    {row['engine']}, generation {whole['generation']}",
        f"  opened    {_when(row['wall_opened'])}",
        f"  resolved  {_when(row['wall_resolved'])} ({_lasted(row)})",
    ]
    offset = whole["wall_opened"] - whole["opened_at"]
    lines += ["", "timeline"]
    lines += [f"  {_clock(entry['at'] + offset)}  {entry['what']:<9} {entry['text']}" for entry in whole["timeline"]]
    if whole["findings"]:
        lines += ["", "log lines that prove it", *(f"  {finding['text']}" for finding in whole["findings"])]
    return "\n".join([*lines, "", f"evidence  {folder / row['id']}"])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell."""
    all_rows = [head, *rows]
    widths = [max(len(row[column]) for row in all_rows) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in all_rows]


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

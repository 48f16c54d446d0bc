"""`llm-watchdog status`: the report as a screen that a human reads in five seconds.  Colours on a terminal only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_watchdog.core.units import GIB, utc

BARS = "▁▂▃▄▅▆▇█"
SPARK_CELLS = 30
GAP = 2                 # blanks behind a column
COLUMNS: dict[str, JustifyMethod] = {
    "ENGINE": "left", "PHASE": "left", "SINCE": "right", "GEN": "right", "PID": "right", "PORT": "right", "GPUS": "left",
    "RSS": "right", "KV": "right", "RUN": "right", "WAIT": "right"}
SPARED = ("GPUS", "WAIT", "RUN", "KV", "RSS", "GEN", "SINCE", "PORT", "PID")     # in this order, for want of room
WATCH_S = 1.0
PLAIN_WIDTH = 250       # of a file or a pipe: nothing is cut there
TONE = {"healthy": "bold green", "degraded": "bold yellow", "down": "bold red"}
PHASE_TONE = {"serving": "green", "asleep": "cyan", "stopped": "dim", "suspect": "yellow", "held": "bold red",
              "wedged": "bold red"}
AGES = (("d", 86_400), ("h", 3_600), ("min", 60))
EXIT = {"healthy": 0, "degraded": 1}
DOWN, UNREACHABLE = 3, 4

Doc = dict[str, Any]


def console(out: Any = None) -> Console:
    """Rich's own idea of a terminal, and no guesses about numbers and words."""
    out = out or sys.stdout
    return Console(file=out, highlight=False, width=None if out.isatty() else PLAIN_WIDTH)


def show(doc: Doc, series: Doc, as_json: bool, screen: Console) -> int:
    """Prints one report; the exit code."""
    if as_json:
        screen.file.write(json.dumps(doc, indent=1, ensure_ascii=False) + "\n")
    else:
        screen.print(view(doc, series, screen.width), soft_wrap=True)
    return EXIT.get(doc.get("health", ""), DOWN)


def watch(ask: Callable[[], tuple[Doc, Doc]], screen: Console, unreachable: type[Exception],
          pause: Callable[[float], None] = time.sleep) -> int:
    """Until Ctrl-C: the screen again each second, in a file or a pipe below the last one; while nobody answers, the last
    one and since when."""
    doc: Doc | None = None
    series: Doc = {}
    seen = time.monotonic()
    code = UNREACHABLE
    with Live(console=screen, screen=screen.is_terminal, auto_refresh=False) as live:
        while True:
            try:
                doc, series = ask()
                seen, code, lost = time.monotonic(), EXIT.get(doc["health"], DOWN), Text()
            except unreachable as error:
                lost = Text(f"no contact for {time.monotonic() - seen:.0f} s: {error}", "bold red")
            try:
                seen_last = [view(doc, series, screen.width)] if doc else []
                told = Group(*([lost] if lost else []), *seen_last)
                if screen.is_terminal:
                    live.update(told, refresh=True)
                else:
                    screen.print(told, soft_wrap=True)
                    screen.file.flush()
                pause(WATCH_S)
            except KeyboardInterrupt:
                return code


def view(doc: Doc, series: Doc, width: int) -> RenderableType:
    """For so many columns.  `series`: samples of the last ten minutes by subject, for the sparklines; may be empty."""
    head = Text.assemble((doc["health"].upper(), TONE[doc["health"]]),
                         ("; automatic actions are paused" if doc["paused"] else "", "yellow"), f"   ({when(doc['at'])})")
    parts: list[RenderableType] = [head, "", *(_service(doc, service) for service in doc["services"]), ""]
    parts += [*_gateway(doc["gateway"]), ""] if doc.get("gateway") else []
    parts += [_engines(doc, width)]
    told = {incident["text"] for incident in doc["incidents"]}
    parts += [note for engine in doc["engines"] for note in _notes(engine, doc["at"], told)]
    parts += [Text(f"  {name}: waits for its next start: {', '.join(keys)}")
              for name, keys in doc.get("pending", {}).items()]
    parts += [Text(f"waits for a restart of the daemon: {', '.join(doc['fixed'])}")] if doc.get("fixed") else []
    parts += ["", *_gpus(doc["gpus"], series), _host(doc["host"])]
    if isinstance(groups := doc.get("cgroups"), dict):
        parts.append(Text(f"control groups: none of our own, {groups['unknown']}", "dim"))
    if isinstance(doc["kernel_log"], dict):
        parts.append(Text(f"kernel log: unknown, {doc['kernel_log']['unknown']}", "dim"))
    parts += ["", *([_open(incident) for incident in doc["incidents"]] or [Text("no open incident")])]
    parts += [_channel(channel) for channel in doc.get("alerts", [])]
    return Group(*parts)


def _service(doc: Doc, service: Doc) -> Text:
    serving = service["serving"] or "nobody"
    text = Text.assemble(f"service {service['name']}: ", (serving, "green" if service["serving"] else "bold red"),
                         f" serves on port {service['port']}; the {service['side']} is to serve",
                         f" since {when(service['since'])}")
    if latest := doc.get("totals", {}).get("latest", {}).get(service["name"]):
        gap = "nobody serves yet" if latest["gap_s"] is None else f"gap {latest['gap_s']:.1f} s"
        text.append(f"; last {latest['kind']} {when(latest['at'])}, {gap}", "dim")
    if lowered := service.get("lowered"):
        text.append(f"\n  lowered to {lowered['to']} requests at a time, since {when(lowered['since'])}: {lowered['why']}",
                    "yellow")
    return text


def _gateway(load: Doc) -> Iterator[Text]:
    """What waits in it for each service, and what the engine has; what keeps requests from it stands out."""
    if "unknown" in load:
        yield Text(f"gateway: unknown, {load['unknown']}", "bold red")
        return
    refused = f", quarantined prompts {load['quarantined']}" if load["quarantined"] else ""
    yield Text(f"gateway: clients' connections {load['connections']}{refused}")
    for service in load["services"]:
        long = f" ({service['waiting_long']} long)" if service["waiting_long"] else ""
        has = [f"in flight {_of(service['requests'], service['max_concurrent'])}",
               f"prompts about {_of(service['prompt_tokens'], service['max_tokens'])} tokens"] if service["engine"] else []
        text = Text(f"  {service['service']} -> {service['engine'] or 'nobody'}: ")
        text.append(", ".join([*has, f"waiting {service['waiting']}{long}"]))
        if service["breaker"] != "closed":
            text.append(f"; breaker {service['breaker'].replace('_', ' ')}", "bold red")
        if service["throttled"]:
            text.append(f"; throttled: {service['throttled']}", "yellow")
        yield text


def _of(count: int, most: int | None) -> str:
    return f"{count:,}" if most is None else f"{count:,} of {most:,}"


def _engines(doc: Doc, width: int) -> Table:
    """Whole columns are left out where the terminal is narrow, the least needed first; no cell is ever cut."""
    rows = [_row(engine, doc["at"]) for engine in doc["engines"]]
    widths = {name: max(cell_len(name), *(cell_len(row[name].plain) for row in rows)) + GAP for name in COLUMNS}
    for name in SPARED:
        if sum(widths.values()) <= width:
            break
        del widths[name]
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim")
    for name in widths:
        table.add_column(name, justify=COLUMNS[name], overflow="fold", no_wrap=name in SPARED)
    for row in rows:
        table.add_row(*(row[name] for name in widths))
    return table


def _row(engine: Doc, at: float) -> dict[str, Text]:
    tree, metrics = engine["tree"], engine["metrics"]
    return {
        "ENGINE": Text(engine["name"], "bold"), "PHASE": Text(engine["phase"], PHASE_TONE.get(engine["phase"], "blue")),
        "SINCE": Text(_figure(engine["since"] and age(at - engine["since"]), "{}")), "GEN": Text(str(engine["generation"])),
        "PID": Text(str(engine["pid"] or "-")), "PORT": Text(str(engine["port"])),
        "GPUS": Text(",".join(map(str, engine["gpus"])) or "-"),
        "RSS": Text(f"{tree['rss_bytes'] / GIB:.1f} GiB" if tree else "-"),
        "KV": Text(_figure(metrics.get("kv_usage"), "{:.0%}")), "RUN": Text(_figure(metrics.get("running"), "{:.0f}")),
        "WAIT": Text(_figure(metrics.get("waiting"), "{:.0f}")),
    }


def _notes(engine: Doc, at: float, told: set[str]) -> Iterator[Text]:
    """`told`: what open incidents say, which is not said twice."""
    if load := engine.get("loading"):
        about = f" of about {load['about_s']:.0f} s" if load["about_s"] else ""
        yield Text(f"  {engine['name']}: {load['stage'] or 'starting'}, {at - engine['since']:.0f} s{about}", "blue")
    if engine.get("doubt"):
        yield Text(f"  {engine['name']}: {engine['doubt']}", "yellow")
    if engine["cause"]:
        why = "" if engine["why"] in told else f": {engine['why']}"
        yield Text(f"  {engine['name']}: {engine['cause']}{why}", "yellow")
    if engine.get("waits"):
        yield Text(f"  {engine['name']}: its start waits: {engine['waits']}", "yellow")
    if engine["next_try"]:
        yield Text(f"  {engine['name']}: the next try is at {when(engine['next_try'])}")
    for growth in engine["growth"]:
        if growth["leaks"] or growth["eta_s"] is not None:
            mostly = f", {growth['who']}" if growth["who"] else ""
            leak = "LEAK: " if growth["leaks"] else ""
            yield Text(f"  {engine['name']}: {leak}{growth['what']} grows by {growth['text']}{mostly}", "yellow")
    if engine["probe"] != "ok":
        yield Text(f"  {engine['name']}: a one-token request proves nothing: {engine['probe']}", "yellow")


def _gpus(gpus: Any, series: Doc) -> Iterator[Text]:
    if isinstance(gpus, dict):
        yield Text(f"GPUs: unknown, {gpus['unknown']}", "dim")
        return
    for gpu in gpus:
        used, total = gpu["used_bytes"] / GIB, gpu["total_bytes"] / GIB
        share = used / total
        tone = "red" if share >= (gpu["vram_degrade"] or 2) else "yellow" if share >= (gpu["vram_warn"] or 2) else "green"
        holders = ", ".join(f"{row['engine'] or row['name']} (PID {row['pid']}) "
                            + _figure(row["used_bytes"] and row["used_bytes"] / GIB, "{:.1f} GiB")
                            for row in gpu["processes"][:6])
        yield Text.assemble(
            f"GPU {gpu['index']} {gpu['name']}: ", (f"{used:.1f} of {total:.1f} GiB ({share:.0%})", tone),
            f", {_figure(gpu['utilization'], '{}%')} busy, {_figure(gpu['temperature_c'], '{} °C')}; ",
            holders or "no process")
        if line := spark(series.get(f"gpu/{gpu['index']}", {}).get("used_bytes", []), gpu["total_bytes"]):
            yield Text.assemble("  ", (line, tone), ("  10 min", "dim"))


def spark(values: list[float | None], most: float) -> str:
    """SPARK_CELLS bars, oldest first, each the peak of its part of the values; a blank where nothing was sampled."""
    cells = [values[len(values) * i // SPARK_CELLS: len(values) * (i + 1) // SPARK_CELLS] for i in range(SPARK_CELLS)]
    peaks = [max((value for value in cell if value is not None), default=None) for cell in cells if cell]
    return "".join(" " if peak is None else BARS[min(int(peak / most * len(BARS)), len(BARS) - 1)] for peak in peaks)


def _host(host: Doc) -> Text:
    if "unknown" in host:
        return Text(f"host: unknown, {host['unknown']}", "dim")
    return Text(f"host: {host['memory_available'] / GIB:.1f} of {host['memory_total'] / GIB:.1f} GiB memory available, "
                f"{host['disk_free'] / GIB:.1f} GiB free on the log disk, load {host['load']:.1f}")


def _channel(channel: Doc) -> Text:
    delivered = when(channel["delivered_wall"]) if channel["delivered_wall"] else "nothing yet"
    waiting = f"; {channel['waiting']} waiting" if channel["waiting"] else ""
    failing = f"; FAILING since {when(channel['failing_since_wall'])}: {channel['failing']}" if channel["failing"] else ""
    return Text(f"alerts to {channel['name']}: last delivered {delivered}{waiting}{failing}", "yellow" if failing else "")


def _open(incident: Doc) -> Text:
    tone = "yellow" if incident["urgency"] == "warning" else "bold red"
    return Text.assemble((f"OPEN {incident['urgency'].upper()}", tone), f" {incident['id']}: {incident['text']}")


def _figure(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def age(seconds: float) -> str:
    """In the unit that leaves two figures or three: `90 s`, `2 min`, `30 h`."""
    unit, size = next(((unit, size) for unit, size in AGES if seconds >= 2 * size), ("s", 1))
    return f"{max(seconds, 0.0) / size:.0f} {unit}"


def when(wall: float | None) -> str:
    return "-" if wall is None else utc(wall)

"""The report as Prometheus metrics, classic text or OpenMetrics; with the engines' own pages merged in where asked.

A value that is not known is not there: never a zero.  Label values are names from the configuration, the catalogue and
fixed lists, so the series are bounded: a restarted engine brings no new ones, and processes are told by engine, not by PID.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client import exposition as exposition_text
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from vllm_watchdog import __version__
from vllm_watchdog.core.policy import Phase

CLASSIC = "text/plain; version=0.0.4; charset=utf-8"
PAGE_S = 3.0
PAGE_BYTES = 8 << 20
PAGE_SAMPLES = 50_000
ALIVE = frozenset({Phase.SERVING, Phase.DOZING, Phase.ASLEEP, Phase.WAKING})
HEALTH = ("healthy", "degraded", "down")
OTHERS = "others"       # the memory of processes that are not ours

Doc = dict[str, Any]
Encode = Callable[[Collector, str], bytes]


@dataclass(frozen=True, slots=True)
class Page(Collector):
    """What one scrape tells."""

    families: tuple[Metric, ...]

    def collect(self) -> Iterable[Metric]:
        return self.families


def exposition(report: Doc, now: float, pages: Mapping[str, str | None], accept: str) -> tuple[bytes, str]:
    """The body and its content type.  `pages`: the engines' own metrics as text, None where one gave none."""
    ours = tuple(families(report, now))
    page = Page((*ours, *_merged(pages, {family.name for family in ours})))
    # No escaping: every name is a legal one as it is, and prometheus_client 0.26 makes vllm_x of a sample of vllm:x.
    if "application/openmetrics-text" in accept:
        encode: Encode = openmetrics.generate_latest
        return encode(page, openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
    return exposition_text.generate_latest(page, escaping=openmetrics.ALLOWUTF8), CLASSIC


def families(report: Doc, now: float) -> Iterator[Metric]:
    """`now`: epoch seconds."""
    yield from _engines(report["engines"])
    yield from _services(report)
    yield from _totals(report)
    yield from _gpus(report["gpus"])
    yield from _host(report["host"])
    yield from _alerts(report)
    yield from _self(report, now)


def gauge(name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], Any]],
          unit: str = "") -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels, unit=unit)
    for values, value in rows:
        if value is not None:
            family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _engines(engines: list[Doc]) -> Iterator[Metric]:
    meant = [engine for engine in engines if engine["wanted"] or engine["pid"]]
    yield gauge("vllm_engine_alive", "1: it serves or sleeps as it should; 0: it should and does not; "
                "no series: it is not meant to run now", ("engine",),
                (((engine["name"],), float(engine["phase"] in ALIVE)) for engine in meant))
    phases = StateSetMetricFamily("llm_watchdog_engine_phase", "The phase of an engine's life", labels=("engine",))
    for engine in engines:
        phases.add_metric((engine["name"],), {phase.value: phase.value == engine["phase"] for phase in Phase})
    yield phases
    metrics = [(engine["name"], engine["metrics"]) for engine in engines]
    trees = [(engine["name"], engine["tree"]) for engine in engines if engine["tree"]]
    one = ("engine",)
    yield gauge("llm_watchdog_engine_generation", "How often it was started, also by earlier daemons", one,
                (((engine["name"],), engine["generation"]) for engine in engines))
    yield gauge("llm_watchdog_engine_ready_timestamp_seconds", "Since when it serves", one,
                (((engine["name"],), engine["ready"]) for engine in engines), "seconds")
    yield gauge("llm_watchdog_engine_failures", "Failures within the restart window", one,
                (((engine["name"],), engine["failures"]) for engine in engines))
    yield gauge("llm_watchdog_engine_rss_bytes", "Host memory of all its processes", one,
                (((name,), tree["rss_bytes"]) for name, tree in trees), "bytes")
    yield gauge("llm_watchdog_engine_cpu_cores", "Cores that all its processes use", one,
                (((name,), tree["cpu"]) for name, tree in trees), "cores")
    yield gauge("llm_watchdog_engine_growth_per_minute", "Of rss and vram in MiB, of fds in files",
                ("engine", "what"),
                (((engine["name"], growth["what"]), growth["per_min"])
                 for engine in engines for growth in engine["growth"]))
    for key, text in (("running", "Requests that run"), ("waiting", "Requests that wait"),
                      ("kv_usage", "Share of the KV cache in use, 0 to 1")):
        name = "kv_cache_usage_ratio" if key == "kv_usage" else f"requests_{key}"
        yield gauge(f"llm_watchdog_engine_{name}", f"{text}, as the engine tells", one,
                    (((engine,), told.get(key)) for engine, told in metrics))


def _services(report: Doc) -> Iterator[Metric]:
    services, one = report["services"], ("service",)
    yield gauge("llm_watchdog_service_up", "1: somebody serves it", one,
                (((service["name"],), float(service["serving"] is not None)) for service in services))
    yield gauge("llm_watchdog_service_on_backup", "1: the backup is meant to serve", one,
                (((service["name"],), float(service["side"] == "backup")) for service in services))
    yield gauge("llm_watchdog_service_lowered_requests", "Requests at a time, while fewer must do", one,
                (((service["name"],), service["lowered"]["to"]) for service in services if service["lowered"]))
    health = StateSetMetricFamily("llm_watchdog_health", "Of all services together")
    health.add_metric((), {state: state == report["health"] for state in HEALTH})
    yield health
    yield gauge("llm_watchdog_paused", "1: automatic actions are paused", (), [((), float(report["paused"]))])


def _totals(report: Doc) -> Iterator[Metric]:
    totals = report["totals"]
    ooms = {engine["name"]: 0 for engine in report["engines"]} | totals["ooms"]     # so that the first is an increase
    yield counter("vllm_oom_errors", "Generations that ran out of GPU memory", ("engine",),
                  (((engine,), n) for engine, n in ooms.items()))
    yield counter("llm_watchdog_engine_restarts", "Starts after the first one, by what ended the one before",
                  ("engine", "cause"),
                  (((row["engine"], row["cause"]), row["count"]) for row in totals["restarts"]))
    for kind in ("failover", "failback"):
        yield counter(f"llm_watchdog_{kind}s", f"Each {kind}, by its reason", ("service", "because"),
                      (((row["service"], row["because"]), row["count"]) for row in totals["changes"] if row["kind"] == kind))
    yield _histogram("llm_watchdog_gap_seconds", "How long nobody served", "service", totals["gaps"])
    yield _histogram("llm_watchdog_detection_seconds", "From the last sign of life until a failure was known", "engine",
                     totals["detection"])
    yield _histogram("llm_watchdog_probe_seconds", "How long an idle engine took for one token", "engine", totals["probes"])


def _histogram(name: str, text: str, label: str, table: Doc) -> Metric:
    family = HistogramMetricFamily(name, text, labels=(label,), unit="seconds")
    for key, spread in table.items():
        total, buckets = 0, []
        for bound, count in zip((*spread["bounds"], "+Inf"), spread["counts"], strict=True):
            total += count
            buckets.append((str(bound), total))
        family.add_metric((key,), buckets, spread["sum"])
    return family


def _gpus(gpus: Any) -> Iterator[Metric]:
    if isinstance(gpus, dict):
        return      # unknown
    one = ("gpu",)
    keys = [(str(gpu["index"]), gpu) for gpu in gpus]
    yield gauge("llm_watchdog_gpu_memory_used_bytes", "GPU memory in use, by anybody", one,
                (((index,), gpu["used_bytes"]) for index, gpu in keys), "bytes")
    yield gauge("llm_watchdog_gpu_memory_total_bytes", "GPU memory of the card", one,
                (((index,), gpu["total_bytes"]) for index, gpu in keys), "bytes")
    yield gauge("llm_watchdog_gpu_memory_threshold_ratio", "Share of the card that is too much", ("gpu", "level"),
                (((index, level), gpu[f"vram_{level}"]) for index, gpu in keys for level in ("warn", "degrade")))
    yield gauge("llm_watchdog_gpu_utilization_ratio", "How busy it is, 0 to 1", one,
                (((index,), None if gpu["utilization"] is None else gpu["utilization"] / 100) for index, gpu in keys))
    yield gauge("llm_watchdog_gpu_temperature_celsius", "Of the card", one,
                (((index,), gpu["temperature_c"]) for index, gpu in keys), "celsius")
    held: dict[tuple[str, str], int] = {}
    for index, gpu in keys:
        for row in gpu["processes"]:
            who = (index, row["engine"].partition("#")[0] if row["engine"] else OTHERS)
            held[who] = held.get(who, 0) + (row["used_bytes"] or 0)
    yield gauge("llm_watchdog_gpu_process_memory_bytes", "GPU memory by who holds it", ("gpu", "engine"),
                held.items(), "bytes")


def _host(host: Doc) -> Iterator[Metric]:
    if "unknown" not in host:
        yield gauge("llm_watchdog_host_memory_available_bytes", "Host memory", (), [((), host["memory_available"])], "bytes")
        yield gauge("llm_watchdog_host_disk_free_bytes", "On the disk of the logs", (), [((), host["disk_free"])], "bytes")


def _alerts(report: Doc) -> Iterator[Metric]:
    urgencies = dict.fromkeys(("warning", "critical", "page"), 0)
    for incident in report["incidents"]:
        urgencies[incident["urgency"]] += 1
    yield gauge("llm_watchdog_incidents_open", "Open incidents", ("urgency",),
                (((urgency,), n) for urgency, n in urgencies.items()))
    yield gauge("llm_watchdog_symptoms_raised", "Thresholds that are crossed now", (), [((), len(report["symptoms"]))])
    yield counter("llm_watchdog_alerts", "Tries to tell somebody, by what came of them", ("outcome",),
                  (((outcome,), n) for outcome, n in report["daemon"]["alerts"].items()))
    yield gauge("llm_watchdog_alerts_waiting", "Alerts not delivered yet", ("channel",),
                (((channel["name"],), channel["waiting"]) for channel in report["alerts"]))


def _self(report: Doc, now: float) -> Iterator[Metric]:
    daemon = report["daemon"]
    yield gauge("llm_watchdog_sensor_age_seconds", "Since a sensor last told anything", ("sensor",),
                (((sensor,), max(now - at, 0.0)) for sensor, at in report["totals"]["sampled"].items()), "seconds")
    yield gauge("llm_watchdog_report_age_seconds", "Since the loop last turned", (),
                [((), max(now - report["at"], 0.0))], "seconds")
    yield gauge("llm_watchdog_loop_lag_seconds", "How old an event was when the loop was done with it", (),
                [((), daemon["lag_s"])], "seconds")
    yield gauge("llm_watchdog_queue_depth", "Of what waits inside the daemon", ("queue",),
                (((queue,), n) for queue, n in daemon["queues"].items()))
    yield counter("llm_watchdog_lost", "Lines and rows that could not be written", ("what",),
                  (((what,), n) for what, n in daemon["lost"].items()))
    yield InfoMetricFamily("llm_watchdog_build", "What runs", {"version": __version__})
    yield gauge("llm_watchdog_start_timestamp_seconds", "Of the daemon", (), [((), daemon["started"])], "seconds")


# -- the engines' own

async def engine_pages(report: Doc, engines: Mapping[str, str]) -> dict[str, str | None]:
    """The metrics of every engine that has a process, at most PAGE_S later."""
    names = [engine["name"] for engine in report["engines"] if engine["pid"] and engine["name"] in engines]
    timeout = aiohttp.ClientTimeout(total=PAGE_S)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        pages = await asyncio.gather(*(_page(session, f"{engines[name]}/metrics") for name in names))
    return dict(zip(names, pages, strict=True))


async def _page(session: aiohttp.ClientSession, url: str) -> str | None:
    try:
        async with session.get(url, allow_redirects=False) as response:
            data = await response.content.read(PAGE_BYTES) if response.status == 200 else b""
            while part := await response.content.read(PAGE_BYTES - len(data)) if 0 < len(data) < PAGE_BYTES else b"":
                data += part
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    return data.decode("utf-8", "replace") if 0 < len(data) < PAGE_BYTES else None


def _merged(pages: Mapping[str, str | None], ours: Collection[str]) -> Iterator[Metric]:
    """Each family once, its samples with the label `watchdog_engine`; a page that can't be read is left out, and told."""
    merged: dict[str, Metric] = {}
    told: dict[str, float] = {}
    for name, page in pages.items():
        found = _parsed(page)
        told[name] = float(found is not None)
        for family in found or ():
            one = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            one.samples += [sample._replace(labels=sample.labels | {"watchdog_engine": name}, timestamp=None)
                            for sample in family.samples]
    if pages:
        yield gauge("llm_watchdog_engine_page_ok", "1: its own metrics are merged in here", ("engine",),
                    (((name,), ok) for name, ok in told.items()))
    yield from (family for family in merged.values() if family.name not in ours)


def _parsed(page: str | None) -> list[Metric] | None:
    if page is None:
        return None
    try:
        found = list(text_string_to_metric_families(page))
    except (ValueError, KeyError, IndexError):
        return None
    return found if sum(len(family.samples) for family in found) <= PAGE_SAMPLES else None

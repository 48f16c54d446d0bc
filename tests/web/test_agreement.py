"""API, metrics and command line are one report's words at every moment of an incident; the page: `test_browser.py`."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from tests.core.scenes import finding, gpu, mark
from tests.web.site import Site, Story, story

from vllm_watchdog.app.status import show
from vllm_watchdog.core import events as e
from vllm_watchdog.core.readings import Holder, Unknown

MOMENTS: dict[str, Callable[[Story], Any]] = {
    "it serves": lambda scene: scene.ok(at=2.0),
    "its card is full": lambda scene: scene.gpus(3.0, gpu(95, (9, "core", mark("primary#1"), 95))),
    "it exits": lambda scene: scene.feed(e.Exited(5.0, mark("primary#1"), 0)),
    "nothing of it is left": lambda scene: scene.feed(e.Emptied(5.2, mark("primary#1"), (Holder(9, "core", None),))),
    "its log is read": lambda scene: scene.feed(e.LogRead(5.3, mark("primary#1"), (finding("oom_runtime"),), drained=True)),
    "the memory is back": lambda scene: scene.gpus(6.0, gpu(1)),
    "the backup loads": lambda scene: scene.feed(e.Spawned(6.1, mark("backup#1"), 200)),
    "the backup serves": lambda scene: scene.ok("backup", 7.0),
    "the driver falls silent": lambda scene: scene.feed(e.GpusSampled(8.0, Unknown(8.0, "no answer"))),
    "automatic actions are paused": lambda scene: scene.ask("pause"),
    "the backup hangs": lambda scene: scene.feed(e.MemberDied(9.0, mark("backup#1"), 201, "VLLM::EngineCore")),
    "they are resumed": lambda scene: scene.ask("resume"),
    "an operator fails back": lambda scene: scene.ask("failback"),
    "the daemon is told to stop": lambda scene: scene.feed(e.StopAsked(10.0, "SIGTERM")),
}


def moments() -> Iterator[tuple[str, dict[str, Any]]]:
    scene = story()
    yield "at first", scene.document()
    for what, happen in MOMENTS.items():
        happen(scene)
        yield what, scene.document()


def sampled(text: str) -> dict[tuple[str, frozenset[str]], float]:
    return {(sample.name, frozenset(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(Path(tmp_path_factory.mktemp("site")), story().document())
    yield made
    made.web.stop(5)


@pytest.mark.parametrize(("what", "document"), list(moments()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_teller_says_the_same(site: Site, what: str, document: dict[str, Any]) -> None:
    site.document = document
    told = site.get("/api/v1/status").json
    assert told == document
    metrics, screen = sampled(site.get("/metrics").body.decode()), Console(file=io.StringIO(), width=250, highlight=False)
    code = show(told, {}, False, screen)
    said = screen.file.getvalue()  # type: ignore[attr-defined]
    assert said.startswith(told["health"].upper())
    assert code == {"healthy": 0, "degraded": 1, "down": 3}[told["health"]]
    assert metrics["llm_watchdog_health", frozenset({told["health"]})] == 1.0
    assert metrics["llm_watchdog_paused", frozenset()] == told["paused"] == ("are paused" in said)
    for engine in told["engines"]:
        name = engine["name"]
        assert metrics["llm_watchdog_engine_phase", frozenset({name, engine["phase"]})] == 1.0
        assert metrics["llm_watchdog_engine_generation", frozenset({name})] == engine["generation"]
        row = rf"^{name} +{engine['phase']} .* {engine['generation']} +{engine['pid'] or '-'} "
        assert re.search(row, said, re.MULTILINE)
        if engine["cause"]:
            assert f"  {name}: {engine['cause']}" in said and engine["why"] in said
    for service in told["services"]:
        assert f"service {service['name']}: {service['serving'] or 'nobody'} serves on" in said
        assert metrics["llm_watchdog_service_up", frozenset({service["name"]})] == float(service["serving"] is not None)
        assert metrics["llm_watchdog_service_on_backup", frozenset({service["name"]})] == float(service["side"] == "backup")
    cards = [] if isinstance(told["gpus"], dict) else told["gpus"]
    shown = [value for (name, _), value in metrics.items() if name == "llm_watchdog_gpu_memory_used_bytes"]
    assert shown == [card["used_bytes"] for card in cards] and bool(cards) == ("GPUs: unknown" not in said)
    for urgency in ("warning", "critical", "page"):
        mine = [incident for incident in told["incidents"] if incident["urgency"] == urgency]
        assert metrics["llm_watchdog_incidents_open", frozenset({urgency})] == len(mine)
        assert said.count(f"OPEN {urgency.upper()} ") == len(mine)
        assert all(incident["id"] in said for incident in mine)


def test_the_moments_are_of_every_kind() -> None:
    seen = [document for _, document in moments()]
    assert {document["health"] for document in seen} == {"healthy", "degraded", "down"}
    assert {service["side"] for document in seen for service in document["services"]} == {"primary", "backup"}
    assert len({engine["phase"] for document in seen for engine in document["engines"]}) > 5
    assert {incident["urgency"] for document in seen for incident in document["incidents"]} >= {"warning", "critical"}

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from tests.core.scenes import finding, mark
from tests.web.site import Site, Story, story

from vllm_watchdog.core import events as e
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.readings import Unknown
from vllm_watchdog.web.metrics import exposition

OPEN = "application/openmetrics-text; version=1.0.0"
VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 7.0
# TYPE vllm:e2e histogram
vllm:e2e_bucket{le="1.0"} 1.0
vllm:e2e_bucket{le="+Inf"} 2.0
vllm:e2e_count 2.0
vllm:e2e_sum 3.0
"""


Samples = dict[tuple[str, tuple[str, ...]], float]


def scraped(document: dict[str, Any], pages: dict[str, str | None] | None = None) -> Samples:
    """By name and label values (in the order of the labels' names), read as OpenMetrics, which is strict."""
    body, kind = exposition(document, document["at"] + 2, pages or {}, OPEN)
    assert kind.startswith("application/openmetrics-text")
    samples = [sample for family in openmetrics.text_string_to_metric_families(body.decode()) for sample in family.samples]
    return {(sample.name, tuple(sample.labels.values())): sample.value for sample in samples}


def test_the_names_that_operators_know() -> None:
    told = scraped(story().document())
    assert told["vllm_engine_alive", ("primary",)] == 1 and told["vllm_oom_errors_total", ("primary",)] == 0
    assert ("vllm_engine_alive", ("backup",)) not in told, "a cold backup is not meant to run: nobody is called for it"


def test_an_engine_that_should_serve_and_does_not_is_not_alive() -> None:
    scene = story()
    scene.crash("primary", 5.0, finding("oom_runtime"))
    told = scraped(scene.document())
    assert told["vllm_engine_alive", ("backup",)] == 0 and told["vllm_oom_errors_total", ("primary",)] == 1
    assert told["llm_watchdog_service_up", ("primary",)] == 0


def test_the_phase_is_a_state_set() -> None:
    told = scraped(story().document())
    states = {labels: value for (name, labels), value in told.items() if name == "llm_watchdog_engine_phase"}
    assert len(states) == 2 * len(Phase) and sum(states.values()) == 2
    assert states["primary", "serving"] == states["backup", "stopped"] == 1


def test_memory_is_told_by_engine_and_not_by_process() -> None:
    gib = 1 << 30
    told = scraped(story().document())
    assert told["llm_watchdog_gpu_process_memory_bytes", ("primary", "0")] == 39 * gib
    assert told["llm_watchdog_gpu_process_memory_bytes", ("others", "0")] == 20 * gib
    assert told["llm_watchdog_gpu_memory_used_bytes", ("0",)] == 60 * gib
    assert told["llm_watchdog_gpu_memory_threshold_ratio", ("0", "degrade")] == 0.9
    assert told["llm_watchdog_engine_rss_bytes", ("primary",)] == 2 * gib


def test_what_grows_is_told_apart() -> None:
    document = story().document()
    growth = {"who": "", "unit": "MiB", "eta_s": None, "leaks": True, "text": ""}
    grown = {"rss": 3.0, "vram/0": 5.0}
    document["engines"][0]["growth"] = [growth | {"what": what, "per_min": per_min} for what, per_min in grown.items()]
    told = scraped(document)
    assert told["llm_watchdog_engine_growth_per_minute", ("primary", "rss")] == 3.0
    assert told["llm_watchdog_engine_growth_per_minute", ("primary", "vram/0")] == 5.0


def test_what_is_not_known_has_no_series() -> None:
    scene = Story(story().world.plan)
    told = scraped(scene.document())
    assert not [name for name, _ in told if "gpu_" in name or "host_" in name or "_rss_" in name or "kv_cache" in name]


def test_a_failover_its_reason_its_gap_and_how_soon_it_was_noticed() -> None:
    scene = story()
    scene.ok(at=4.0)
    scene.crash("primary", 4.5)
    scene.gpus(5.0)
    scene.now = 8.5
    scene.serve("backup")
    told = scraped(scene.document())
    assert told["llm_watchdog_failovers_total", ("failures", "primary")] == 1
    assert told["llm_watchdog_gap_seconds_sum", ("primary",)] == 4.0
    assert told["llm_watchdog_gap_seconds_bucket", ("5.0", "primary")] == 1
    assert told["llm_watchdog_gap_seconds_bucket", ("2.5", "primary")] == 0
    assert told["llm_watchdog_detection_seconds_sum", ("primary",)] == 0.5
    assert told["llm_watchdog_service_on_backup", ("primary",)] == 1


def test_the_daemon_tells_about_itself() -> None:
    told = scraped(story().document())
    assert told["llm_watchdog_report_age_seconds", ()] == 2.0 and told["llm_watchdog_loop_lag_seconds", ()] == 0.001
    assert told["llm_watchdog_sensor_age_seconds", ("gpu",)] == 2.0
    assert told["llm_watchdog_alerts_total", ("failed",)] == 3 and told["llm_watchdog_alerts_waiting", ("oncall",)] == 2
    assert told["llm_watchdog_build_info", ("0.1.0",)] == 1


def test_series_do_not_grow_with_restarts() -> None:
    scene = story()

    def cycle() -> set[tuple[str, tuple[str, ...]]]:
        scene.crash("backup" if scene.phase("backup") is Phase.SERVING else "primary", scene.now + 400)
        for name in ("primary", "backup"):
            if scene.phase(name) is Phase.RELEASING:
                scene.gpus(scene.now + 1)
            scene.at(scene.now + 100)
            if scene.phase(name) in (Phase.STARTING, Phase.LOADING):
                scene.serve(name)
        return set(scraped(scene.document()))

    for _ in range(3):
        before = cycle()
    assert cycle() <= before


@pytest.mark.parametrize("accept", ["", "text/plain", "*/*", OPEN, "nonsense;;q=x"])
def test_both_formats_are_valid_and_hold_the_same_families(accept: str) -> None:
    document = story().document()
    body, kind = exposition(document, document["at"], {}, accept)
    read = openmetrics.text_string_to_metric_families if "openmetrics" in kind else text_string_to_metric_families
    assert len({family.name for family in read(body.decode())}) > 30


# -- the engines' own pages

def test_the_engines_own_metrics_are_merged_under_one_head_each() -> None:
    told = scraped(story().document(), {"primary": VLLM, "backup": VLLM})
    for engine in ("primary", "backup"):
        assert told["vllm:num_requests_running", ("0", "m", engine)] == 3
        assert told["vllm:generation_tokens_total", ("0", "m", engine)] == 7
        assert told["vllm:e2e_bucket", ("1.0", engine)] == 1
        assert told["llm_watchdog_engine_page_ok", (engine,)] == 1
    body, _ = exposition(story().document(), 0.0, {"primary": VLLM, "backup": VLLM}, "")
    heads = re.findall(r"# TYPE (\S+)", body.decode())
    assert len(heads) == len(set(heads))


@pytest.mark.parametrize("page", [None, "{{{", "a{b=\"c} 1", "x 1 2 3 4 5\ny zz"])
def test_a_page_that_can_not_be_read_is_left_out_and_told(page: str | None) -> None:
    told = scraped(story().document(), {"primary": page})
    assert told["llm_watchdog_engine_page_ok", ("primary",)] == 0 and told["vllm_engine_alive", ("primary",)] == 1


def test_a_page_can_not_pretend_to_be_ours() -> None:
    told = scraped(story().document(), {"primary": "# TYPE llm_watchdog_paused gauge\nllm_watchdog_paused 1\n"
                                                   "# TYPE vllm_engine_alive gauge\nvllm_engine_alive 0\n"})
    assert told["llm_watchdog_paused", ()] == 0
    assert told["vllm_engine_alive", ("primary",)] == 1 and len([1 for name, _ in told if name == "vllm_engine_alive"]) == 1


def test_one_scrape_asks_the_engines_that_run(tmp_path: Path) -> None:
    """Another site stands for the engine: what it answers is no metrics page of vLLM, but one all the same."""
    engine = Site(tmp_path, story().document())
    engines = {"primary": f"http://127.0.0.1:{engine.port}", "backup": "http://127.0.0.1:1"}
    site = Site(tmp_path, story().document(), engines=engines)
    try:
        text = site.get("/metrics?engines=1").body.decode()
        assert 'llm_watchdog_engine_page_ok{engine="primary"} 1.0' in text
        assert 'llm_watchdog_engine_page_ok{engine="backup"}' not in text, "it has no process"
        assert site.get("/metrics?engines=2").status == 400
        assert site.get("/metrics").headers["Content-Type"].startswith("text/plain")
        assert site.get("/metrics", {"Accept": OPEN}).body.endswith(b"# EOF\n")
        engine.web.stop(5)
        text = site.get("/metrics?engines=1").body.decode()
        assert 'llm_watchdog_engine_page_ok{engine="primary"} 0.0' in text
    finally:
        engine.web.stop(5)
        site.web.stop(5)


def test_a_scrape_costs_little_and_its_document_is_not_changed() -> None:
    scene = story()
    scene.feed(e.Scraped(2.0, mark("primary#1"), Unknown(2.0, "refused")))
    document = scene.document()
    before = json.dumps(document)
    scraped(document)
    assert json.dumps(document) == before

"""The alert rules and the dashboard of docs/monitoring, against what the exporters really say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.core.scenes import finding, gpu, mark
from tests.gateway.harness import Backend, run, running, until
from tests.web.site import story

from vllm_watchdog.core import events as e
from vllm_watchdog.web.metrics import exposition

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "monitoring"
PROMTOOL, AMTOOL = shutil.which("promtool"), shutil.which("amtool")
SCRAPED = {"instance", "job"}       # labels that Prometheus itself puts on


def page() -> str:
    """One scrape after a night in which everything that is counted has happened."""
    scene = story()
    scene.feed(e.Answered(2.0, mark("primary#1"), True, 0.2))
    scene.ok(at=4.0)
    scene.crash("primary", 5.0, finding("oom_runtime"))
    scene.gpus(6.0)
    scene.serve("backup")
    scene.ask("failback")
    scene.crash("backup", 7.0)
    scene.gpus(8.0)
    scene.serve("primary")
    scene.ask("restart", "primary")
    scene.crash("primary", 9.0)
    scene.gpus(10.0, gpu(60, (9, "core", mark("primary#3"), 39)))
    document = scene.document()
    return exposition(document, document["at"], {}, "")[0].decode()


def gateway_page() -> str:
    """A scrape of a gateway whose engine takes four at a time, after it has refused one."""
    pages: list[str] = []

    async def work() -> None:
        backend = await Backend().start()
        async with running(hold_s=0) as bench:
            assert (await bench.ask("POST", "/v1/completions", b"{}")).status == 503
            bench.serve(backend.serving(), max_concurrent=4)
            await until(lambda: any(line.open for line in bench.gateway.dispatcher.lines.values()), "it serves")
            pages.append((await bench.ask("GET", "/metrics")).body.decode())

    run(work())
    return pages[0]


@pytest.fixture(scope="module")
def told() -> dict[str, set[str]]:
    """By sample name, its labels."""
    evening = exposition(story().document(), 0.0, {}, "")[0].decode()
    samples = [sample for text in (evening, page(), gateway_page()) for family in text_string_to_metric_families(text)
               for sample in family.samples]
    found: dict[str, set[str]] = {}
    for sample in samples:
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[tuple[str, str]]:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text("utf-8"))
    found = [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]]
    rules = (FOLDER / "alerts.yml").read_text("utf-8")
    found += [("alert", text) for text in re.findall(r"expr: (?!\|)(.+)", rules)]
    return found + [("alert", text) for text in re.findall(r"expr: \|\n((?:\s{10}.+\n)+)", rules)]


@pytest.mark.parametrize(("where", "expr"), expressions())
def test_every_query_asks_for_what_is_exported(told: dict[str, set[str]], where: str, expr: str) -> None:
    bare = re.sub(r'"[^"]*"', '""', expr)
    selectors = re.findall(r"([a-z_:]+)\{([^}]*)\}", bare)
    unlabelled = re.sub(r"\{[^}]*\}|(?:by|on|ignoring|group_left) *\([a-z_, ]*\)", "", bare)
    names = set(re.findall(r"\b(?:llm_watchdog|vllm)_[a-z_]+", unlabelled))
    assert names or expr.startswith("up{"), expr
    assert names <= set(told), names - set(told)
    for name, inside in selectors:
        labels = set(re.findall(r"([a-z_]+)\s*(?:=~|!=|=)", inside))
        assert name == "up" or labels <= told[name] | SCRAPED, (name, labels)
    for grouped in re.findall(r"(?:by|on|ignoring)\s*\(([a-z_, ]+)\)", bare):
        known = set.union(SCRAPED, *(told[name] for name in names))
        assert set(re.split(r",\s*", grouped)) <= known, grouped


def test_every_legend_names_a_label_that_is_there(told: dict[str, set[str]]) -> None:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text("utf-8"))
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            names = set(re.findall(r"\b(?:llm_watchdog|vllm)_[a-z_]+", re.sub(r"\{[^}]*\}", "", target["expr"]))) & set(told)
            known = set.union(SCRAPED, *(told[name] for name in names))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, panel["title"]


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's prometheus")
@pytest.mark.parametrize("words", [("test", "rules", "alerts_test.yml"), ("check", "rules", "alerts.yml"),
                                   ("check", "config", "prometheus.yml")])
def test_promtool_agrees(words: tuple[str, ...]) -> None:
    done = subprocess.run([str(PROMTOOL), *words], cwd=FOLDER, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's prometheus")
def test_promtool_reads_what_is_exported() -> None:
    done = subprocess.run([str(PROMTOOL), "check", "metrics"], input=page(), capture_output=True, text=True, timeout=30,
                          check=False)
    assert done.returncode == 0 or "text format" not in done.stderr, done.stderr
    assert "error while linting" not in done.stderr, done.stderr


@pytest.mark.skipif(AMTOOL is None, reason="needs amtool, of Debian's prometheus-alertmanager")
def test_amtool_takes_the_example_of_routing() -> None:
    def amtool(*words: str) -> str:
        done = subprocess.run([str(AMTOOL), *words], cwd=FOLDER, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "2 receivers" in amtool("check-config", "alertmanager.yml")
    routes = ("config", "routes", "test", "--config.file=alertmanager.yml")
    assert amtool(*routes, "severity=critical", "alertname=LlmServiceDown").strip() == "pager"
    assert amtool(*routes, "severity=warning", "alertname=LlmServiceOnBackup").strip() == "team"

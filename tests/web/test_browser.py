"""The status page in a real headless Chromium, over a real daemon with stand-in engines: `pytest -m browser`."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from tests.system.harness import Watchdog, backup, engine, free_port

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
if os.environ.get("LLM_WATCHDOG_REQUIRE_BROWSER"):      # a skip proves nothing
    assert CHROMIUM, "no chromium"
    from axe_playwright_python import sync_playwright as axe
    from playwright import sync_api
else:
    axe, sync_api = (pytest.importorskip(name, reason="needs the extra `browser`")
                     for name in ("axe_playwright_python.sync_playwright", "playwright.sync_api"))
pytestmark = [
    pytest.mark.browser, pytest.mark.timeout(120),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"),
]
TOKEN = "token-of-the-browser-test"
FLAGS = ["--no-proxy-server", *(["--no-sandbox"] if os.geteuid() == 0 else [])]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watchdog]:
    cards = tmp_path_factory.mktemp("cards")
    (cards / "gpu.json").write_text('{"total_bytes": 85899345920, "count": 1}')
    watchdog = Watchdog(
        tmp_path_factory.mktemp("browser"),
        {"primary": engine(gpus=[0], args={"gpu-memory-utilization": 0.8}), "backup": backup("primary")},
        env={"LLM_WATCHDOG_SIM_GPU": str(cards)},
        daemon={"listen": f"127.0.0.1:{free_port()}", "token": TOKEN}, failover={"after_failures": 0})
    watchdog.start().serving("primary")
    yield watchdog
    watchdog.finish()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(host: Watchdog, chromium: Any) -> Iterator[Any]:
    """The page, open; nothing may be said on its console."""
    opened, wrong = chromium.new_page(), list[str]()
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    opened.goto(url(host))
    opened.wait_for_selector("[data-plot=gpu-0] canvas", timeout=20_000)
    yield opened
    opened.close()
    assert [text for text in wrong if not text.startswith("Failed to load resource")] == []    # refused, or restarted: meant


def url(host: Watchdog) -> str:
    lines = (line for line in host.said("web.listening"))
    return str(list(lines)[-1]["url"])


def press(page: Any, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def test_it_is_there_within_a_second_and_small(page: Any) -> None:
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    sizes = page.evaluate("performance.getEntriesByType('resource').filter(e => e.name.includes('/static/'))"
                          ".map(e => e.transferSize)")
    assert len(sizes) == 7 and sum(sizes) < 150_000
    assert page.evaluate("[...document.querySelector('#engines').childNodes].every((node) => node.className === 'service')")
    assert paint < 1000, f"{paint:.0f} ms"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violation(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    found = axe.Axe().run(page).response["violations"]
    serious = [(each["id"], [node["target"] for node in each["nodes"]])
               for each in found if each["impact"] in ("serious", "critical")]
    assert serious == []


def test_a_failover_is_seen_within_two_seconds_of_it(host: Watchdog, page: Any) -> None:
    before = host.serving("primary")
    os.kill(before["pid"], 9)
    page.wait_for_selector("body[data-health=degraded]", timeout=20_000)
    page.wait_for_selector(".to:has-text('backup')", timeout=20_000)
    late_s = time.time() - host.engine("backup")["ready"]
    assert late_s < 2.0
    assert "failed over" in page.inner_text(".route") and page.locator("article.open").count() == 1


def test_an_incident_opens_by_keyboard_and_shows_its_evidence_with_the_token(host: Watchdog, page: Any) -> None:
    row = host.until(lambda: host.incident("primary"), "no incident")
    host.bundle(row)
    page.wait_for_selector("#history button")
    page.focus("#history button")
    press(page, "Enter")
    page.wait_for_selector("#incident[open] .timeline li")
    head = page.inner_text("#incident-head")
    assert "_" not in head and head == page.inner_text("#history button b")
    assert page.locator("#incident .deeds li").count() >= 1 and page.locator("#incident .state").count() >= 1
    assert row["id"] in page.url and page.evaluate("document.activeElement.id") == "incident-head"
    page.focus("[data-files]")
    press(page, "Enter")
    page.wait_for_selector("#ask[open]")
    assert page.evaluate("document.activeElement.name") == "token"
    page.keyboard.type(TOKEN)
    press(page, "Enter")
    page.wait_for_selector(".files button")
    page.focus(".files [data-file='README.md']")
    press(page, "Enter")
    page.wait_for_selector("#files pre")
    assert "primary" in page.inner_text("#files pre")
    press(page, "Escape")
    assert page.locator("#incident[open]").count() == 0 and page.evaluate("document.cookie") == ""


def test_every_control_works_by_keyboard_and_asks_first(host: Watchdog, page: Any) -> None:
    page.focus("#pause")
    press(page, "Enter")
    page.wait_for_selector("#ask[open]")
    press(page, "Escape")
    assert not host.status()["paused"]      # type: ignore[index]
    page.focus("#pause")
    press(page, "Enter")
    page.keyboard.type("not the right token at all")
    press(page, "Enter")
    page.wait_for_selector("#toast.bad")
    page.focus("#pause")
    press(page, "Enter")
    page.keyboard.type(TOKEN)
    press(page, "Enter")
    page.wait_for_selector("#pause[data-act=resume]")
    assert host.status()["paused"]          # type: ignore[index]
    page.focus("#pause")
    press(page, "Enter", "Enter")
    page.wait_for_selector("#pause[data-act=pause]")
    page.focus("[data-range='7d']")
    press(page, "Space")
    page.wait_for_selector("[data-range='7d'][aria-pressed=true]")
    page.focus("#language")
    press(page, "Enter")
    assert page.inner_text("#engines-head") == "引擎"
    press(page, "Enter")


SHOWN = """() => ({
    report: state.report, health: document.body.dataset.health, paused: $("pause").dataset.act === "resume",
    phases: Object.fromEntries([...document.querySelectorAll(".engine")].map((one) =>
        [one.querySelector("h4").textContent, one.querySelector(".badge").textContent])),
    words: Object.fromEntries(Object.entries(WORDS.en).filter(([key]) => key.startsWith("phase_"))),
    routes: [...document.querySelectorAll(".to")].map((one) => one.textContent),
    open: [...document.querySelectorAll("article.open")].map((one) => one.dataset.key) })"""
TOLD = ("health", "paused", "services", "engines", "gpus", "incidents", "symptoms")


def told_of(document: Any) -> Any:
    """What an engine loads is read from its log at the moment of asking; all else is the report's."""
    engines = [{key: value for key, value in each.items() if key != "loading"} for each in document["engines"]]
    return {key: document[key] for key in TOLD} | {"engines": engines}


def test_at_every_moment_of_an_incident_page_command_line_metrics_and_api_tell_one_report(host: Watchdog, page: Any) -> None:
    """What the page shows is the report that it holds; that report is the one which the others had of the same instant."""
    before, told, shown = host.serving("backup"), dict[float, list[Any]](), dict[float, Any]()
    os.kill(host.core("backup"), 9)

    def look() -> bool:
        for document in (requests.get(f"{url(host)}api/v1/status", timeout=5).json(),
                         json.loads(host.cli("status", "--json").out)):
            told.setdefault(document["at"], []).append(told_of(document))
        seen = page.evaluate(SHOWN)
        report = seen["report"]
        shown[report["at"]] = told_of(report)
        assert (seen["health"], seen["paused"]) == (report["health"], report["paused"])
        assert seen["phases"] == {each["name"]: seen["words"][f"phase_{each['phase']}"] for each in report["engines"]}
        assert seen["open"] == [incident["id"] for incident in report["incidents"]]
        for service, route in zip(report["services"], seen["routes"], strict=True):
            assert service["serving"] is None or route == f"→ {service['serving']} :{service['port']}"
        metrics = requests.get(f"{url(host)}metrics", timeout=5).text
        assert all(len(re.findall(rf'^llm_watchdog_engine_phase{{engine="{each["name"]}",[^}}]*}} 1.0$', metrics, re.M)) == 1
                   for each in report["engines"])
        return any(each["name"] == "backup" and each["phase"] == "serving" and each["generation"] > before["generation"]
                   for each in report["engines"])

    host.until(look, "the page never shows the next one", 60.0)
    phases = {each["phase"] for document in shown.values() for each in document["engines"] if each["name"] == "backup"}
    assert len(phases) >= 2, phases
    same = [(at, document) for at, document in shown.items() if at in told]
    assert [(key, document[key], other[key]) for at, document in same for other in told[at] for key in TOLD
            if document[key] != other[key]] == []
    assert [(key, [each[key] for each in all_]) for all_ in told.values() for key in TOLD
            if any(each[key] != all_[0][key] for each in all_)] == []


def test_what_the_gateway_tells_stands_with_the_service_in_both_languages(host: Watchdog, page: Any) -> None:
    busy = {"service": "primary", "waiting": 3, "waiting_long": 1, "engine": "primary", "requests": 16, "max_concurrent": 16,
            "prompt_tokens": 48000, "breaker": "open"}
    def tell() -> None:
        assert host.ask("load", connections=4, quarantined=0, services=[busy])["ok"]

    tell()
    page.wait_for_selector(".gateway .badge.bad", timeout=20_000)
    assert page.inner_text(".gateway") == ("Gateway: in flight 16 of 16 · prompts about 48,000 tokens · waiting 3 · "
                                           "long ones 1 · clients' connections 4 breaker open")
    tell()
    page.click("#language")
    assert page.inner_text(".gateway") == ("网关： 处理中 16 / 16 · 提示词约 48,000 token · 排队 3 · "
                                           "其中长请求 1 · 客户端连接 4 已熔断")
    page.click("#language")


def test_in_chinese_no_sentence_is_left_in_english(host: Watchdog, page: Any) -> None:
    page.focus("#language")
    press(page, "Enter")
    page.wait_for_selector("#history button")
    page.focus("#history button")
    press(page, "Enter")
    page.wait_for_selector("#incident[open] .timeline li")
    told = page.locator("#incident .timeline span, #incident .deeds span, #incident .state, #incident .advice li, "
                        "#incident h3, #incident .badge, #said li").all_inner_texts()
    assert len(told) > 20
    row = host.until(lambda: host.incident("primary"), "no incident")
    lines = (re.escape(finding["text"]) for finding in row["incident"]["findings"])
    foreign = re.compile("|".join((*lines, "日志最后一行：.*", "日志显示.*", r"\[Errno \d+\] .*")))
    left = [text for text in told if re.search("([a-z]+ ){3}", foreign.sub("", text))]
    assert left == []
    assert "：" in page.inner_text("#incident pre")     # the class, then a line of the log or a sentence of ours


def test_a_daemon_that_is_gone_is_said_and_its_return_is_seen(host: Watchdog, page: Any) -> None:
    host.kill()
    page.wait_for_selector("#gone:not([hidden])", timeout=20_000)
    assert "No contact with the daemon for" in page.inner_text("#gone")
    assert "backup" in page.inner_text("#engines"), "what was known stays"
    host.start()
    page.wait_for_selector("#gone[hidden]", state="attached", timeout=20_000)
    assert page.inner_text("#contact") == "live"


def test_a_phone_needs_no_scrolling_sideways(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.wait_for_function("document.documentElement.scrollWidth <= 360", timeout=5_000)    # plots follow a moment later


def test_pictures(page: Any, tmp_path: Path) -> None:
    """For whoever looks: `LOOK=folder pytest -m browser`."""
    folder = Path(os.environ.get("LOOK") or tmp_path)
    page.screenshot(path=folder / "page.png")
    assert (folder / "page.png").stat().st_size > 10_000

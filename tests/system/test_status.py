"""What `status` prints, from a report that a test sets: no daemon is asked."""

from __future__ import annotations

import io
import subprocess
from typing import Any

import pytest
from rich.console import Console
from tests.core.scenes import finding
from tests.system.harness import command
from tests.web.site import story

from vllm_watchdog.app import status


def printed(doc: dict[str, Any], series: dict[str, Any] | None = None, width: int = 250, **how: Any) -> str:
    screen = Console(file=io.StringIO(), highlight=False, width=width, **how)
    status.show(doc, series or {}, False, screen)
    return screen.file.getvalue()   # type: ignore[attr-defined, no-any-return]


def test_a_pipe_gets_no_colours_and_no_line_is_cut() -> None:
    out = io.StringIO()
    doc = story().document()
    doc["engines"][0] |= {"cause": "oom_runtime", "why": "x" * 400}
    assert status.show(doc, {}, False, status.console(out)) == 0
    assert "\x1b" not in out.getvalue() and "x" * 400 in out.getvalue()
    assert "\x1b[" in printed(doc, force_terminal=True, color_system="standard")


def test_a_start_that_waits_is_told_beside_the_failure_before_it() -> None:
    doc = story().document()
    doc["engines"][0] |= {"cause": "engine_proc_died", "why": "core gone", "waits": "GPU 0 lacks 33.0 GiB"}
    told = printed(doc)
    assert "primary: engine_proc_died: core gone" in told
    assert "primary: its start waits: GPU 0 lacks 33.0 GiB" in told


def test_why_an_engine_is_suspected_stands_below_the_table() -> None:
    doc = story().document()
    doc["engines"][0] |= {"phase": "suspect", "doubt": "no token for 29 s; it is taken for hung in 50 s unless it moves"}
    assert "  primary: no token for 29 s; it is taken for hung in 50 s unless it moves" in printed(doc)


def test_what_waits_in_the_gateway_is_told_and_what_keeps_it_there() -> None:
    doc = story().document()
    assert [line.rstrip() for line in printed(doc).splitlines() if "gateway" in line or " waiting " in line] == [
        "gateway: clients' connections 4, quarantined prompts 1",
        "  primary -> primary: in flight 16 of 16, prompts about 48,000 of 235,000 tokens, waiting 3 (1 long); breaker"
        " half open; throttled: first tokens took 2.1 s, 1 are wanted"]
    doc["gateway"] = {"unknown": "it has told nothing for 26 s"}
    assert "gateway: unknown, it has told nothing for 26 s" in printed(doc)
    doc["gateway"] = None
    assert "gateway" not in printed(doc), "there may be none"


def test_what_an_open_incident_says_is_said_once() -> None:
    scene = story()
    scene.crash()
    doc = scene.document()
    doc["engines"][0] |= {"cause": "oom_runtime", "why": doc["incidents"][0]["text"]}
    told = printed(doc)
    assert told.count(doc["incidents"][0]["text"]) == 1
    assert "  primary: oom_runtime\n" in "".join(line.rstrip() + "\n" for line in told.splitlines())


def test_the_table_names_every_engine_with_its_figures() -> None:
    lines = printed(story().document()).splitlines()
    assert next(line for line in lines if line.startswith("primary")).split()[:10] == [
        "primary", "serving", "0", "s", "1", "100", "8100", "0", "2.0", "GiB"]
    assert next(line for line in lines if line.startswith("backup")).split()[:5] == ["backup", "stopped", "1", "s", "0"]


@pytest.mark.parametrize(("width", "columns"), [
    (200, "ENGINE PHASE SINCE GEN PID PORT GPUS RSS KV RUN WAIT"), (80, "ENGINE PHASE SINCE GEN PID PORT RSS KV RUN WAIT"),
    (30, "ENGINE PHASE"), (12, "ENGINE PHASE")])
def test_a_narrow_terminal_shows_fewer_columns_and_cuts_none(width: int, columns: str) -> None:
    doc = story().document()
    doc["engines"][0] |= {"name": "qwen-32b-awq", "phase": "releasing", "pid": 4194303, "port": 18100, "gpus": [0, 1, 2, 3]}
    lines = printed(doc, width=width).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("ENG"))
    table = [line.rstrip() for line in lines[start : lines.index("", start)]]
    assert max(map(len, table)) <= width
    if width >= 30:
        assert table[0].split() == columns.split() and len(table) == 1 + len(doc["engines"])
        assert table[1].startswith("qwen-32b-awq  releasing")
    if width >= 80:
        assert {"4194303", "18100"} < set(table[1].split())
    assert "…" not in "".join(table)


@pytest.mark.parametrize(("seconds", "said"), [(-1, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (172800, "2 d")])
def test_an_age_has_few_figures(seconds: float, said: str) -> None:
    assert status.age(seconds) == said


def test_a_load_is_told_with_its_stage_and_how_long_it_may_take() -> None:
    doc = story().document()
    doc["engines"][0] |= {"phase": "loading", "loading": {"stage": "CUDA graphs", "about_s": 44.5}, "since": doc["at"] - 12}
    assert "primary: CUDA graphs, 12 s of about 44 s" in printed(doc)
    doc["engines"][0]["loading"] = {"stage": "", "about_s": None}
    assert "primary: starting, 12 s\n" in printed(doc)


def test_a_failover_is_told_with_its_gap() -> None:
    scene = story()
    scene.crash("primary", 5.0, finding("oom_runtime"))
    text = printed(scene.document())
    assert text.startswith("DOWN") and "nobody serves on port" in text and "last failover" in text
    assert "nobody serves yet" in text and "OPEN CRITICAL" in text


@pytest.mark.parametrize(("values", "drawn"), [
    ([0] * 60, "▁" * 30), ([100] * 60, "█" * 30), ([None] * 30 + [50] * 30, " " * 15 + "▅" * 15), ([], ""), ([100], "█"),
    ([0, 100] * 30, "█" * 30)])
def test_a_spark_shows_the_peaks(values: list[float | None], drawn: str) -> None:
    assert status.spark(values, 100) == drawn
    assert not values or "10 min" in printed(story().document(), {"gpu/0": {"used_bytes": values}})


def test_watching_goes_on_without_a_daemon_and_says_so() -> None:
    class Away(Exception):
        pass

    turns = iter([(story().document(), {}), Away("no daemon answers there"), KeyboardInterrupt()])
    out = io.StringIO()

    def ask() -> Any:
        turn = next(turns)
        if isinstance(turn, BaseException) and not isinstance(turn, KeyboardInterrupt):
            raise turn
        return turn

    def pause(_: float) -> None:
        assert "primary" in out.getvalue(), "each as it comes, also in a file"
        pauses.append(1)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    pauses: list[int] = []
    assert status.watch(ask, Console(file=out, width=200), Away, pause) == 0
    assert "no contact for 0 s: no daemon answers there" in out.getvalue() and "primary" in out.getvalue()


def test_json_and_watch_exclude_each_other() -> None:
    assert "not allowed with" in command("status", "--json", "--watch").err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_is_a_script_of_that_shell(shell: str) -> None:
    said = command("completion", shell)
    assert said.code == 0 and "failback" in said.out
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=said.out, text=True, check=False).returncode == 0

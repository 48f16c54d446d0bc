"""What drills are made of: the injectors, the clients, the journal's reader, the guard, the page, the command's words."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import NoReturn

import pytest
from tests.core.test_drills import CALM, GOOD, KILL, PACE
from tests.system.harness import Doc, command

from vllm_watchdog.app.commands import RUN_BY
from vllm_watchdog.app.drill.apart import APART, decoded, encoded
from vllm_watchdog.app.drill.command import Wish, chosen, drill, saved
from vllm_watchdog.app.drill.guard import Guard
from vllm_watchdog.app.drill.inject import OURS
from vllm_watchdog.app.drill.inject_sandbox import SANDBOXED
from vllm_watchdog.app.drill.load import Answer, Load
from vllm_watchdog.app.drill.page import page
from vllm_watchdog.app.drill.perform import Result, perform
from vllm_watchdog.app.drill.said import Said
from vllm_watchdog.app.drill.site import NotHereError, Site, Victim
from vllm_watchdog.config import Settings
from vllm_watchdog.config_load import load_to_ask
from vllm_watchdog.core.drill_verdict import judge
from vllm_watchdog.core.drills import FAULTS, Ends, Fault, Part, Sees
from vllm_watchdog.proc import identify, read_stat

RESULT = Result(KILL.name, observed=GOOD, checks=judge(KILL, GOOD, PACE), answers=((-1.0, True), (0.1, False), (0.4, True)))
WITHIN_S = 10.0


def test_every_fault_has_its_injector_in_the_right_place() -> None:
    assert set(OURS) == {fault.name for fault in FAULTS if not fault.sandbox}
    assert set(SANDBOXED) == {fault.name for fault in FAULTS if fault.sandbox} >= APART


# -- the clients' figures

def load_of(*answers: tuple[float, float, bool]) -> Load:
    load = Load("http://127.0.0.1:1", "m", None, 1.0)
    load.answers = [Answer(*answer) for answer in answers]
    return load


def test_a_gap_counts_from_the_last_answer_before_the_fault_to_the_first_after_it() -> None:
    load = load_of((9.0, 9.5, True), (9.6, 9.9, True), (10.1, 10.2, False), (9.9, 12.4, True), (12.4, 12.6, True))
    assert load.gap_s(10.0, 13.0) == pytest.approx(2.5)
    assert load.slowest_s(10.0) == pytest.approx(0.5)


def test_clients_that_are_never_answered_again_have_a_gap_to_the_end() -> None:
    assert load_of((9.0, 9.5, True), (10.1, 10.2, False)).gap_s(10.0, 40.0) == pytest.approx(30.5)
    assert load_of().gap_s(10.0, 40.0) == pytest.approx(30.0)


def test_only_answers_to_requests_that_were_begun_since_count_as_service() -> None:
    load = load_of(*[(9.0, 11.0, True)] * 9, *[(10.5, 11.0, True)] * 3, *[(10.5, 11.0, False)] * 9)
    assert not load.answered(10.0)
    load.answers.append(Answer(10.6, 11.0, True))
    assert load.answered(10.0)


# -- the journal from now on

def test_the_journal_is_read_from_where_it_was_and_never_half_a_line(tmp_path: Path) -> None:
    day = tmp_path / "2026-11-30.jsonl"
    day.write_text('{"at":1,"say":"old"}\n{"at":1.5,"say":"engine.ready","engine":"primary#3","after_s":"4.5"}\n')
    said = Said(tmp_path)
    assert said.loads() == {"primary": 4.5}
    with day.open("a") as file:
        file.write('{"at":2,"event":{"_":"Tick"}}\n{"at":3,"say":"log.finding","class_":"a"}\n')
        file.write('not json, but "say":\n{"at":4,"s')
    assert [line["at"] for line in said.read()] == [3]
    with day.open("a") as file:
        file.write('ay":"log.finding","class_":"b"}\n')
    day.rename(tmp_path / "2026-11-30.1.jsonl")
    day.write_text('{"at":5,"say":"engine.exited"}\n')
    assert [line["at"] for line in said.read()] == [3, 4, 5]
    first = said.first(("log.finding b", "engine.exited"), 0.0)
    assert first is not None and first["at"] == 4
    assert said.first(("log.finding",), 3.5) == first and said.first(("log.finding c",), 0.0) is None
    assert [line["at"] for line in said.all("log.finding", 3.5)] == [4]


def test_no_journal_is_an_empty_one(tmp_path: Path) -> None:
    said = Said(tmp_path / "none")
    assert said.read() == [] and said.loads() == {}


# -- the guard

@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until_it_runs(pid: int) -> None:
    end = time.monotonic() + WITHIN_S
    while state(pid) == "T":
        assert time.monotonic() < end, "it is still stopped"
        time.sleep(0.01)


def test_what_is_stopped_goes_on_when_the_guard_is_released(sleeper: subprocess.Popen[bytes]) -> None:
    who = identify(sleeper.pid)
    assert who
    guard = Guard(who)
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    guard.release()
    until_it_runs(sleeper.pid)


def test_what_is_stopped_goes_on_when_the_drill_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    text = ("import os, signal, sys\n"
            "from vllm_watchdog.app.drill.guard import Guard\nfrom vllm_watchdog.proc import identify\n"
            "pid = int(sys.argv[1])\nguard = Guard(identify(pid))\nos.kill(pid, signal.SIGSTOP)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n")
    done = subprocess.run([sys.executable, "-c", text, str(sleeper.pid)], check=False, timeout=WITHIN_S)
    assert done.returncode == -signal.SIGKILL
    until_it_runs(sleeper.pid)
    assert read_stat(sleeper.pid)


# -- as it was

BRIEF = Fault("brief", "nothing at all", Part.DAEMON, Sees.NONE, ends=Ends.LATER, lasts_s=0.01, incident="")
BACKUP_SERVES = {"services": [{"name": "primary", "serving": "backup", "side": "backup"}]}


class Told(Site):
    """A daemon that tells these reports one after the other, and then the last one again."""

    def __init__(self, settings: Settings, *reports: Doc) -> None:
        super().__init__(settings, "primary")
        self.reports, self.asked = list(reports), list[str]()

    def status(self) -> Doc:
        return {"alerts": [], "gpus": {}} | (self.reports.pop(0) if len(self.reports) > 1 else self.reports[0])

    def ask(self, verb: str, **fields: str) -> Doc:
        self.asked.append(verb)
        return {"ok": True, "text": "done"}


def drilled(site: Told) -> bool | None:
    result = perform(site, BRIEF, lambda _: lambda: None, lambda _: None)
    return result.observed.back if result.observed else None


def stopped(doc: Doc, phase: str) -> Doc:
    return doc | {"engines": [{"name": "primary", "phase": phase, "metrics": {}, "pid": None, "generation": 1}]}


def test_what_an_operator_would_do_is_done_before_it_counts_as_restored(site: Site) -> None:
    calm = stopped(CALM, "serving")
    away = stopped(CALM | BACKUP_SERVES, "held"), stopped(CALM | BACKUP_SERVES, "stopped")
    told = Told(site.settings, calm, *away, calm)
    assert drilled(told) is True and told.asked == ["restart", "failback"]


def test_on_a_host_that_was_not_calm_nothing_is_asked_for_and_what_was_amiss_may_stay(site: Site) -> None:
    told = Told(site.settings, stopped(CALM | BACKUP_SERVES | {"paused": True}, "stopped"))
    assert drilled(told) is True and told.asked == []


# -- who is signalled

@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text('[engines.primary]\nmodel = "m"\nport = 8100\n')
    return Site(load_to_ask(tmp_path / "config.toml", also=RUN_BY), "primary")


def test_nobody_is_signalled_who_is_not_proved_to_be_ours_at_that_moment(
        site: Site, sleeper: subprocess.Popen[bytes]) -> None:
    who = identify(sleeper.pid)
    assert who
    assert not site.signalled(Victim(who, lambda: False, "a stranger"), signal.SIGKILL)
    assert not site.signalled(Victim(replace(who, start=who.start + 1), lambda: True, "a reused PID"), signal.SIGKILL)
    assert sleeper.poll() is None and site.struck_at == 0.0
    assert site.signalled(Victim(who, lambda: True, "ours"), signal.SIGKILL)
    assert sleeper.wait(WITHIN_S) == -signal.SIGKILL and site.struck_at > 0.0


@pytest.mark.parametrize("part", Part)
def test_where_nothing_runs_nobody_is_found(site: Site, part: Part) -> None:
    with pytest.raises(NotHereError):
        site.victim(part)


def test_a_listener_is_known_by_its_socket(site: Site) -> None:
    site.socket.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(site.socket))
        listener.listen()
        victim = site.victim(Part.DAEMON)
        assert victim.who.pid == os.getpid() and victim.ours()
    assert not victim.ours()


# -- what is shown

class Reader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_report_has_a_row_and_a_plot_for_each_drill_and_needs_no_other_file() -> None:
    broken = replace(GOOD, lost=3, vram_left_bytes=None)
    results = [RESULT, Result("daemon-kill", observed=broken, checks=judge(KILL, broken, PACE), answers=RESULT.answers),
               Result("xid", skipped="only in a <sandbox>")]
    text = page(results, "service <primary>", "2026-11-30 19:00:00Z")
    read = Reader(text)
    assert "1 of 2 kept every promise" in read.words and "only in a <sandbox>" in read.words
    assert "service <primary>" in read.words and "3 of 200" in read.words
    assert read.tags.count("svg") == 2 and read.tags.count("table") == 3
    assert not {"script", "link", "img", "sandbox", "primary"} & set(read.tags)
    assert "BROKEN" in text and "the injection" in text


def test_a_drill_without_a_gateway_has_no_plot() -> None:
    assert "svg" not in Reader(page([replace(RESULT, answers=())], "here", "now")).tags


def test_a_result_that_another_process_tells_is_the_same() -> None:
    assert decoded(json.loads(json.dumps(encoded(RESULT)))) == RESULT
    skipped = Result("xid", skipped="why")
    assert decoded(json.loads(json.dumps(encoded(skipped)))) == skipped


# -- the command's words

def test_the_list_names_every_fault_and_where_it_may_be_rehearsed() -> None:
    said = command("drill", "--list")
    assert said.code == 0
    assert all(f"\n{fault.name} " in said.out for fault in FAULTS)
    assert next(line for line in said.out.splitlines() if line.startswith("xid")).split()[1] == "sandbox"


def test_it_says_what_it_will_do_and_a_no_is_a_no(capsys: pytest.CaptureFixture[str]) -> None:
    said, asked = io.StringIO(), []

    def no(question: str) -> str:
        asked.append(question)
        return "n"

    assert drill(Wish(names=("xid", "cuda-oom"), sandboxed=True), unread, said, no) == 1
    assert asked == ["go ahead? [y/N] "] and capsys.readouterr().err == "nothing was done\n"
    assert said.getvalue().startswith("on a sandbox of stand-in engines, while a few clients ask through its gateway:\n")
    assert "  xid: the kernel log tells of an Xid 31" in said.getvalue()


def unread() -> NoReturn:
    raise AssertionError("a sandbox needs no configuration")


def test_a_report_that_can_not_be_written_is_a_failure_in_one_line(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert saved(tmp_path / "page.html", "text", lambda _: None)
    assert not saved(tmp_path, "text", lambda _: None)
    assert capsys.readouterr().err == f"{tmp_path}: Is a directory; expected a place for the report\n"


def test_all_are_all_and_a_choice_keeps_the_tables_order() -> None:
    assert chosen(Wish(all_=True)) == FAULTS
    assert [fault.name for fault in chosen(Wish(("xid", "api-server-kill"), sandboxed=True))] == ["api-server-kill", "xid"]


@pytest.mark.parametrize(("words", "why"), [
    ((), "expected the name of a drill, --all or --list"),
    (("no-such",), "no-such: no such drill; `llm-watchdog drill --list` names them"),
    (("cuda-oom",), "cuda-oom: only in a sandbox: it touches more than the service's own processes; add --sandbox"),
    (("cuda-oom", "--sandbox"), "nobody is there to be asked, expected --yes"),
    (("cuda-oom", "--sandbox", "--report", "/nowhere/page.html"), "/nowhere: expected a folder for the report"),
    (("engine-core-kill", "--config", "/nowhere/config.toml"), "/nowhere/config.toml: No such file"),
])
def test_bad_input_is_one_line_and_2(words: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    said = command("drill", *words)
    assert said.code == 2 and why in said.err and "Traceback" not in said.err

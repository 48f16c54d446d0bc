"""The stand-in does what its flags say: real processes, loopback, free ports."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest

from vllm_watchdog.sim.scheduler import Request, Scheduler

DEADLINE_S = 10.0
PAUSE = threading.Event()


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    until = monotonic() + deadline_s
    while not (value := condition()):
        assert monotonic() < until, f"not within {deadline_s} s: {what}"
        PAUSE.wait(0.01)
    return value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Engine:
    """One stand-in in a process group of its own."""

    def __init__(self, folder: Path, *flags: str, port: int | None = None, **env: str) -> None:
        self.port = port or free_port()
        self.path = folder / f"{self.port}.log"
        command = [sys.executable, "-m", "vllm_watchdog.sim", "serve", "--model", "m", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--sim-load-s", "0", "--sim-token-s", "0.005", *flags]
        with self.path.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **env}, start_new_session=True
            )

    @property
    def log(self) -> str:
        return self.path.read_text()

    def status(self, path: str = "/health") -> int:
        """The HTTP status, or 0 when the connection is refused."""
        try:
            return self.call("GET", path)[0]
        except OSError:
            return 0

    def call(self, method: str, path: str, body: Any = None, timeout_s: float = DEADLINE_S) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def complete(self, prompt: str = "a b c", max_tokens: int = 2, **more: Any) -> tuple[int, str]:
        return self.call("POST", "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **more})

    def later(self, call: Callable[[], Any]) -> "Future[Any]":
        """Runs a call that may hang; its result when it has one."""
        result: Future[Any] = Future()

        def run() -> None:
            try:
                result.set_result(call())
            except (OSError, http.client.HTTPException) as error:
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return result

    def fault(self, name: str, **more: Any) -> None:
        assert self.call("POST", "/sim/fault", {"name": name, **more})[0] == 200

    def ready(self) -> "Engine":
        wait_for(lambda: self.status() == 200 or self.process.poll() is not None, "ready")
        assert self.process.poll() is None, self.log
        return self

    def exit_code(self) -> int:
        return self.process.wait(DEADLINE_S)

    def members(self) -> list[psutil.Process]:
        """Every live process of the group."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def named(self, name: str) -> psutil.Process:
        return next(each for each in self.members() if each.name() == name)

    @property
    def core(self) -> psutil.Process:
        return self.named("VLLM::EngineCore")

    def metric(self, name: str) -> float:
        text = self.call("GET", "/metrics")[1]
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))

    def end(self) -> None:
        for process in self.members():
            process.kill()
        self.process.wait(DEADLINE_S)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(*flags: str, **more: Any) -> Engine:
        made.append(Engine(tmp_path, *flags, **more))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_it_looks_like_vllm_from_outside(engine: Callable[..., Engine]) -> None:
    sim = engine("--tensor-parallel-size", "2", MARKER="here").ready()
    parents = {each.name(): each.ppid() for each in sim.members()}
    core = sim.core
    assert parents["VLLM::EngineCore"] == sim.process.pid
    assert parents["VLLM::Worker_TP0"] == parents["VLLM::Worker_TP1"] == core.pid
    assert Path(f"/proc/{sim.process.pid}/comm").read_text() == "vllm\n"
    assert Path(f"/proc/{core.pid}/comm").read_text() == "VLLM::EngineCor\n"
    assert Path(f"/proc/{core.pid}/cmdline").read_bytes().rstrip(b"\0") == b"VLLM::EngineCore"
    assert b"MARKER" not in Path(f"/proc/{core.pid}/environ").read_bytes()  # setproctitle wipes it
    assert f"(EngineCore pid={core.pid}) INFO " in sim.log
    assert f"[entry.py:140] Starting vLLM server on http://127.0.0.1:{sim.port}" in sim.log
    wait_for(lambda: "INFO:     Application startup complete." in sim.log, "the last line of the start")


def test_the_marker_survives_in_the_engine_core_with_spt_noenv(engine: Callable[..., Engine]) -> None:
    sim = engine(MARKER="here", SPT_NOENV="1").ready()
    assert b"MARKER=here" in Path(f"/proc/{sim.core.pid}/environ").read_bytes()


def test_completions_answer_whole_and_streamed(engine: Callable[..., Engine]) -> None:
    sim = engine("--served-model-name", "tiny").ready()
    status, text = sim.complete(max_tokens=3)
    assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 3)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
    status, text = sim.call("POST", "/v1/chat/completions", chat)
    events = text.split("\n\n")
    assert status == 200
    assert events[-2] == "data: [DONE]"
    assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert sim.complete(model="nope")[0] == 404
    assert sim.complete("w " * 40_000)[0] == 400
    assert json.loads(sim.call("GET", "/v1/models")[1])["data"][0]["id"] == "tiny"
    assert sim.call("POST", "/tokenize", {"prompt": "a b"})[1].startswith('{"count":2,')
    assert (sim.metric("generation_tokens_total"), sim.metric("request_success_total")) == (5.0, 2.0)
    assert 'POST /v1/completions HTTP/1.1" 200 OK' in sim.log


def test_a_long_prompt_moves_only_the_gauges_until_it_ends(engine: Callable[..., Engine]) -> None:
    sim = engine("--max-num-batched-tokens", "16", "--sim-token-s", "0.05").ready()
    sim.later(lambda: sim.complete("w " * 4_000))
    first = wait_for(lambda: sim.metric("kv_cache_usage_perc"), "the first chunk")
    wait_for(lambda: sim.metric("kv_cache_usage_perc") > first, "the next chunk")
    assert sim.metric("num_requests_running") == 1
    assert sim.metric("iteration_tokens_total_count") == sim.metric("prompt_tokens_total") == 0
    assert sim.metric("prefix_cache_queries_total") == 4_000


def test_max_num_seqs_bounds_what_runs_and_the_rest_waits(engine: Callable[..., Engine]) -> None:
    sim = engine("--max-num-seqs", "2").ready()
    for _ in range(5):
        sim.later(lambda: sim.complete(max_tokens=10_000))
    wait_for(lambda: sim.metric("num_requests_waiting") == 3, "three waiting")
    assert sim.metric("num_requests_running") == 2


@pytest.mark.slow
def test_a_full_kv_cache_preempts(engine: Callable[..., Engine]) -> None:
    sim = engine("--sim-kv-tokens", "256", "--sim-token-s", "0.005").ready()
    answers = [sim.later(lambda: sim.complete(max_tokens=150)) for _ in range(4)]
    assert {answer.result(DEADLINE_S)[0] for answer in answers} == {200}
    assert sim.metric("num_preemptions_total") > 0


def test_tokens_take_vram_when_told_and_more_than_there_is_is_an_oom(engine: Callable[..., Engine], tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps({"total_bytes": 10 * 1024**3}))
    flags = ("--sim-kib-per-token", "1024", "--gpu-memory-utilization", "0.5", "--max-num-batched-tokens", "500")
    sim = engine(*flags, LLM_WATCHDOG_SIM_GPU=str(tmp_path)).ready()
    use = tmp_path / f"{sim.core.pid}.json"
    answer = sim.later(lambda: sim.complete("a " * 4000, max_tokens=100))
    wait_for(lambda: json.loads(use.read_text())["used_bytes"] > 8 * 1024**3, "4,000 tokens take 4,000 MiB")
    assert answer.result(DEADLINE_S)[0] == 200
    assert sim.complete()[0] == 200
    assert json.loads(use.read_text())["used_bytes"] < 6 * 1024**3, "its end gives them back"
    assert sim.complete("a " * 6000)[0] == 500
    assert sim.exit_code() == 0
    assert "CUDA out of memory. Tried to allocate 0.49 GiB. GPU 0 has a total capacity of 10.00 GiB of which" in sim.log


def test_a_long_prompt_leaves_others_their_part_of_a_step() -> None:
    scheduler = Scheduler(8, 1000, 16, 100_000, long_prefill_tokens=200)
    scheduler.add(Request(1, 5000, 1))
    assert scheduler.step().prefill_tokens == 1000, "alone it takes all"
    scheduler.add(Request(2, 100, 1))
    assert [output.id for output in scheduler.step().outputs] == [2]
    assert scheduler.cached_tokens == 1200


def test_the_port_is_taken_but_refuses_until_loaded(engine: Callable[..., Engine]) -> None:
    sim = engine("--sim-load-s", "30")
    wait_for(lambda: "Loading" in sim.log or "Initializing" in sim.log, "the load has begun")
    assert sim.status() == 0
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", sim.port))


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (("--swap-space", "4"), 2, "vllm serve: error: unrecognized arguments: --swap-space"),
        (("--max-num-seqs", "0"), 1, "ValidationError: 1 validation error for SchedulerConfig"),
        (("--sim-fail-start", "bad-model"), 1, "OSError: m is not a local folder and is not a valid model identifier"),
        (("--sim-fail-start", "hf-auth"), 1, "GatedRepoError: 401 Client Error."),
        (("--sim-fail-start", "kv-never-fits"), 1, "larger than the available KV cache memory (3.91 GiB)"),
        (("--sim-fail-start", "vram-busy"), 1, "on startup is less than desired GPU memory utilization (0.85, 67.3"),
        (("--sim-fail-start", "nccl"), 1, "RuntimeError: NCCL error: unhandled system error"),
        (("--sim-fail-start", "hf-network", "--sim-exit-code", "7"), 7, "We couldn't connect to"),
    ],
)
def test_a_start_that_fails_says_why_and_exits(
    engine: Callable[..., Engine], flags: tuple[str, ...], code: int, text: str
) -> None:
    sim = engine(*flags)
    assert sim.exit_code() == code
    assert text in sim.log
    if "core" in text or "KV" in text:
        assert "EngineCore failed to start." in sim.log
        assert "RuntimeError: Engine core initialization failed." in sim.log


def test_a_taken_port_is_a_start_failure(engine: Callable[..., Engine]) -> None:
    first = engine().ready()
    second = engine(port=first.port)
    assert second.exit_code() == 1
    assert "OSError: [Errno 98] Address already in use" in second.log


def test_an_out_of_memory_kills_the_engine_and_exits_zero(engine: Callable[..., Engine]) -> None:
    sim = engine("--sim-oom-over-tokens", "100").ready()
    assert sim.complete("w " * 100)[0] == 200
    assert sim.complete("w " * 101)[0] == 500
    assert sim.exit_code() == 0
    for text in (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 352.00 MiB",
        "EngineCore encountered a fatal error.",
        "AsyncLLM output_handler failed.",
        "Engine Exception caught. Request id: cmpl-",
        "500 Internal Server Error",
    ):
        assert text in sim.log
    assert sim.members() == []


@pytest.mark.parametrize("how", ["outside", "after_requests", "after_s", "fault"])
def test_a_killed_engine_core_ends_the_server_with_zero(engine: Callable[..., Engine], how: str) -> None:
    flags = {"after_requests": ("--sim-core-death-after-requests", "1"), "after_s": ("--sim-core-death-after-s", "0.2")}
    sim = engine(*flags.get(how, ())).ready()
    if how == "outside":
        sim.core.kill()
    elif how == "fault":
        sim.fault("core_death")
    elif how == "after_requests":
        assert sim.complete()[0] == 500
    if how != "after_s":
        wait_for(lambda: sim.status() != 200, "a probe that notices")  # else it takes the server a second
    assert sim.exit_code() == 0
    assert "WARNING" in sim.log
    assert "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup" in sim.log
    if how == "after_requests":     # whoever asks after the death is told; the others may come when the port is closed
        assert "EngineDeadError" in sim.log


def test_health_says_503_while_a_dead_engine_is_kept(engine: Callable[..., Engine]) -> None:
    sim = engine(VLLM_KEEP_ALIVE_ON_ENGINE_DEATH="1").ready()
    sim.core.kill()
    wait_for(lambda: sim.status() == 503, "503")
    assert sim.status("/version") == 200
    assert sim.process.poll() is None


def test_a_killed_worker_kills_the_engine(engine: Callable[..., Engine]) -> None:
    sim = engine("--tensor-parallel-size", "2").ready()
    sim.named("VLLM::Worker_TP1").kill()
    wait_for(lambda: sim.status() != 200, "a probe that notices")
    assert sim.exit_code() == 0
    assert "Worker proc VllmWorker-1 died unexpectedly" in sim.log
    wait_for(lambda: sim.members() == [], "no process left")


def test_a_stopped_worker_keeps_the_engine_waiting_and_a_continued_one_lets_it_go_on(engine: Callable[..., Engine]) -> None:
    sim = engine("--tensor-parallel-size", "2").ready()
    worker = sim.named("VLLM::Worker_TP0")
    worker.suspend()
    answer = sim.later(sim.complete)
    with pytest.raises(TimeoutError):
        answer.result(0.4)
    assert sim.status() == 200
    worker.resume()
    assert answer.result(DEADLINE_S)[0] == 200


def test_workers_end_when_the_engine_core_is_killed(engine: Callable[..., Engine]) -> None:
    sim = engine("--tensor-parallel-size", "2").ready()
    sim.core.kill()
    wait_for(lambda: sim.status() != 200, "a probe that notices")
    assert sim.exit_code() == 0
    wait_for(lambda: sim.members() == [], "no process left")


def test_a_killed_api_server_leaves_an_orphan_with_its_vram(engine: Callable[..., Engine], tmp_path: Path) -> None:
    sim = engine(LLM_WATCHDOG_SIM_GPU=str(tmp_path)).ready()
    core = sim.core
    os.kill(sim.process.pid, signal.SIGKILL)
    assert sim.exit_code() == -signal.SIGKILL
    assert sim.status() == 0
    assert core.ppid() != sim.process.pid
    assert os.getpgid(core.pid) == sim.process.pid
    used = json.loads((tmp_path / f"{core.pid}.json").read_text())["used_bytes"]
    assert used > 70 * 1024**3
    second = engine(LLM_WATCHDOG_SIM_GPU=str(tmp_path))
    assert second.exit_code() == 1
    assert "Free memory on device cuda:0 (6.4/80 GiB) on startup is less than desired" in second.log
    core.kill()
    wait_for(lambda: sim.members() == [], "the orphan is gone")
    assert (tmp_path / f"{core.pid}.json").exists()
    third = engine(LLM_WATCHDOG_SIM_GPU=str(tmp_path)).ready()  # the file of a dead process counts for nothing
    assert [path.name for path in tmp_path.glob("[0-9]*.json")] == [f"{third.core.pid}.json"], "its PID may be used again"


@pytest.mark.parametrize("how", ["stopped", "word", "after_requests"])
def test_a_hung_engine_still_says_healthy(engine: Callable[..., Engine], how: str) -> None:
    flags = {"word": ("--sim-hang-on-word", "poison"), "after_requests": ("--sim-hang-after-requests", "1")}
    sim = engine(*flags.get(how, ())).ready()
    if how == "stopped":
        sim.core.suspend()
    answer = sim.later(lambda: sim.complete("a poison b"))
    assert [sim.status(), sim.status("/version")] == [200, 200]
    before = sim.metric("iteration_tokens_total_count")
    PAUSE.wait(0.2)
    assert not answer.done()
    assert sim.metric("iteration_tokens_total_count") == before
    if how == "stopped":
        sim.core.resume()
    else:
        sim.fault("unhang")
    assert answer.result(DEADLINE_S)[0] == 200


def test_a_stop_aborts_what_runs_and_exits_zero(engine: Callable[..., Engine]) -> None:
    sim = engine().ready()
    answer = sim.later(lambda: sim.complete(max_tokens=10_000))
    wait_for(lambda: sim.metric("num_requests_running"), "a running request")
    sim.process.terminate()
    assert sim.exit_code() == 0
    status, text = answer.result(DEADLINE_S)
    assert (status, json.loads(text)["choices"][0]["finish_reason"]) == (200, "abort")
    assert "force killing remaining processes count=1" in sim.log
    assert "ERROR" not in sim.log
    assert sim.members() == []


def test_a_stop_with_a_timeout_drains(engine: Callable[..., Engine]) -> None:
    sim = engine("--shutdown-timeout", "8").ready()
    answer = sim.later(lambda: sim.complete(max_tokens=60))
    wait_for(lambda: sim.metric("num_requests_running"), "a running request")
    sim.process.terminate()
    assert sim.exit_code() == 0
    assert json.loads(answer.result(DEADLINE_S)[1])["usage"]["completion_tokens"] == 60
    assert "force killing" not in sim.log


def test_a_stop_works_on_a_stopped_engine_core(engine: Callable[..., Engine]) -> None:
    sim = engine().ready()
    sim.core.suspend()
    sim.process.terminate()
    assert sim.exit_code() == 0
    assert sim.members() == []


def test_a_term_while_loading_needs_the_group(engine: Callable[..., Engine]) -> None:
    sim = engine("--sim-load-s", "60")
    wait_for(lambda: "Initializing" in sim.log, "the load has begun")
    sim.process.terminate()
    PAUSE.wait(0.2)
    assert sim.process.poll() is None
    os.killpg(sim.process.pid, signal.SIGTERM)
    assert sim.exit_code() == 130


def test_ignore_term_leaves_only_the_kill(engine: Callable[..., Engine]) -> None:
    sim = engine("--sim-ignore-term").ready()
    os.killpg(sim.process.pid, signal.SIGTERM)
    PAUSE.wait(0.2)
    assert sim.complete()[0] == 200


@pytest.mark.slow
def test_a_lingering_server_closes_its_port_and_stays(engine: Callable[..., Engine]) -> None:
    sim = engine("--sim-linger").ready()
    sim.core.kill()
    wait_for(lambda: "Waiting for connections to close. (CTRL+C to force quit)" in sim.log, "the line")
    wait_for(lambda: sim.status() == 0, "the closed port")
    sim.process.terminate()
    PAUSE.wait(0.1)
    assert sim.process.poll() is None


def test_it_dies_with_the_signal_it_is_told(engine: Callable[..., Engine]) -> None:
    assert engine("--sim-die-with", "SIGSEGV").exit_code() == -signal.SIGSEGV


def test_ram_and_vram_leak_when_told(engine: Callable[..., Engine], tmp_path: Path) -> None:
    sim = engine("--sim-leak-mib-per-s", "200", LLM_WATCHDOG_SIM_GPU=str(tmp_path)).ready()
    sim.fault("vram_leak", mib_per_s=1024)
    core, before = sim.core, json.loads((tmp_path / f"{sim.core.pid}.json").read_text())["used_bytes"]
    rss = core.memory_info().rss
    wait_for(lambda: core.memory_info().rss > rss + 20 * 1024**2, "20 MiB more")
    wait_for(lambda: json.loads((tmp_path / f"{core.pid}.json").read_text())["used_bytes"] > before, "more VRAM")


@pytest.mark.slow
def test_a_flood_fills_the_log_and_slow_slows(engine: Callable[..., Engine]) -> None:
    sim = engine().ready()
    sim.fault("flood", mb_per_s=5, seconds=1)
    wait_for(lambda: sim.path.stat().st_size > 500_000, "half a megabyte")
    sim.fault("slow", token_s=0.3)
    began = monotonic()
    sim.complete(max_tokens=2)
    assert monotonic() - began > 0.5
    assert sim.call("POST", "/sim/fault", {"name": "nonsense"})[0] == 400


@pytest.mark.slow
def test_a_sleep_cuts_what_runs_short_or_waits_for_it_and_what_comes_later_waits_for_the_wake(
    engine: Callable[..., Engine],
) -> None:
    sim = engine("--enable-sleep-mode", "--sim-token-s", "0.02", VLLM_SERVER_DEV_MODE="1").ready()

    def ended(answer: tuple[int, str]) -> str:
        return str(json.loads(answer[1])["choices"][0]["finish_reason"])

    for mode, reason in (("abort", "abort"), ("wait", "length")):
        running = sim.later(lambda: sim.complete(max_tokens=30))
        wait_for(lambda: sim.metric("num_requests_running"), "a running request")
        assert sim.call("POST", f"/sleep?level=1&mode={mode}")[0] == 200
        assert ended(running.result(5)) == reason
        late = sim.later(lambda: sim.complete(max_tokens=1))
        with pytest.raises(TimeoutError):
            late.result(0.2)
        assert sim.call("POST", "/wake_up")[0] == 200
        assert ended(late.result(5)) == "length"


def test_sleep_and_wake_up_move_the_vram(engine: Callable[..., Engine], tmp_path: Path) -> None:
    sim = engine("--enable-sleep-mode", LLM_WATCHDOG_SIM_GPU=str(tmp_path), VLLM_SERVER_DEV_MODE="1").ready()
    path = tmp_path / f"{sim.core.pid}.json"
    awake = json.loads(path.read_text())["used_bytes"]
    assert sim.call("POST", "/sleep?level=1")[0] == 200
    assert json.loads(path.read_text())["used_bytes"] < 1024**3
    assert json.loads(sim.call("GET", "/is_sleeping")[1]) == {"is_sleeping": True}
    assert sim.call("POST", "/wake_up")[0] == 200
    assert json.loads(path.read_text())["used_bytes"] == awake
    assert sim.complete()[0] == 200
    sim.process.terminate()
    assert sim.exit_code() == 0


def test_development_endpoints_need_development_mode(engine: Callable[..., Engine]) -> None:
    sim = engine("--disable-log-stats", "--api-key", "secret").ready()
    assert sim.status("/is_sleeping") == 404
    assert sim.status("/v1/models") == 401
    assert "vllm:" not in sim.call("GET", "/metrics")[1]
    assert "secret" not in sim.log


@pytest.mark.slow
def test_the_statistics_line_is_logged_while_tokens_flow_and_once_more(engine: Callable[..., Engine]) -> None:
    sim = engine(VLLM_LOG_STATS_INTERVAL="0.2").ready()
    sim.complete(max_tokens=20)
    wait_for(lambda: "Avg generation throughput: 0.0 tokens/s" in sim.log, "the last line")
    lines = sim.log.count("Engine 000: Avg prompt throughput")
    PAUSE.wait(0.5)
    assert sim.log.count("Engine 000: Avg prompt throughput") == lines


def test_a_client_that_leaves_aborts_its_request(engine: Callable[..., Engine]) -> None:
    sim = engine().ready()
    with socket.create_connection(("127.0.0.1", sim.port)) as client:
        body = b'{"prompt": "a", "max_tokens": 30000, "stream": true}'
        client.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
    wait_for(lambda: sim.metric("request_success_total") == 1, "the abort")

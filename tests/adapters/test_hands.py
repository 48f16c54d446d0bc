"""Starting, stopping and killing: real processes, tiny scripts in the engine's place."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from vllm_watchdog import proc
from vllm_watchdog.act import leader, step
from vllm_watchdog.act.hands import Hands
from vllm_watchdog.act.leader import environment
from vllm_watchdog.app.process import become_subreaper
from vllm_watchdog.cgroup import Groups
from vllm_watchdog.core.commands import Kill, Spawn, Term
from vllm_watchdog.core.events import Emptied, Event, Exited, Spawned, SpawnFailed
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.launch import Launch, fingerprint
from vllm_watchdog.proc import LAUNCH_ENV, MARK_ENV, MarkIndex, ProcId, Stat

T = TypeVar("T", bound=Event)
INSTANCE = f"hands{os.getpid()}"
ONE, TWO = Mark("primary", 1), Mark("primary", 2)
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
UP = "print('up', flush=True); import time; time.sleep(60)"


def a_child(code: str = UP, **kwargs: object) -> str:
    """Source that starts a child, waits until it is up, and prints its PID."""
    arguments = "".join(f", {name}={value!r}" for name, value in kwargs.items())
    return (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {code!r}], stdout=-1{arguments})\n"
        "p.stdout.readline(); print('child', p.pid, flush=True)\n"
    )


class Bench:
    """Hands on a bench: what they post is kept with the instant at which it came."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "primary.log"
        self.events: queue.Queue[Event] = queue.Queue()
        self.pids: list[int] = []
        self.hands: list[Hands] = []

    def launch(self, code: str, **changes: object) -> Launch:
        values: dict[str, object] = {
            "name": "primary", "argv": (sys.executable, "-c", code), "env": (), "cwd": self.folder, "host": "127.0.0.1",
            "port": 1, "models": ("m",), "api_key": None, "log_path": self.log,
        }
        return Launch(**(values | changes))  # type: ignore[arg-type]

    def start(self, launch: Launch, index: MarkIndex | None = None, **more: Any) -> Hands:
        hands = Hands(launch, INSTANCE, self.events.put, time.monotonic, index, **{"group_after_s": 60} | more)
        hands.start()
        self.hands.append(hands)
        return hands

    def up(self, code: str = UP, **kwargs: object) -> tuple[Hands, int]:
        hands = self.start(self.launch(code), **kwargs)  # type: ignore[arg-type]
        hands.do(Spawn(ONE))
        spawned = self.next(Spawned)
        self.pids.append(spawned.pid)
        self.until(lambda: "up\n" in self.text())
        return hands, spawned.pid

    def next(self, kind: type[T]) -> T:
        event = self.events.get(timeout=10)
        assert isinstance(event, kind), event
        return event

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def child(self) -> int:
        return int(self.text().split("child ")[1].split()[0])

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not true():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.005)

    def close(self) -> None:
        for hands in self.hands:
            hands.stop(5)
        for members in proc.marked(INSTANCE).values():
            for who in members:
                os.kill(who.pid, signal.SIGKILL)
        self.until(lambda: not proc.marked(INSTANCE))       # a killed process still runs for a moment
        for pid in self.pids:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                continue


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def subreaper() -> Iterator[None]:
    become_subreaper()
    yield
    import ctypes

    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


# -- spawn


def test_where_a_log_begins_is_noted_before_its_engine_can_write(bench: Bench) -> None:
    bench.log.write_text("an older line\n")
    noted: list[tuple[Mark, str]] = []
    bench.up(begins=lambda mark: noted.append((mark, bench.text())))
    assert noted == [(ONE, "an older line\n")]


def test_a_launch_gets_its_own_group_mark_and_log(bench: Bench) -> None:
    bench.log.write_text("an older line\n")
    _, pid = bench.up()
    assert os.getpgid(pid) == os.getsid(pid) == pid
    assert proc.mark_of(pid, INSTANCE) == ONE
    first, blank, heading, said = bench.text().splitlines()
    assert (first, blank, said) == ("an older line", "", "up")
    assert heading.startswith("# llm-watchdog: primary#1 starts at 20")
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink(f"/proc/{pid}/fd/2") == str(bench.log)
    assert bench.log.stat().st_mode & 0o777 in (0o640, 0o644, 0o600)


SHELLS = [shell for shell in ("/bin/dash", "/bin/bash", "/bin/busybox") if Path(shell).exists()] or ["/bin/sh"]


@pytest.mark.parametrize("shell", SHELLS)
def test_an_engine_starts_as_if_there_had_been_no_step_between(
    bench: Bench, shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the environment as it was meant (its own Python adds LC_CTYPE in a C locale)."""
    monkeypatch.setattr(step, "SHELL", shell)
    script = "import os; print(dict(os.environ)); " + UP
    odd = {"no.shell-name": "it's \"$HOME\"", "IFS": "x", "OPTIND": "abc", "PPID": "1", "-u": "y",
           "BASH_FUNC_f%%": "() { :; }"}
    plain = {"LANG": "C", "ODD": "a=b", "score": "7", "SHELL_LINES": "one\ntwo", "ENV": "/no/such", "BASH_ENV": "/no/such"}
    launch = bench.launch(script, env=(*odd.items(), *plain.items()))
    bench.start(launch).do(Spawn(ONE))
    bench.pids.append(bench.next(Spawned).pid)
    bench.until(lambda: "up\n" in bench.text())
    env = eval(next(line for line in bench.text().splitlines() if line.startswith("{")))
    assert (odd | plain).items() <= env.items()
    expected = environment(os.environ, launch, ONE, INSTANCE)
    assert set(env) - set(expected) <= {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}
    differs = {name for name in expected.keys() & env.keys() if expected[name] != env[name]}
    assert differs <= {"PWD", "OLDPWD", "SHLVL", "_"}


def test_an_engine_ignores_no_signal_that_python_does(bench: Bench) -> None:
    script = "grep SigIgn /proc/self/status; echo up; exec sleep 60"
    bench.start(bench.launch("", argv=("/bin/sh", "-c", script))).do(Spawn(ONE))
    bench.pids.append(bench.next(Spawned).pid)
    bench.until(lambda: "up\n" in bench.text())
    ignored = next(line for line in bench.text().splitlines() if line.startswith("SigIgn:"))
    assert not int(ignored.split()[1], 16) & (1 << signal.SIGPIPE - 1)


@pytest.mark.parametrize("shell", SHELLS)
def test_what_exec_refuses_ends_otherwise_than_a_command_that_its_own_shell_cannot_run(
    bench: Bench, shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "SHELL", shell)
    cut_off = tmp_path / "vllm"
    cut_off.write_bytes(Path(sys.executable).resolve().read_bytes()[:100])
    cut_off.chmod(0o755)
    bench.start(bench.launch("", argv=(str(cut_off),))).do(Spawn(ONE))
    bench.next(Spawned)
    assert bench.next(Exited).code == step.NOT_EXECUTED
    assert str(cut_off) in bench.text(), "the shell says why"


def test_a_path_with_an_equals_sign_is_no_variable(bench: Bench, tmp_path: Path) -> None:
    tool = tmp_path / "a=b" / "vllm"
    tool.parent.mkdir()
    tool.write_text(f"#!{sys.executable}\n{UP}")
    tool.chmod(0o755)
    bench.start(bench.launch("", argv=(str(tool),), env=(("o.dd", "secret"),))).do(Spawn(ONE))
    bench.pids.append(bench.next(Spawned).pid)
    bench.until(lambda: "up\n" in bench.text())
    assert "secret" not in bench.text()


def test_an_engine_carries_what_it_was_started_by(bench: Bench) -> None:
    _, pid = bench.up()     # and not earlier: in the middle of an exec it shows no environment
    assert proc.launch_of(pid) == fingerprint(bench.launch(UP)) != fingerprint(bench.launch(UP, env=(("X", "1"),)))
    assert proc.launch_of(os.getpid()) == ""


def test_an_engine_has_no_part_in_the_daemons_priority(bench: Bench) -> None:
    launch = bench.launch("import os; print('nice', os.nice(0), flush=True); " + UP)
    before = os.nice(0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -3)
    except PermissionError:
        pytest.skip("may not raise a priority")
    try:
        hands = bench.start(launch)     # the thread inherits the priority of ours
        hands.do(Spawn(ONE))
        bench.pids.append(bench.next(Spawned).pid)
        thread = hands._thread.native_id
        assert thread and os.getpriority(os.PRIO_PROCESS, thread) == -3     # it could not be had again under the unit
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)
    bench.until(lambda: "up\n" in bench.text())
    assert "nice 0\n" in bench.text()


@pytest.mark.parametrize(("ours", "its"), [("-7", "0"), ("9", "9")])
def test_an_engine_has_no_part_in_the_daemons_place_before_the_oom_killer(bench: Bench, ours: str, its: str) -> None:
    score = Path("/proc/self/oom_score_adj")
    before = score.read_text()
    try:
        score.write_text(ours)
    except PermissionError:
        pytest.skip("may not lower the score")
    try:
        bench.up(f"print('score', open({str(score)!r}).read(), flush=True); {UP}")
    finally:
        score.write_text(before)
    assert f"score {its}\n" in bench.text()


def test_an_engine_has_no_descriptor_of_ours(bench: Bench) -> None:
    _, pid = bench.up()
    assert sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"]


def test_a_program_is_found_as_exec_finds_it(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    tool = tmp_path / "tools" / "my-vllm"
    tool.write_text(f"#!{sys.executable}\n{UP}")
    tool.chmod(0o755)
    for number, (argv, path) in enumerate((((str(tool),), "/bin"), (("tools/my-vllm",), "/bin"),
                                           (("my-vllm",), f"/bin:{'x' * 5_000}:{tool.parent}")), 1):
        mark = Mark("primary", number)
        hands = bench.start(bench.launch("", argv=argv, cwd=tmp_path, env=(("PATH", path),)))
        hands.do(Spawn(mark))
        bench.pids.append(bench.next(Spawned).pid)
        bench.until(lambda number=number: bench.text().count("up\n") == number)
        hands.do(Kill(mark))
        bench.next(Exited)
        bench.next(Emptied)


def test_a_new_log_is_not_for_everyone(bench: Bench) -> None:
    bench.up()
    assert bench.log.stat().st_mode & 0o007 == 0


def test_an_engine_inherits_nothing_that_is_the_watchdogs_alone(bench: Bench) -> None:
    base = {"PATH": "/bin", "HF_HOME": "/hf", "NOTIFY_SOCKET": "/run/x", "CREDENTIALS_DIRECTORY": "/run/c",
            "LLM_WATCHDOG_ALERTS__CHANNELS__ONCALL__URL": "https://secret", "LLM_WATCHDOG_SIM_GPU": "/gpu"}
    env = environment(base, bench.launch("", env=(("HF_HOME", "/mine"),)), ONE, INSTANCE)
    launch = env.pop(LAUNCH_ENV)
    assert env == {"PATH": "/bin", "HF_HOME": "/mine", "LLM_WATCHDOG_SIM_GPU": "/gpu", "SPT_NOENV": "1",
                   MARK_ENV: f"{INSTANCE}:primary:1"}
    assert len(launch) == 16


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"argv": ("no-such-vllm", "serve")}, "cannot run no-such-vllm: No such file or directory"),
        ({"argv": ("/etc/passwd",)}, "cannot run /etc/passwd: Permission denied"),
        ({"argv": ("etc/passwd",), "cwd": Path("/")}, "cannot run etc/passwd: Permission denied"),
        ({"cwd": Path("/etc/passwd")}, "cannot enter the working directory /etc/passwd: Not a directory"),
        ({"cwd": Path("/no/such/cwd")}, "cannot enter the working directory /no/such/cwd: No such file or directory"),
        ({"log_path": Path("/no/such/x.log")}, "cannot open the log /no/such/x.log: No such file or directory"),
    ],
)
def test_a_launch_that_cannot_start_is_told_in_one_sentence(bench: Bench, changes: dict[str, object], why: str) -> None:
    bench.start(bench.launch(UP, **changes)).do(Spawn(ONE))
    failed = bench.next(SpawnFailed)
    assert (failed.mark, failed.class_, failed.why) == (ONE, "spawn_failed", why)
    assert proc.marked(INSTANCE) == {}


def test_a_script_without_its_interpreter_is_told_too(bench: Bench, tmp_path: Path) -> None:
    """An upgrade is replacing the virtual environment: the next try may find it."""
    script, python = tmp_path / "vllm", tmp_path / "python"
    script.write_text(f"#!{python}\n")
    script.chmod(0o755)
    hands = bench.start(bench.launch(UP, argv=(str(script), "serve")))

    def why() -> str:
        hands.do(Spawn(ONE))
        return bench.next(SpawnFailed).why

    assert why() == f"cannot run {script}: No such file or directory"
    python.write_text("")
    assert why() == f"cannot run {script}: Permission denied"
    python.chmod(0o755)
    assert why() == f"cannot run {script}: Exec format error"
    python.write_text("#!/no/such/program\n")
    assert why() == f"cannot run {script}: No such file or directory"


def test_a_full_disk_costs_the_log_and_not_the_service(bench: Bench) -> None:
    asked: list[int] = []
    bench.start(bench.launch(UP, log_path=Path("/dev/full")), make_room=asked.append).do(Spawn(ONE))
    spawned = bench.next(Spawned)
    bench.pids.append(spawned.pid)
    assert asked == [leader.ROOM]
    assert spawned.lost_log == "/dev/full: No space left on device"
    bench.until(lambda: proc.mark_of(spawned.pid, INSTANCE) == ONE)
    assert os.readlink(f"/proc/{spawned.pid}/fd/1") == os.readlink(f"/proc/{spawned.pid}/fd/2") == "/dev/null"


def test_a_full_disk_on_which_room_could_be_made_costs_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "LOG_ROOM", 1 << 62)
    make_room = partial(monkeypatch.setattr, leader, "LOG_ROOM")        # from now on so much is enough
    bench.start(bench.launch(UP), make_room=lambda _: make_room(0)).do(Spawn(ONE))
    spawned = bench.next(Spawned)
    bench.pids.append(spawned.pid)
    assert spawned.lost_log == ""
    bench.until(lambda: "up\n" in bench.text())


def test_a_taken_port_is_never_started_into_and_its_holder_is_named(bench: Bench) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        bench.start(bench.launch(UP, port=port)).do(Spawn(ONE))
        failed = bench.next(SpawnFailed)
    assert failed.class_ == "port_stranger"
    assert failed.why == f"port {port} is held by PID {os.getpid()} ({proc.title(os.getpid())})"


def test_a_second_generation_is_never_started_beside_a_living_one(bench: Bench) -> None:
    hands, pid = bench.up()
    hands.do(Spawn(TWO))
    assert bench.next(SpawnFailed).why == f"primary#1 still runs as PID {pid}"


# -- exits


def test_a_death_is_told_at_once_with_its_code(bench: Bench) -> None:
    took = []
    for _ in range(5):
        bench.log.unlink(missing_ok=True)
        hands, pid = bench.up()
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        exited = bench.next(Exited)
        assert (exited.mark, exited.code) == (ONE, -signal.SIGKILL)
        hands.do(Kill(ONE))
        emptied = bench.next(Emptied)
        took.append((exited.at - began, emptied.at - exited.at))
    told, emptied_after = (sorted(column)[2] for column in zip(*took, strict=True))
    print(f"kill -> Exited {told * 1000:.2f} ms, Exited -> Emptied {emptied_after * 1000:.2f} ms (medians of 5)")
    assert told < 0.05
    assert emptied_after < 0.1


@pytest.mark.parametrize(("end", "code"), [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("os.abort()", -signal.SIGABRT)])
def test_the_code_is_as_in_subprocess(bench: Bench, end: str, code: int) -> None:
    bench.start(bench.launch(f"import os, sys; {end}")).do(Spawn(ONE))
    bench.next(Spawned)
    assert bench.next(Exited).code == code


def test_a_dead_leader_keeps_its_number_until_its_group_is_empty(bench: Bench) -> None:
    hands, pid = bench.up()
    os.kill(pid, signal.SIGKILL)
    bench.next(Exited)
    assert proc.identify(pid)  # a zombie: no stranger can be given its PID
    hands.do(Kill(ONE))
    bench.next(Emptied)
    assert proc.identify(pid) is None


# -- term


def test_a_term_asks_the_leader_alone_at_first(bench: Bench) -> None:
    hands, _ = bench.up(a_child() + UP)
    hands.do(Term(ONE))
    assert bench.next(Exited).code == -signal.SIGTERM
    assert proc.marked(INSTANCE)[ONE][0].pid == bench.child()


def test_a_leader_that_ignores_term_sees_its_whole_group_asked(bench: Bench) -> None:
    code = IGNORE_TERM + a_child("import signal; signal.signal(15, signal.SIG_DFL); " + UP)
    hands, _ = bench.up(code + "print('up', flush=True); p.wait(); sys.exit(7)", group_after_s=0.05)
    hands.do(Term(ONE))
    assert bench.next(Exited).code == 7  # it left because its child did


def test_one_that_is_stopped_hears_a_term_at_once(bench: Bench) -> None:
    hands, pid = bench.up(UP)
    os.kill(pid, signal.SIGSTOP)
    hands.do(Term(ONE))
    assert bench.next(Exited).code == -signal.SIGTERM


def test_orphans_without_a_leader_are_asked_too(bench: Bench) -> None:
    hands, pid = bench.up(a_child() + UP)
    os.kill(pid, signal.SIGKILL)
    bench.next(Exited)
    hands.do(Term(ONE))
    bench.until(lambda: proc.marked(INSTANCE) == {})


# -- kill


@pytest.mark.parametrize("how", [{}, {"start_new_session": True}, {"process_group": 0}])
def test_nothing_outlives_a_kill(bench: Bench, subreaper: None, how: dict[str, object]) -> None:
    hands, leader = bench.up(IGNORE_TERM + a_child(IGNORE_TERM + UP, **how) + UP)
    orphan = bench.child()
    os.kill(leader, signal.SIGKILL)
    assert bench.next(Exited).code == -signal.SIGKILL
    assert proc.identify(orphan)
    hands.do(Kill(ONE))
    assert [holder.pid for holder in bench.next(Emptied).killed] == [orphan]
    assert proc.identify(orphan) is None  # dead, and reaped
    assert proc.identify(leader) is None


def test_a_kill_of_a_living_engine_tells_the_exit_before_the_emptiness(bench: Bench) -> None:
    hands, _ = bench.up(a_child() + UP)
    hands.do(Kill(ONE))
    assert bench.next(Exited).code == -signal.SIGKILL
    assert bench.next(Emptied).killed == ()  # none of them was an orphan
    assert proc.marked(INSTANCE) == {}


def test_an_orphan_that_wiped_its_environment_and_left_the_session_is_killed(bench: Bench, subreaper: None) -> None:
    hands, _ = bench.up(a_child(env={}, start_new_session=True) + UP)
    hands.do(Kill(ONE))
    bench.next(Exited)
    bench.next(Emptied)
    assert proc.identify(bench.child()) is None


def test_a_kill_of_what_never_ran_is_done_at_once(bench: Bench) -> None:
    hands = bench.start(bench.launch(UP))
    hands.do(Kill(ONE))
    assert bench.next(Emptied).mark == ONE


def test_a_kill_spares_the_other_generation_and_strangers(bench: Bench) -> None:
    hands, _ = bench.up()
    with subprocess.Popen([sys.executable, "-c", UP], stdout=subprocess.PIPE) as stranger:
        hands.do(Kill(TWO))
        assert bench.next(Emptied).mark == TWO
        assert ONE in proc.marked(INSTANCE)
        assert stranger.poll() is None
        stranger.kill()


class Haunted:
    """A `/proc` with a process of ours that no signal ends: stuck in the driver, so to say."""

    def __init__(self) -> None:
        self.phantom: Stat | None = Stat(ProcId(9_999_999, 1), "VLLM::EngineCor", True, 1, 9_999_999, 9_999_999, False)
        self.walks = 0

    def __call__(self, _: object) -> list[Stat]:
        self.walks += 1
        return proc.walk() + ([self.phantom] if self.phantom else [])


def test_an_unkillable_engine_is_looked_for_again_and_never_doubled(bench: Bench) -> None:
    haunted = Haunted()
    index = MarkIndex(INSTANCE, haunted)
    assert haunted.phantom
    index.learn(haunted.phantom.who, ONE)
    hands = bench.start(bench.launch(UP), index)
    hands.do(Kill(ONE))
    bench.until(lambda: haunted.walks >= 3)
    hands.do(Spawn(TWO))
    assert bench.next(SpawnFailed).why == "primary#1 still runs as PID 9999999"
    hands.do(Kill(ONE))  # asked again: still the same kill
    assert bench.events.empty()
    haunted.phantom = None
    assert bench.next(Emptied).mark == ONE


def test_the_watchdogs_own_children_keep_their_status(bench: Bench, subreaper: None) -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(5)"]) as helper:
        os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOWAIT)
        hands, _ = bench.up(a_child() + UP)
        hands.do(Kill(ONE))
        bench.next(Exited)
        bench.next(Emptied)
    assert helper.returncode == 5


# -- adoption


def adopted(bench: Bench) -> tuple[Hands, int]:
    """An engine that an earlier daemon started, in new hands."""
    first, pid = bench.up(a_child() + UP)
    first.stop(5)
    second = bench.start(bench.launch(UP))
    second.adopt(ONE, pid)
    return second, pid


def test_an_adopted_engine_lives_on_and_its_end_is_told(bench: Bench) -> None:
    hands, pid = adopted(bench)
    hands.do(Spawn(TWO))
    bench.next(SpawnFailed)  # by now it is adopted, and refused to be doubled
    os.kill(pid, signal.SIGKILL)
    assert bench.next(Exited).mark == ONE
    hands.do(Kill(ONE))
    bench.next(Emptied)
    assert proc.marked(INSTANCE) == {}


def test_an_adopted_leader_that_is_no_child_of_ours_has_no_code(bench: Bench) -> None:
    launched = (
        "import os, subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {UP!r}], start_new_session=True, stdout=2)\n"
        "print(p.pid, flush=True); os._exit(0)"
    )
    env = dict(os.environ) | {MARK_ENV: proc.mark_value(ONE, INSTANCE)}
    said = subprocess.run([sys.executable, "-c", launched], env=env, stdout=subprocess.PIPE, check=True, timeout=10)
    pid = int(said.stdout.split()[0])
    hands = bench.start(bench.launch(UP))
    hands.adopt(ONE, pid)
    hands.do(Kill(ONE))
    assert bench.next(Exited).code is None
    bench.next(Emptied)


def test_adopting_a_stranger_or_a_dead_leader_is_an_exit(bench: Bench) -> None:
    hands = bench.start(bench.launch(UP))
    for pid in (os.getpid(), 9_999_999):
        hands.adopt(ONE, pid)
        exited = bench.next(Exited)
        assert (exited.mark, exited.code) == (ONE, None)


def test_an_orphan_that_ends_under_us_is_reaped(bench: Bench, subreaper: None) -> None:
    middle = a_child() + "print('child', p.pid, flush=True); os._exit(0)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {'import os; ' + middle!r}])\n" + UP
    bench.up(code, tidy_s=0.02)
    orphan = bench.child()
    os.kill(orphan, signal.SIGKILL)
    bench.until(lambda: proc.identify(orphan) is None)


# -- control groups


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    """Folders in the kernel's place."""
    (tmp_path / "unit").mkdir()
    return Groups(tmp_path / "unit", memory=True, say=lambda *_, **__: None)


def test_an_engine_is_in_its_group_before_its_first_instruction(bench: Bench, groups: Groups) -> None:
    members = groups.root / "primary.1" / "cgroup.procs"
    hands, _ = bench.up(f"print('group', open({str(members)!r}).read(), flush=True); {UP}", groups=groups)
    assert "group 0\n" in bench.text()      # 0: the one that writes it
    (groups.root / "primary.1" / "memory.events").write_text("oom_kill 3\n")
    hands.do(Kill(ONE))
    assert bench.next(Exited).oom_kills == 3


def test_an_engine_whose_group_cannot_be_entered_starts_all_the_same(bench: Bench, groups: Groups) -> None:
    (groups.root / "primary.1" / "cgroup.procs").mkdir(parents=True)
    bench.up(groups=groups)


def test_a_generation_is_gone_when_its_group_is_empty(bench: Bench, groups: Groups) -> None:
    hands, _ = bench.up(groups=groups)
    group = groups.root / "primary.1"
    (group / "cgroup.events").write_text("populated 1\n")
    hands.do(Kill(ONE))
    bench.next(Exited)
    bench.until(lambda: (group / "cgroup.kill").exists())
    assert bench.events.empty(), "somebody without a mark still lives in it"
    (group / "cgroup.events").write_text("populated 0\n")
    bench.next(Emptied)


def test_whoever_lives_in_the_group_is_ours(bench: Bench, groups: Groups) -> None:
    """It wiped its environment and began a session of its own, and none of its ancestors is ours."""
    hands, _ = bench.up(groups=groups)
    with subprocess.Popen([sys.executable, "-c", UP], env={}, start_new_session=True, stdout=subprocess.PIPE) as hidden:
        (groups.root / "primary.1" / "cgroup.procs").write_text(f"{hidden.pid}\n")
        hands.do(Kill(ONE))
        bench.next(Exited)
        bench.next(Emptied)
        assert proc.identify(hidden.pid) is None

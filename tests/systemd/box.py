"""A machine to break: a real systemd as PID 1 in namespaces of its own, over this root file system, kept in memory.

Needs root, util-linux and systemd; `missing()` says what is not there.  Nothing of it is left after `stop`: the end of
its init is the end of every process in it, and of its mounts.  `LLM_WATCHDOG_SYSTEMD_ROOT=DIR`: over another root file
system, for another systemd (`debootstrap --variant=minbase --include=systemd,dbus,procps trixie DIR`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")

CHECKOUT = Path(__file__).parents[2]
ROOT = Path(os.environ.get("LLM_WATCHDOG_SYSTEMD_ROOT", "/"))
INIT = ROOT / "usr/lib/systemd/systemd"
TOOLS = ("unshare", "nsenter", "mount", "pivot_root")
PYTHON = f"/opt/llm-watchdog/python/bin/python3.{sys.version_info.minor}"
PROGRAM = "/opt/llm-watchdog/bin/llm-watchdog"
WITHIN_S = 30.0
LOOK_S = 0.05


def missing() -> str:
    if os.geteuid() != 0:
        return "not root"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None] + [str(INIT)] * (not INIT.exists())
    return f"no {', '.join(lacking)}" if lacking else ""


def unified() -> Path | None:
    """Where cgroup v2 is mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    return None


class Box:
    def __init__(self) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="llm-watchdog-box-", dir="/run"))
        self._log = tempfile.TemporaryFile("w+")        # noqa: SIM115 - as long as the box
        site = sysconfig.get_paths()["purelib"]
        self.groups = (unified() or Path("/sys/fs/cgroup")) / self._base.name
        self.groups.mkdir()
        self._outer = subprocess.Popen(
            ["sh", "-c", 'echo 0 >"$0/cgroup.procs" && exec "$@"', str(self.groups),
             "unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--net", "--cgroup",
             "--propagation", "private",
             str(Path(__file__).with_name("boot")), str(ROOT), str(self._base), str(CHECKOUT), site, sys.base_prefix],
            stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, start_new_session=True)
        try:
            self.init = self.until(self._first, "no init")
            # `unshare` waits outside: no controller is turned on below a group that holds a process.
            (self.groups.parent / "cgroup.procs").write_text(str(self._outer.pid))
            assert self._outer.stdin
            self._outer.stdin.close()
            self.until(lambda: self.run("systemctl", "is-system-running").stdout.strip() in ("running", "degraded"),
                       "systemd does not come up")
            self.write(PROGRAM, "#!/bin/sh\nexport PYTHONPATH=/opt/llm-watchdog/src:/opt/llm-watchdog/site "
                                f"LD_LIBRARY_PATH=/opt/llm-watchdog/python/lib\n"
                                f'exec {PYTHON} -m vllm_watchdog.app.cli "$@"\n', 0o755)
        except BaseException:
            self.stop()
            raise

    def _first(self) -> int | None:
        """The one child of `unshare`, as it is seen from outside."""
        assert self._outer.poll() is None, self._said()
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:]

    def stop(self) -> None:
        self._outer.send_signal(signal.SIGKILL)     # --kill-child takes init along
        self._outer.wait(WITHIN_S)
        self._log.close()
        self._base.rmdir()
        self.until(lambda: "populated 0" in (self.groups / "cgroup.events").read_text(), "processes of the box live on")
        for folder, _, _ in os.walk(self.groups, topdown=False):
            Path(folder).rmdir()

    def run(self, *words: str, text: str | None = None, within_s: float = WITHIN_S) -> subprocess.CompletedProcess[str]:
        """A command inside; its exit code and what it printed."""
        where = ["nsenter", "-t", str(self.init), "-m", "-p", "-u", "-i", "-n", "-C", "-r", "-w", "env", "-i",
                 "LC_ALL=C.UTF-8", f"PATH={os.environ['PATH']}:/usr/sbin:/sbin"]
        return subprocess.run([*where, *words], input=text, capture_output=True, text=True, timeout=within_s, check=False)

    def ok(self, *words: str, text: str | None = None, within_s: float = WITHIN_S) -> str:
        done = self.run(*words, text=text, within_s=within_s)
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        self.ok("sh", "-c", 'mkdir -p "$(dirname "$1")" && cat >"$1" && chmod "$2" "$1"', "sh", path, f"{mode:o}", text=text)

    def read(self, path: str) -> str:
        return self.ok("cat", path)

    def until(self, found: Callable[[], Value | None], failing: str, within_s: float = WITHIN_S) -> Value:
        """The first value that is true."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if value := found():
                return value
            time.sleep(LOOK_S)
        raise AssertionError(f"{failing} within {within_s:.0f} s\n{self.words()}")

    def words(self) -> str:
        """The end of the journal of this machine."""
        if not hasattr(self, "init") or self._outer.poll() is not None:
            return ""
        return self.run("journalctl", "--no-pager", "-n", "60", "-o", "short-monotonic").stdout

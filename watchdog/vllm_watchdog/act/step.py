"""The process that will become an engine: a Python that waits for orders, then executes the engine in its place.

It takes some 10 ms to come up, so whoever sees that one will be needed starts it before.  The end of its standard input,
which is also the end of the daemon, ends one that got no orders.  Blocks for fork and exec (milliseconds; longer on a
hung file system).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from vllm_watchdog.launch import Launch

ENTER = Path(__file__).with_name("enter.py").read_text("utf-8")      # once: an upgrade may take the package away


class RefusedError(Exception):
    """Nothing was started.  Its text is one sentence for people, `class_` a word of the catalogue."""

    def __init__(self, why: str, class_: str = "spawn_failed") -> None:
        super().__init__(why)
        self.class_ = class_


class Step:
    """For one thread.  Raises RefusedError where no process can be started."""

    def __init__(self) -> None:
        self._report, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-I", "-S", "-c", ENTER, str(theirs)), stdin=subprocess.PIPE, pass_fds=(theirs,),
                start_new_session=True,  # a group of its own too; and no terminal's hang-up reaches it
            )
        except OSError as error:
            os.close(self._report)
            raise RefusedError(f"cannot start a process: {error.strerror}") from None
        finally:
            os.close(theirs)

    @property
    def waits(self) -> bool:
        """It may have been killed meanwhile."""
        return self._process.poll() is None

    def become(self, launch: Launch, env: Mapping[str, str], log: str, group: Path | None) -> int:
        """Executes the launch; its PID.  Raises RefusedError.  In both cases this step is over."""
        words = (log, str(group or ""), str(launch.cwd), str(len(launch.argv)), *launch.argv)
        self._order(b"".join(os.fsencode(word) + b"\0" for word in (*words, *(f"{key}={env[key]}" for key in env))))
        with os.fdopen(self._report) as lines:
            said = {what: int(number) for what, number in map(str.split, lines)}
        # The pidfd is what we wait on: Popen must neither reap it nor complain that it outlives us.
        if number := said.get("cwd"):
            self._process.wait()    # it is on its way out
            raise RefusedError(f"cannot enter the working directory {launch.cwd}: {os.strerror(number)}")
        if number := said.get("exec"):
            self._process.wait()
            raise RefusedError(f"cannot run {launch.argv[0]}: {os.strerror(number)}")
        self._process.returncode = 0
        return self._process.pid

    def dismiss(self) -> None:
        """Nobody needs it."""
        self._order(b"")
        self._process.wait()
        os.close(self._report)

    def _order(self, words: bytes) -> None:
        """One that was killed reads nothing: its end is told by its pidfd, as any engine's."""
        assert self._process.stdin  # noqa: S101 - a pipe
        try:
            self._process.stdin.write(words)
            self._process.stdin.close()
        except BrokenPipeError:
            return

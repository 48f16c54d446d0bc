"""`llm-watchdog demo`: the main job on this machine with the stand-in engine: no GPU, no configuration, under a minute.

It runs the real daemon, as a process of its own, in a folder of its own; breaks what it started; shows what was done and
where to look; and cleans up after itself.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import requests

from vllm_watchdog.app import show, status
from vllm_watchdog.app.throwaway import STEP_S, StepError, Throwaway, free_port
from vllm_watchdog.core.phrases import UP
from vllm_watchdog.tell.history import Reader

LONG_PROMPT = "lorem ipsum " * 3000

CONFIG = """
[daemon]
state_dir = {state}
log_dir = {logs}
sample_s = 0.5
listen = "off"

[engines.primary]
command = [{python}, "-m", "vllm_watchdog.sim"]
model = "stand-in"
port = {port}
args = {{ max-num-seqs = 64, sim-oom-over-tokens = 4000 }}

[engines.backup]
backup_for = "primary"
port = {backup_port}
args = {{ max-num-seqs = 16 }}
"""


def demo(out: TextIO, keep: bool = False) -> int:
    folder = Path(tempfile.mkdtemp(prefix="llm-watchdog-demo-"))
    stage = Stage(folder, out)
    try:
        stage.play()
        return 0
    except StepError as error:
        print(f"\nThe demo failed: {error}\nThe daemon's output: {folder / 'daemon.log'}", file=out)
        keep = True
        return 1
    finally:
        stage.end()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"kept: {folder}", file=out)


class Stage(Throwaway):
    def __init__(self, folder: Path, out: TextIO) -> None:
        super().__init__(folder)
        self.out = out
        self.port, self.backup_port = free_port(), free_port()
        self.began_at = time.monotonic()

    def play(self) -> None:
        self.tell("starting the watchdog with a primary and a cold backup of a stand-in engine (no GPU is needed)")
        self._configure()
        first = self.serving("primary")
        self.tell(f"primary serves on port {self.port}, PID {first['pid']}")

        self.tell("one prompt of 36,000 characters comes in: more than this engine's memory can take")
        self._prompt()
        second = self.serving("primary", after=first["generation"])
        self.tell("the engine died of it and exited with code 0; it is replaced: "
                  f"generation {second['generation']}, PID {second['pid']}")

        self.tell("the same prompt again")
        self._prompt()
        backup = self.serving("backup")
        self.tell("twice is enough: the backup with its lower --max-num-seqs serves "
                  f"on port {self.backup_port}, PID {backup['pid']}")

        self.tell("this is what `llm-watchdog status` says now\n")
        if doc := self.status():
            status.show(doc, {}, False, status.console(self.out))
        rows = Reader(self.folder / "logs" / "history.db").incidents(10)
        self.tell("and `llm-watchdog incidents`\n")
        print(show.incidents(rows), file=self.out)
        page = self.folder / "logs" / "incidents" / rows[-1]["id"] / "README.md"
        text = self.until(lambda: _saying(page, UP.en), f"{page} does not tell that an engine serves")
        self.tell(f"each incident has one folder; its page, {page.name}, begins\n")
        print("\n".join("    " + line for line in text.splitlines()[:34]), file=self.out)
        files = sorted(path.name for path in page.parent.iterdir())
        self.tell("beside it lie " + ", ".join(files))
        self.stop()
        self.tell("stopped; no process is left")

    def tell(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began_at:5.1f} s] {text}", file=self.out, flush=True)

    # -- steps

    def _configure(self) -> None:
        values = {"state": self.state, "logs": self.logs, "python": sys.executable}
        quoted = {key: json.dumps(str(value)) for key, value in values.items()}
        self.config.write_text(CONFIG.format(**quoted, port=self.port, backup_port=self.backup_port), "utf-8")
        self.boot()

    def _prompt(self) -> None:
        """What a client sees: an error, or a connection that is cut."""
        with suppress(requests.RequestException):
            requests.post(f"http://127.0.0.1:{self.port}/v1/completions", timeout=STEP_S,
                          json={"model": "stand-in", "prompt": LONG_PROMPT, "max_tokens": 8})


def _saying(page: Path, words: str) -> str:
    """The page, once it holds these words; a page follows what it tells of by a moment.  Empty until then."""
    try:
        text = page.read_text("utf-8")
    except FileNotFoundError:
        return ""
    return text if words in text else ""

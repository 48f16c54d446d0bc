"""A watchdog over a real vLLM: the system tests' rig, with engines that take 40 seconds of two cores to start.

Whoever looks on takes CPU from the engine that loads, so waits look four times a second, and figures come from the
journal, where every event has its own time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import psutil
import requests
from tests.system.harness import Doc, Watchdog, free_port

Value = TypeVar("Value")

START_S = 300.0         # 35 s on two free cores; three times that on busy ones
STOP_S = 60.0
HANG: Doc = {"still_s": 3, "probe_s": 5, "patience_s": 10}      # a hang is believed after about 18 s
CONTEXT = 524_288       # tokens; four times what the model was made for, so that a prompt is long on any machine
PLAIN: Doc = {      # what the product does by default, where the system tests hurry
    "daemon": {"sample_s": 1.0}, "restart": {"backoff_s": 2, "backoff_max_s": 60}, "evidence": {"deadline_s": 10},
}


@dataclass(frozen=True)
class Vllm:
    python: Path
    model: Path

    def engine(self, port: int = 0, args: Doc | None = None, **keys: Any) -> Doc:
        """One engine's table: slow on purpose, two requests at a time and prompts in slices of 512 tokens."""
        plain = {
            "served-model-name": "tiny", "max-num-seqs": 2, "max-num-batched-tokens": 512, "enforce-eager": True,
            "max-model-len": CONTEXT, "hf-overrides": json.dumps({"max_position_embeddings": CONTEXT}),
            "dtype": "float32",     # bfloat16 takes AMX where the CPU claims it; under some hypervisors that is SIGILL
        }
        return {
            "command": [str(self.python), "-m", "vllm.entrypoints.openai.api_server"], "model": str(self.model),
            "port": port or free_port(), "args": plain | (args or {}),
            "env": {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        } | keys


@dataclass(frozen=True)
class Row:
    """One line of the table of figures: seconds, or None where a journey has none."""

    journey: str
    detected_s: float | None = None
    evidence: int | None = None
    recovered_s: float | None = None
    note: str = ""


class RealWatchdog(Watchdog):
    def __init__(self, folder: Path, engines: dict[str, Doc], **sections: Doc) -> None:
        super().__init__(folder, engines, **(PLAIN | sections))

    def until(self, found: Callable[[], Value | None], failing: str, within_s: float = STOP_S) -> Value:
        def unhurried() -> Value | None:
            time.sleep(0.2)
            return found()

        return super().until(unhurried, failing, within_s)

    def up(self, name: str, after: int = 0) -> Doc:
        """Waits until a generation newer than `after` serves, and lets everybody else run before it.

        Its core and worker spin in sched_yield(), and Linux 6.18 then lets the others on the same two cores wait for
        seconds: the daemon was once not run for 25 s.  A host with a GPU has cores to spare.
        """
        engine = self.serving(name, after, START_S)
        with suppress(OSError):
            Path(f"/proc/{engine['pid']}/autogroup").write_text("10")
        return engine

    def loading(self, name: str, after: int = 0) -> Doc:
        """Waits until a generation newer than `after` is well into its start: its engine core runs."""
        def deep(doc: Doc) -> bool:
            return doc["phase"] == "loading" and doc["generation"] > after and len(self.of(name)) >= 3

        return self.engine_when(name, deep, f"no generation after {after} loads", START_S)

    def stop(self) -> int:
        """A clean stop; its exit code.  A vLLM that is loading answers to the second TERM only, after several seconds."""
        self.term()
        assert self.daemon
        return self.daemon.wait(STOP_S)

    def core(self, name: str) -> int:
        return self.titled(name)["VLLM::EngineCore"]

    def titled(self, name: str) -> dict[str, int]:
        """PIDs of one engine by the titles that vLLM gives its processes."""
        titles = {(psutil.Process(pid).cmdline() or [""])[0]: pid for pid in self.of(name)}
        return {title: pid for title, pid in titles.items() if title.startswith("VLLM::")}

    def words(self, *words: str) -> tuple[int, Any]:
        """A command's exit code, and what it printed as JSON."""
        said = self.cli(*words, "--json")
        return said.code, json.loads(said.out)

    # -- the journal's times

    def since(self, wall: float, name: str, **fields: str) -> float:
        """Seconds from `wall` to the first line after it that says this; the journal may be a moment late."""
        def found() -> list[float]:
            ats = ((datetime.fromisoformat(line["wall"]).timestamp(), line) for line in self.said(name))
            return [at - wall for at, line in ats
                    if at >= wall and all(line.get(key) == value for key, value in fields.items())]

        return self.until(found, f"nothing after {wall} says {name} {fields}")[0]

    def events(self, kind: str, name: str, began: float, ended: float) -> Iterator[tuple[float, Doc]]:
        """What the daemon's sensors told of one engine between two moments."""
        for line in self.lines():
            if f'"_":"{kind}"' in line and line.endswith("\n"):
                at, event = datetime.fromisoformat((doc := json.loads(line))["wall"]).timestamp(), doc["event"]
                if event["_"] == kind and event["mark"]["engine"] == name and began <= at <= ended:
                    yield at, event

    def frozen(self, name: str, began: float, ended: float) -> float:
        """The longest time for which the daemon found every progress counter where it was.

        Counters only rise, so two scrapes that agree vouch for all that lies between them, however rare they are.
        """
        scrapes = [(at, event["metrics"].get("progress")) for at, event in self.events("Scraped", name, began, ended)]
        told = [(at, progress) for at, progress in scrapes if progress]     # a scrape that failed tells nothing
        stretches = ([at for at, _ in same] for _, same in groupby(told, itemgetter(1)))
        return max((times[-1] - times[0] for times in stretches), default=0.0)

    def lives(self) -> set[tuple[str, str | None]]:
        """Phase and life of every engine, now."""
        return {(each["phase"], each["life"]) for each in (self.status() or {"engines": []})["engines"]}

    # -- load

    def complete(self, name: str, tokens: int, prompt: str = "a", timeout_s: float = 30.0) -> int:
        """The status of one completion of exactly `tokens`; 0 where none came."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        return self.post(name, body, timeout_s=timeout_s)

    def metric(self, name: str, series: str) -> float:
        page = requests.get(self.url(name) + "/metrics", timeout=30).text
        lines = (line.split("{", 1) for line in page.splitlines() if line.startswith(series + "{"))
        return sum(float(rest.rsplit(" ", 1)[1]) for _, rest in lines)


CROWD = """
import sys, threading, requests
url, clients, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
body = {"model": "tiny", "prompt": "a", "max_tokens": tokens, "ignore_eos": True}
for _ in range(clients):
    threading.Thread(target=requests.post, args=(url,), kwargs={"json": body, "timeout": 120}).start()
"""


@contextmanager
def crowd(url: str, clients: int, tokens: int) -> Iterator[None]:
    """As many requests at once, from a process of their own, whose end is theirs: vLLM then aborts them."""
    with subprocess.Popen([sys.executable, "-c", CROWD, url + "/v1/completions", str(clients), str(tokens)]) as child:
        try:
            yield
        finally:
            child.kill()


def alive(pids: tuple[int, ...]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]

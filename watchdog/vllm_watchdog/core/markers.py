"""The milestones of vLLM's life and the headlines of its tracebacks: lines that are no failure but decide what one means.

A table like the catalogue's, with the literal that each needs, so that a block scanner finds them, too.  Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum, auto

from vllm_watchdog.core.places import ENGINE_FILES, SEVERE
from vllm_watchdog.core.records import Kind, Record


class Mark(StrEnum):
    START = auto()  # a new process introduces itself
    INITIALIZING = auto()  # an engine begins; without an introduction before it, also a new process
    LOADING = auto()  # only a start prints this
    READY = auto()
    START_FAILED = auto()
    STEP_FAILED = auto()  # the engine died in a step: it had been serving
    WORKER_FAILED = auto()  # headline: may be a step (fatal) or a utility call (survived)
    UTILITY_FAILED = auto()  # headline: a utility call failed, the engine goes on
    REQUEST_FAILED = auto()  # headline: one request was bad, the engine goes on
    IN_REQUEST = auto()  # headline of a bare traceback of one HTTP request
    ENGINE_STOP = auto()  # the engine core got a signal, perhaps alone, perhaps from its own server
    STOP = auto()  # somebody asked the server to stop
    UVICORN_STOP = auto()  # the server stops: asked to, or because its engine is dead


HEADLINES = frozenset({Mark.WORKER_FAILED, Mark.UTILITY_FAILED, Mark.REQUEST_FAILED})
STARTS = frozenset({Mark.START, Mark.INITIALIZING, Mark.LOADING, Mark.READY, Mark.START_FAILED})
STOPS = frozenset({Mark.ENGINE_STOP, Mark.STOP, Mark.UVICORN_STOP})
_ANY_FILE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Milestone:
    mark: Mark
    kind: Kind
    text: str  # the message begins with it, or for a bare line ends with it
    files: frozenset[str] = ENGINE_FILES
    severe: bool = False

    def matches(self, record: Record) -> bool:
        if self.kind is Kind.RAW:
            return (
                record.kind in (Kind.RAW, Kind.RECORD)
                and record.message.endswith(self.text)
                and record.message.lstrip().startswith("File ")
            )
        if record.kind is not self.kind:
            return False
        if self.kind is Kind.RECORD and self.files and record.file not in self.files:
            return False
        return (not self.severe or record.level in SEVERE) and record.message.startswith(self.text)


_SERVERS = frozenset({"api_server.py", "api_utils.py", "entry.py", "launcher.py", "serve.py", "startup.py", "utils.py"})
M, K = Mark, Kind
MILESTONES: tuple[Milestone, ...] = (
    *(
        Milestone(M.START, K.RECORD, text, _SERVERS)
        for text in ("vLLM API server version ", "vLLM server version ", "non-default args: ", "args: Namespace(")
    ),
    *(
        Milestone(M.INITIALIZING, K.RECORD, text, _ANY_FILE)
        for text in ("Initializing a V1 LLM engine ", "Initializing an LLM engine ")
    ),
    *(
        Milestone(M.LOADING, K.RECORD, text, _ANY_FILE)
        for text in (
            "Starting to load model ",
            "Resolved architecture: ",
            "Using max model len ",
            "Available KV cache memory: ",
            "Graph capturing finished",
            "Loading model weights took ",
            "Model loading took ",
            "Loading weights took ",
        )
    ),
    *(
        Milestone(M.LOADING, K.RAW, f", in {name}")
        for name in (
            "determine_available_memory",
            "determine_num_available_blocks",
            "_initialize_kv_caches",
            "compile_or_warm_up_model",
            "profile_run",
            "capture_model",
            "load_model",
            "init_device",
            "launch_core_engines",
            "wait_for_engine_startup",
        )
    ),
    *(
        Milestone(M.START_FAILED, K.RECORD, text, severe=True)
        for text in ("EngineCore failed to start.", "WorkerProc failed to start.")
    ),
    Milestone(M.READY, K.SERVER, "Application startup complete."),
    *(
        Milestone(M.READY, K.RECORD, text, _SERVERS)
        for text in ("Starting vLLM API server", "Starting vLLM server on ")
    ),
    *(
        Milestone(M.STEP_FAILED, K.RECORD, text, severe=True)
        for text in ("EngineCore encountered a fatal error.", "Engine background task failed")
    ),
    *(
        Milestone(M.WORKER_FAILED, K.RECORD, text, severe=True)
        for text in ("WorkerProc hit an exception", "Error executing method ")
    ),
    Milestone(M.UTILITY_FAILED, K.RECORD, "Invocation of ", severe=True),
    Milestone(M.REQUEST_FAILED, K.RECORD, "Unexpected error pre-processing request", severe=True),
    Milestone(M.IN_REQUEST, K.SERVER, "Exception in ASGI application"),
    *(
        Milestone(M.STOP, K.RECORD, text, frozenset({"launcher.py"}))
        for text in ("[shutdown] API server: shutdown triggered", "Shutting down FastAPI HTTP server.")
    ),
    Milestone(M.STOP, K.SERVER, "^C"),
    Milestone(M.ENGINE_STOP, K.RECORD, "[shutdown] EngineCore: trigger received signal=", frozenset({"core.py"})),
    Milestone(M.ENGINE_STOP, K.RECORD, "[shutdown] Process manager: force killing remaining process", _SERVERS),
    Milestone(M.UVICORN_STOP, K.SERVER, "Shutting down"),
)
MARKER_NEEDLES = tuple(dict.fromkeys(each.text.strip() for each in MILESTONES))

_STATS = re.compile(
    r"(?:Engine \d+: )?Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, Avg generation throughput: (?P<generation>[\d.]+)"
    r" tokens/s, Running: (?P<running>\d+) reqs, (?P<v0>Swapped: \d+ reqs, )?(?:Waiting|Pending): (?P<waiting>\d+) reqs"
    r"(?:, Deferred: (?P<deferred>\d+) reqs)?(?:, Preemptions: (?P<preemptions>\d+))?"
)
_STATS_FILES = frozenset({"async_llm.py", "llm_engine.py", "loggers.py", "metrics.py", "stats.py"})
STATS_NEEDLE = "Avg generation throughput: "
IDLE_STATS_NEEDLES = ("Avg generation throughput: 0.0 tokens/s", " Preemptions: ")


@dataclass(frozen=True, slots=True)
class Stats:
    """vLLM's own line of every 10 s.  `waiting` includes deferred requests.

    `silent` is told of V0 alone: V1's gauges stay high after a mass abort, and V1 is not heard in a real hang.
    """

    text: str
    tokens_per_s: float
    running: int
    waiting: int
    preemptions: int
    v0: bool

    @property
    def deadlocked(self) -> bool:
        return self.tokens_per_s == 0 and self.running == 0 and self.waiting > 0

    @property
    def silent(self) -> bool:
        return self.v0 and self.tokens_per_s == 0 and self.running > 0


def mark_of(record: Record) -> Mark | None:
    return next((each.mark for each in MILESTONES if each.matches(record)), None)


def stats_of(record: Record) -> Stats | None:
    if record.kind is not Kind.RECORD or record.file not in _STATS_FILES:
        return None
    if not (match := _STATS.match(record.message)):
        return None
    return Stats(
        record.message,
        float(match["prompt"]) + float(match["generation"]),
        int(match["running"]),
        int(match["waiting"]) + int(match["deferred"] or 0),
        int(match["preemptions"] or 0),
        bool(match["v0"]) and record.level == "INFO",
    )

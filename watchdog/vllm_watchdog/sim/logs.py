"""The log lines of the stand-in, in the shape of vLLM 0.32.

A vLLM *record* is `(Process pid=N) LEVEL MM-DD HH:MM:SS [file.py:LINE] text` on standard output; each further line of a
record repeats the whole prefix after CR LF. uvicorn's own lines go bare to standard error, its access lines bare to
standard output, tracebacks bare to standard error. Every call is one `os.write`, so that lines of several processes
never mix. It blocks only as long as the reader of the output does, and a reader that has gone is no error.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from http import HTTPStatus

STDOUT, STDERR = 1, 2
SITE = "/usr/local/lib/python3.12/dist-packages/vllm/"
BANNER = (
    "",
    "       █     █     █▄   ▄█",
    " ▄▄ ▄█ █     █     █ ▀▄▀ █  version {version}",
    "  █▄█▀ █     █     █     █  model   {model}",
    "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀",
    "",
)
ENGINE_DEAD = (
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
    "See stack trace (above) for the root cause."
)
START_FAILED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"

Frame = tuple[str, int, str, str]  # file below SITE, line, function, source text

DEAD_FRAMES: tuple[Frame, ...] = (
    ("v1/engine/async_llm.py", 849, "output_handler", "outputs = await engine_core.get_output_async()"),
    ("v1/engine/core_client.py", 1235, "get_output_async", "raise self._format_exception(outputs) from None"),
)
REQUEST_FRAMES: tuple[Frame, ...] = (
    ("entrypoints/serve/utils/api_utils.py", 91, "wrapper", "return handler_task.result()"),
    ("v1/engine/async_llm.py", 579, "generate", "out = q.get_nowait() or await q.get()"),
    *DEAD_FRAMES,
)
STEP_FRAMES: tuple[Frame, ...] = (
    ("v1/engine/core.py", 1496, "run_engine_core", "engine_core.run_busy_loop()"),
    ("v1/engine/core.py", 1541, "run_busy_loop", "self._process_engine_step()"),
    ("v1/engine/core.py", 1589, "_process_engine_step", "outputs, model_executed = self.step_fn()"),
    ("v1/worker/gpu/model_runner.py", 1292, "execute_model", "model_output = self.model(**model_inputs)"),
)
START_FRAMES: tuple[Frame, ...] = (
    ("v1/engine/core.py", 1482, "run_engine_core", "engine_core = EngineCoreProc(*args, **kwargs)"),
    ("v1/engine/core.py", 148, "__init__", "kv_cache_config = self._initialize_kv_caches(vllm_config)"),
)
CLIENT_FRAMES: tuple[Frame, ...] = (
    ("entrypoints/launchers/api_server/entry.py", 196, "run_server_worker", "async with build_async_engine_client("),
    ("v1/engine/utils.py", 1297, "wait_for_engine_startup", "raise RuntimeError("),
)


def traceback_lines(frames: tuple[Frame, ...], error: str) -> tuple[str, ...]:
    """A traceback as Python prints it: header, two lines a frame, then `error` (which may hold several lines)."""
    body = [f'  File "{SITE}{file}", line {line}, in {where}\n    {text}' for file, line, where, text in frames]
    return tuple("\n".join(("Traceback (most recent call last):", *body, error)).split("\n"))


@dataclass(frozen=True, slots=True)
class Log:
    """The log of one process, named as vLLM names it: `APIServer`, `EngineCore`, `Worker_TP0`."""

    process: str

    def _prefix(self, level: str, where: str) -> str:
        stamp = time.strftime("%m-%d %H:%M:%S")
        return f"({self.process} pid={os.getpid()}) {level} {stamp} [{where}] "

    def record(self, level: str, where: str, *lines: str) -> None:
        prefix = self._prefix(level, where)
        write(STDOUT, "\r\n".join(prefix + line for line in lines))

    def info(self, where: str, text: str) -> None:
        self.record("INFO", where, text)

    def warning(self, where: str, text: str) -> None:
        self.record("WARNING", where, text)

    def failure(self, where: str, headline: str, frames: tuple[Frame, ...], error: str) -> None:
        """An ERROR record with a traceback, as `logger.exception` prints it."""
        self.record("ERROR", where, headline, *traceback_lines(frames, error))


def write(fd: int, text: str) -> None:
    """Writes one or more lines at once; a closed or full reader loses the text, as it loses vLLM's."""
    data = (text + "\n").encode()
    while data:
        try:
            data = data[os.write(fd, data) :]
        except (BrokenPipeError, BlockingIOError):
            return


def uvicorn(text: str) -> None:
    write(STDERR, f"INFO:     {text}")


def access(client: str, request_line: str, status: int) -> None:
    write(STDOUT, f'INFO:     {client} - "{request_line}" {status} {HTTPStatus(status).phrase}')


def traceback(frames: tuple[Frame, ...], error: str) -> None:
    """A traceback that nobody caught, on standard error."""
    write(STDERR, "\n".join(traceback_lines(frames, error)))

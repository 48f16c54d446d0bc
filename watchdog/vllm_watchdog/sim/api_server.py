"""The API server process: binds its port, forks EngineCore, listens once it is loaded, serves, and ends as vLLM ends.

The main thread only waits (for a signal, a noticed death, a pipe) and decides how to end; connections have threads. The
port is bound from the start but refuses connections until the engine is ready. After an engine death the exit status is
0, as vLLM's is; a start that fails exits 1.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from pathlib import Path

from vllm_watchdog.sim import background, faults, link, loading, logs, proctitle, wire
from vllm_watchdog.sim.client import EngineClient
from vllm_watchdog.sim.engine_process import EngineProcess
from vllm_watchdog.sim.flags import VERSION, Options
from vllm_watchdog.sim.metrics import Metrics
from vllm_watchdog.sim.routes import ENDPOINTS, Context, answer

NOTICE_S = 1.0  # a death nobody asked about is noticed after this long (vLLM's own loop: 5 s)
CLOSE_S = 5.0  # how long open responses may take to end
BACKLOG = 2048
THREAD_STACK_BYTES = 256 << 10
BIND_FRAME: logs.Frame = ("entrypoints/launchers/launcher.py", 353, "create_server_socket", "sock.bind(addr)")


class Server:
    """One API server and its engine."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.log = logs.Log("APIServer")
        self.woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self.terms = 0
        self.should_exit = False
        self.active = 0
        self._lock = threading.Lock()

    # --- signals and waiting -------------------------------------------------------------------------------------

    def _on_signal(self, _number: int, _frame: object) -> None:
        self.terms += 1
        self.wake()

    def wake(self) -> None:
        try:
            os.write(self._waker, b"\0")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already

    def _wait(self, timeout_s: float) -> None:
        if select.select([self.woken], [], [], timeout_s)[0]:
            os.read(self.woken, 4096)

    # --- life ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """From the banner to the exit status."""
        handler = signal.SIG_IGN if self.options.sim.ignore_term else self._on_signal
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, handler)
        proctitle.comm("vllm")
        for line in logs.BANNER:
            self.log.info("api_utils.py:347", line.format(version=VERSION, model=self.options.model))
        self.log.info("api_utils.py:286", f"non-default args: {self.options.given}")
        if error := self._refusal():
            logs.traceback((), error)
            return 1
        try:
            listener = self._bind()
        except OSError as refused:
            logs.traceback((BIND_FRAME,), f"OSError: [Errno {refused.errno}] {refused.strerror}")
            return 1
        engine = EngineProcess(self.options, self.log, lambda: self._close(listener))
        return self._load(engine) or self._serve(engine, listener)

    def _close(self, listener: socket.socket) -> None:
        listener.close()
        os.close(self.woken)
        os.close(self._waker)

    def _refusal(self) -> str:
        """The error of a start that fails before there is an engine."""
        if self.options.max_num_seqs < 1:
            return faults.NO_SEQUENCES
        gone = Path(self.options.model).is_absolute() and not Path(self.options.model).exists()
        failure = faults.START_FAILURES.get("no-folder" if gone else self.options.sim.fail_start)
        return loading.failure_text(failure.error, self.options) if failure and failure.process == "api" else ""

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.options.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.options.host, self.options.port))
        return listener

    def _load(self, engine: EngineProcess) -> int:
        """Waits for the engine; a signal is only noted meanwhile, as measured on 0.32. Returns a status or 0."""
        while (message := engine.link.receive(NOTICE_S)) is None:
            continue
        if message is not link.CLOSED:
            return 0
        engine.reap()
        if self.terms:
            logs.traceback((), "KeyboardInterrupt: terminated")
            return 130
        logs.traceback(logs.CLIENT_FRAMES, logs.START_FAILED)
        return 1

    def _serve(self, engine: EngineProcess, listener: socket.socket) -> int:
        metrics = Metrics(self.options)
        client = EngineClient(engine.link, metrics, lambda announced: self._on_death(engine, announced))
        client.start()
        context = Context(
            self.options, client, metrics, self.log, self._notice, lambda asked: self._fault(client, asked)
        )
        self._announce()
        listener.listen(BACKLOG)
        threading.stack_size(THREAD_STACK_BYTES)
        threading.Thread(target=self._accept, args=(listener, context), name="accept", daemon=True).start()
        background.start(self.options, self.log, metrics)
        logs.uvicorn("Application startup complete.")
        while not (self.terms or self.should_exit):
            self._wait(NOTICE_S)
            if client.dead and not self.should_exit:
                self._wait(NOTICE_S)
                self._notice()
        if client.dead:
            self._close_http(listener)
            logs.uvicorn(f"Finished server process [{os.getpid()}]")
            engine.stop(self.options.shutdown_timeout_s)
        else:
            client.closing = True
            self._end_on_signal(engine, listener)
        return 0

    def _announce(self) -> None:
        host, port = self.options.host, self.options.port
        self.log.info("entry.py:136", "Supported tasks: ['generate']")
        if self.options.dev_mode:
            text = "SECURITY WARNING: Development endpoints are enabled! This should NOT be used in production!"
            self.log.warning("__init__.py:36", text)
        self.log.info("entry.py:140", f"Starting vLLM server on http://{f'[{host}]' if ':' in host else host}:{port}")
        self.log.info("launcher.py:186", "Available routes are:")
        for method, path in ENDPOINTS:
            self.log.info("launcher.py:195", f"Route: {path}, Methods: {method}")
        logs.uvicorn(f"Started server process [{os.getpid()}]")
        logs.uvicorn("Waiting for application startup.")

    # --- connections ---------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, context: Context) -> None:
        while True:
            try:
                end, address = listener.accept()
            except OSError:
                return  # closed: the server ends
            client = f"{address[0]}:{address[1]}"
            args = (context, wire.Connection(end, client))
            threading.Thread(target=self._converse, args=args, name=client, daemon=True).start()

    def _converse(self, context: Context, connection: wire.Connection) -> None:
        try:
            alive = True
            while alive:
                request = connection.read()
                self._count(1)
                try:
                    answer(context, connection, request)
                finally:
                    self._count(-1)
                alive = request.keep_alive and not self.should_exit
        except wire.ClientGoneError:
            pass  # a client may leave whenever it likes
        except wire.BadHttpError as bad:
            logs.write(logs.STDERR, f"WARNING:  Invalid HTTP request received. {bad}")
        finally:
            connection.close()

    def _count(self, change: int) -> None:
        with self._lock:
            self.active += change

    # --- ends ----------------------------------------------------------------------------------------------------

    def _on_death(self, engine: EngineProcess, announced: bool) -> None:
        """In the reader's thread, before the waiting requests hear of it."""
        if not announced:
            text = "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
            self.log.warning("core_client.py:817", text)
            engine.stop(None)
        self.log.failure("async_llm.py:906", "AsyncLLM output_handler failed.", logs.DEAD_FRAMES, logs.ENGINE_DEAD)
        self.wake()

    def _fault(self, client: EngineClient, asked: link.Message) -> None:
        if asked["name"] == "flood":
            background.flood(self.log, float(asked.get("mb_per_s", 1)), float(asked.get("seconds", 5)))
        elif asked["name"] == "die":
            background.die(str(asked.get("signal", "SIGSEGV")), 0.0)
        else:
            client.fault(asked)

    def _notice(self) -> None:
        if os.environ.get("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH") != "1":
            self.should_exit = True
            self.wake()

    def _end_on_signal(self, engine: EngineProcess, listener: socket.socket) -> None:
        timeout_s = self.options.shutdown_timeout_s
        mode = "drain" if timeout_s else "abort"
        self.log.info("launcher.py:254", "[shutdown] API server: shutdown triggered")
        text = f"[shutdown] API server: stopping engine client mode={mode} timeout={timeout_s:.0f}s"
        self.log.info("launcher.py:270", text)
        engine.stop(timeout_s)
        for line, text in (
            (279, "engine client stopped"),
            (282, "signalling HTTP server shutdown"),
            (304, "shutting down FastAPI HTTP server"),
        ):
            self.log.info(f"launcher.py:{line}", f"[shutdown] API server: {text}")
        self._close_http(listener)

    def _close_http(self, listener: socket.socket) -> None:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        logs.uvicorn("Shutting down")
        until = time.monotonic() + CLOSE_S
        if self.options.sim.linger:
            logs.uvicorn("Waiting for connections to close. (CTRL+C to force quit)")
            until = float("inf")
        while (self.active or self.options.sim.linger) and time.monotonic() < until:
            self._wait(0.02)
        for text in ("Waiting for application shutdown.", "Application shutdown complete."):
            logs.uvicorn(text)

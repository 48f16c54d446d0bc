"""The other end of the control socket, for the command line, the status page and the gateway.

Blocks its caller, for at most the deadline given; a stream for at most `silence_s` between two lines.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vllm_watchdog.tell.control import heartbeat_s
from vllm_watchdog.tell.wire import ControlError, check_path, line

response_limit = 64 << 20       # 1000 incidents and their timelines are far below
silence_s = 4 * heartbeat_s


class Unreachable(Exception):  # noqa: N818 - it reads as what it says
    """The daemon did not answer: one sentence, naming the socket."""


def call(path: Path, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
    """The daemon's answer; its `ok` may be false.  Raises Unreachable."""
    end = time.monotonic() + deadline_s
    with _connected(path, request, deadline_s) as peer:
        data = bytearray()
        while not data.endswith(b"\n"):
            part = _receive(peer, path, end - time.monotonic(), deadline_s)
            data += part
            if not part or len(data) > response_limit:
                raise Unreachable(f"{path}: the daemon hung up before its answer was whole")
    return _decoded(path, bytes(data))


def stream(path: Path, request: Mapping[str, Any], silent_s: float = silence_s) -> Iterator[dict[str, Any]]:
    """The daemon's lines as they come; ends when the daemon does.  Raises Unreachable, also on a silent daemon."""
    with _connected(path, request, silent_s) as peer:
        rest = b""
        while part := _receive(peer, path, silent_s, silent_s):
            *lines, rest = (rest + part).split(b"\n")
            yield from (_decoded(path, each) for each in lines if each)
            if len(rest) > response_limit:
                raise Unreachable(f"{path}: a line without an end")


@contextmanager
def _connected(path: Path, request: Mapping[str, Any], deadline_s: float) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(max(deadline_s, 0.001))
        try:
            check_path(path)
            peer.connect(str(path))
            with suppress(BrokenPipeError, ConnectionResetError):   # refused unread: the reason waits to be received
                peer.sendall(line(request))
        except ControlError as error:
            raise Unreachable(str(error)) from None
        except (FileNotFoundError, ConnectionRefusedError):
            raise Unreachable(f"{path}: no daemon answers there; is it running?") from None
        except OSError as error:
            raise Unreachable(f"{path}: {error.strerror or 'no connection in time'}") from None
        yield peer


def _receive(peer: socket.socket, path: Path, left_s: float, deadline_s: float) -> bytes:
    try:
        peer.settimeout(max(left_s, 0.001))
        return peer.recv(1 << 16)
    except TimeoutError:
        raise Unreachable(f"{path}: the daemon gave no answer within {deadline_s:g} s") from None
    except OSError as error:
        raise Unreachable(f"{path}: {error.strerror or 'connection lost'}") from None


def _decoded(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Unreachable(f"{path}: whoever answers there is no llm-watchdog")
    return value

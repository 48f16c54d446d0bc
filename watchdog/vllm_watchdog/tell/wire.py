"""The control socket's wire: one JSON object a line over a Unix socket, both ends of it.

Every wait has a deadline; who is at the other end is told by the kernel, not by the peer.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_watchdog.tell.files import owner_file, owner_only_folder

path_limit = 107            # bytes: sockaddr_un.sun_path, without its NUL
request_limit = 64 << 10
backlog = 16


class ControlError(Exception):
    """The socket cannot be made: one sentence."""


class RequestError(Exception):
    """The peer sent what we cannot answer: one sentence."""


def line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def send(peer: socket.socket, data: bytes) -> bool:
    """False: the peer is gone, or did not read all of it within the socket's timeout."""
    try:
        peer.sendall(data)
    except OSError:
        return False
    return True


def receive(peer: socket.socket, deadline_s: float) -> dict[str, Any]:
    """The peer's one request.  Raises RequestError."""
    end, data = time.monotonic() + deadline_s, b""
    try:
        while not data.endswith(b"\n") and len(data) <= request_limit:
            peer.settimeout(max(0.001, end - time.monotonic()))
            part = peer.recv(request_limit)
            if not part:
                break
            data += part
    except OSError:
        raise RequestError(f"no whole request within {deadline_s:g} s") from None
    if len(data) > request_limit:
        raise RequestError(f"request over {request_limit >> 10} KiB")
    try:
        request = json.loads(data)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise RequestError('expected one JSON object on one line, as {"verb": "status"}')
    return request


def peer_of(peer: socket.socket) -> tuple[int, int]:
    """PID and user id at the other end, by the kernel's word."""
    pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def check_peer(peer: socket.socket) -> None:
    """Root and our own user may.  Raises RequestError."""
    _, uid = peer_of(peer)
    if uid not in (0, os.geteuid()):
        raise RequestError(f"user {uid} may not, expected root or user {os.geteuid()}")


def bind(listener: socket.socket, path: Path) -> None:
    """Raises ControlError.  The daemon's lock is held, so a socket nobody answers on is a dead daemon's."""
    check_path(path)
    try:
        owner_only_folder(path.parent)
        _remove_stale(path)
        os.fchmod(listener.fileno(), owner_file)    # Linux hands it on to the file that bind makes: never wider
        listener.bind(str(path))
        listener.listen(backlog)
    except OSError as error:
        raise ControlError(f"{path}: {error.strerror or error}, expected a place for the control socket") from None


def check_path(path: Path) -> None:
    """Raises ControlError where the kernel takes no such long path."""
    length = len(os.fsencode(path))
    if length > path_limit:
        raise ControlError(f"{path}: {length} bytes, expected a socket path of at most {path_limit}")


def _remove_stale(path: Path) -> None:
    if not path.is_socket():
        if path.exists() or path.is_symlink():
            raise ControlError(f"{path}: not a socket, expected a place for the control socket")
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:     # its queue is full: it lives
            raise ControlError(f"{path}: another daemon answers there") from None
        raise ControlError(f"{path}: PID {peer_of(probe)[0]} answers there, expected no other daemon")

"""sd_notify: one datagram to systemd.  Never waits, never fails: what cannot be sent is counted in `lost`.

`from_environ` takes the variables out of the environment: an engine that inherited NOTIFY_SOCKET could answer for us.
The protocol is sd_notify(3): an AF_UNIX datagram socket, "@" standing for the abstract namespace.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field

_address_limit = 107    # sockaddr_un.sun_path, without its NUL
_world = {errno.EAGAIN, errno.ENOBUFS, errno.ECONNREFUSED, errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM,
          errno.ECONNRESET, errno.EPIPE, errno.EMFILE, errno.ENFILE, errno.ENOMEM}   # anything else is our bug


@dataclass(slots=True)
class Notifier:
    """Without an `address` (no systemd) nothing is sent.  `watchdog_s`: tell `watchdog()` at least this often; half of
    what systemd allows; None: it does not ask."""

    address: str | None = None
    watchdog_s: float | None = None
    lost: int = 0
    _socket: socket.socket | None = field(default=None, repr=False)

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Takes NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID; a value that is not for this process is ignored."""
        address = environ.pop("NOTIFY_SOCKET", "")
        usec = environ.pop("WATCHDOG_USEC", "")
        pid = environ.pop("WATCHDOG_PID", "")
        if address[:1] not in ("/", "@") or len(os.fsencode(address)) > _address_limit:
            return cls()
        wanted = usec.isdecimal() and int(usec) > 0 and pid in ("", str(os.getpid()))
        return cls(address, int(usec) / 2e6 if wanted else None)

    def ready(self, status: str) -> None:
        self.notify(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        self.notify(f"STATUS={_one_line(status)}")

    def watchdog(self) -> None:
        """Call it at the end of a loop turn, and nowhere else: it says that the loop turns."""
        self.notify("WATCHDOG=1")

    def extend(self, by_s: float) -> None:
        """A start or a stop that goes on may take this much longer; to be repeated while it lasts."""
        self.notify(f"EXTEND_TIMEOUT_USEC={int(by_s * 1e6)}")

    def reloading(self) -> None:
        """`ready` ends it."""
        self.notify(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        self.notify(f"STOPPING=1\nSTATUS={_one_line(status)}")

    def notify(self, state: str) -> None:
        if self.address is None:
            return
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.setblocking(False)
            self._socket.sendto(state.encode("utf-8", "replace"), _path(self.address))
        except OSError as error:
            if error.errno not in _world:
                raise
            self.lost += 1      # systemd restarts us if it matters, and the next one may get through

    def close(self) -> None:
        if self._socket:
            self._socket.close()
            self._socket = None


def _path(address: str) -> bytes:
    return os.fsencode("\0" + address[1:] if address[0] == "@" else address)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]

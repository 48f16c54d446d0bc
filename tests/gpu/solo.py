"""One engine, no backup, one card: what needs a quiet machine.  Unattended, under 330 s, a table at the end.

    python -m tests.gpu.solo MODEL_FOLDER OUT_FOLDER [--gpu N] [--stages NAME,NAME…] [--seconds S]

Our samples beside nvidia-smi's, the watchdog's and the gateway's cost in as many pairs as fit, and a hang with nobody to
take over, told as far as the seconds reach: the engine's next start may not fit in.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
from tests.gpu.load import Clients
from tests.gpu.look import aftermath, compare
from tests.gpu.meter import seconds
from tests.gpu.overhead import Overhead
from tests.gpu.rig import Doc, Host, pause
from tests.gpu.visit import visit

PAIRS = 14
HANG_S = 19.0       # until the next start has begun
END_S = 6.0         # to stop, and to pack what was written
# Steps that the GPU paces: with --enforce-eager it is one CPU core, and by more than the half per cent looked for.
LAYOUT = """
compilation-config = '{{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}'
gpu-memory-utilization = 0.5
max-model-len = 8192
max-num-seqs = 64
"""


def serving(engines: dict[str, Doc], _: Doc) -> bool:
    return bool(engines["primary"]["phase"] == "serving")


class Solo:
    def __init__(self, host: Host, gpu: int) -> None:
        self.host, self.gpu = host, gpu

    def sampling(self) -> None:
        compare(self.host, (self.gpu,), "solo")
        self.host.row("one sample of all cards", f"{self.host.meter.cost_us():.0f} µs")

    def overhead(self) -> None:
        Overhead(self.host, PAIRS, HANG_S + END_S).run()

    def hang(self) -> None:
        """The core is stopped under load; nobody takes over."""
        host = self.host
        host.until(serving, 60)
        with Clients(host.gateway_url, leave_s=5) as clients:
            pause(2)
            members, before = host.members("primary"), host.meter.read()
            began = time.monotonic()
            os.kill(host.core("primary"), signal.SIGSTOP)
            host.until(lambda engines, _: engines["primary"]["phase"] not in ("serving", "suspect"), 60)
            host.row("hang: judged wedged after (patience 3 + 3 + 4 s)", f"{time.monotonic() - began:.1f} s")
            host.awaited(began, 40, "engine.spawned", engine="primary")
            host.row("hang: nothing of it left; memory back after",
                     f"{not any(map(psutil.pid_exists, members.values()))}; "
                     f"{seconds(host.meter.back_s(self.gpu, members.values(), began, before))}")
            if again := self._awaited():
                host.row("hang: serves again", again)
                pause(1)
                host.row("hang: the longest that an answer took", f"{clients.longest_s(began):.1f} s")
        aftermath(host, began, "hang")
        host.row("hang: answers to the clients", clients.said())

    def _awaited(self) -> str:
        """How long the next start took; empty where it does not fit into the seconds that are left."""
        try:
            return f"after {self.host.until(serving, self.host.deadline - time.monotonic() - END_S):.1f} s"
        except TimeoutError:
            self.host.row("hang: serves again", "not within the seconds that were left")
            return ""


STAGES = {"sampling": 10.0, "overhead": 60.0, "hang": HANG_S + END_S}


if __name__ == "__main__":
    sys.exit(visit(sys.argv[1:], stages=STAGES, seconds=322, layout=LAYOUT, port=18040, up=("boot", serving), make=Solo))

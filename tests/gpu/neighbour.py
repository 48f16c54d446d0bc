"""A foreign process that takes memory of one card: the watchdog must name it and leave it alone.

    CUDA_VISIBLE_DEVICES=0 python -m tests.gpu.neighbour

Each line that it reads is a number of MiB; it takes what is free but for that, and answers `held`.  It ends with its input.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType

COMMAND = (sys.executable, "-m", "tests.gpu.neighbour")


class Neighbour:
    """One of them, on the card of this index."""

    def __init__(self, gpu: int) -> None:
        env = os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(gpu)}
        self._process = subprocess.Popen(COMMAND, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait(20)

    def leaves(self, mib: int) -> None:
        """Raises RuntimeError where it died, for example of a card that was full already."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{mib}\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "held\n":
            raise RuntimeError("the neighbour took nothing")

    def lives(self) -> bool:
        return self._process.poll() is None


def main() -> None:
    import torch

    held = []
    for line in sys.stdin:
        free, _ = torch.cuda.mem_get_info()
        if (more := free - int(line) * 2**20) > 0:
            held.append(torch.empty(more, dtype=torch.uint8, device="cuda"))
        print("held", flush=True)


if __name__ == "__main__":
    main()

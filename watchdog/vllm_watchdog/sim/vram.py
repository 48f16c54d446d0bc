"""Simulated GPU memory: one file `PID.json` a process in the folder that LLM_WATCHDOG_SIM_GPU names.

`{"pid": …, "gpu": …, "used_bytes": …}` lives while its process does. A SIGKILLed process leaves its file behind, so a
reader must check that the PID lives; who begins to hold something removes such files, before their PIDs are used again.
`gpu.json` in the same folder gives `{"total_bytes": …}`. Without the variable there is no GPU and nothing is written.
Small local files only: it blocks for microseconds.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

GIB = 1024**3
CONTEXT_BYTES = GIB // 2  # what a CUDA context holds before any weight is loaded, and what a sleeping engine keeps
DEFAULT_TOTAL_BYTES = 80 * GIB


@dataclass(frozen=True, slots=True)
class Use:
    """What one process holds on one GPU."""

    pid: int
    gpu: int
    used_bytes: int


def folder() -> Path | None:
    """The folder of the simulated GPUs, or None where there is none."""
    name = os.environ.get("LLM_WATCHDOG_SIM_GPU")
    return Path(name) if name else None


def gpu_index(rank: int) -> int:
    """The GPU of one rank, by CUDA_VISIBLE_DEVICES."""
    seen = [int(part) for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip().isdigit()]
    return seen[rank] if rank < len(seen) else rank


def total_bytes(where: Path) -> int:
    """The size of every simulated GPU in bytes (80 GiB where gpu.json is absent)."""
    try:
        return int(json.loads((where / "gpu.json").read_text())["total_bytes"])
    except FileNotFoundError:
        return DEFAULT_TOTAL_BYTES


def uses(where: Path) -> tuple[Use, ...]:
    """What the processes that live now hold; files of dead ones are skipped, not removed."""
    found = []
    for path in sorted(where.glob("[0-9]*.json")):
        if not alive(int(path.stem)):
            continue
        try:
            found.append(Use(**json.loads(path.read_text())))
        except FileNotFoundError:
            continue  # it ended between the listing and the read
    return tuple(found)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie holds no memory."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def hold(gpu: int, used_bytes: int) -> None:
    """Sets what this process holds; the write is atomic."""
    if (where := folder()) is None:
        return
    if not (where / f"{os.getpid()}.json").exists():
        _sweep(where)
    fresh = where / f".{os.getpid()}.tmp"
    fresh.write_text(json.dumps({"pid": os.getpid(), "gpu": gpu, "used_bytes": used_bytes}))
    fresh.rename(where / f"{os.getpid()}.json")


def _sweep(where: Path) -> None:
    for path in where.glob("[0-9]*.json"):
        if not alive(int(path.stem)):
            path.unlink(missing_ok=True)


def release() -> None:
    """Gives everything back, as a process does that ends by itself."""
    if (where := folder()) is not None:
        (where / f"{os.getpid()}.json").unlink(missing_ok=True)

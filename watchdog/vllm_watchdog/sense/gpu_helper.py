"""The process that alone talks to the GPU driver: one request line in, one JSON line out.

A call into a wedged driver sleeps in D state and can't be interrupted; here it costs this process and nothing else.
It may block in NVML for ever: whoever asks has the deadline (`sense/gpu.py`).  It must stay small, so it imports only
what it needs; it must not outlive the daemon, so it ends with its standard input.

    7\\n  ->  {"seq": 7, "gpus": [{"index": 0, "uuid": …, "used_bytes": …, "processes": [{"pid": …, "used_bytes": …}]}]}
          ->  {"seq": 7, "unknown": "no NVIDIA driver: …"}      and then it ends

A figure that a card does not tell (MIG, vGPU) is null.  A card whose memory can't be read is left out: a guess would
open the VRAM gate.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False       # for the type checker alone: `typing` and `pathlib` would be a quarter of this process
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    class Source(Protocol):
        def read(self) -> list[dict[str, Any]]:
            """One dict a card, as in the module's head.  Raises `NoGpuError`, after which the source is spent."""

NAME = "watchdog-gpu"           # as `ps` and `top` show it; the kernel keeps 15 bytes
DEFAULT_SIM_BYTES = 80 << 30    # of a simulated card whose folder has no gpu.json


class NoGpuError(Exception):
    """Nothing can be read: no driver, no card, or a driver that was replaced under us."""


class Nvml:
    """The driver, through pynvml."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError_LibraryNotFound:
            raise NoGpuError("no NVIDIA driver") from None
        except nvml.NVMLError as error:
            raise NoGpuError(f"no NVIDIA driver: {error}") from None
        if not self._count:
            raise NoGpuError("the NVIDIA driver lists no GPU")

    def read(self) -> list[dict[str, Any]]:
        cards, why = [], ""
        for index in range(self._count):
            try:
                cards.append(self._card(index))
            except self._nvml.NVMLError as error:
                why = f"GPU {index}: {error}"
        if not cards:
            raise NoGpuError(why)
        return cards

    def _card(self, index: int) -> dict[str, Any]:
        nvml = self._nvml
        card = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = self._memory(card)
        return {
            "index": index,
            "uuid": self._told(nvml.nvmlDeviceGetUUID, card) or "",
            "name": self._told(nvml.nvmlDeviceGetName, card) or "",
            "used_bytes": memory.used,
            "total_bytes": memory.total,
            "utilization": self._told(lambda: nvml.nvmlDeviceGetUtilizationRates(card).gpu),
            "temperature_c": self._told(nvml.nvmlDeviceGetTemperature, card, nvml.NVML_TEMPERATURE_GPU),
            "ecc_uncorrected": self._told(
                nvml.nvmlDeviceGetTotalEccErrors, card, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "processes": self._processes(card),
            "bus_id": self._told(self._bus_id, card) or "",
        }

    def _memory(self, card: Any) -> Any:
        """As nvidia-smi counts it: what the driver keeps for itself is not in use.  An old driver counts it."""
        nvml = self._nvml
        if (memory := self._told(nvml.nvmlDeviceGetMemoryInfo, card, nvml.nvmlMemory_v2)) is not None:
            return memory
        return nvml.nvmlDeviceGetMemoryInfo(card)

    def _bus_id(self, card: Any) -> str:
        """As the kernel log writes it, without the function: 0000:3b:00."""
        pci = self._nvml.nvmlDeviceGetPciInfo(card)
        return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}"

    def _processes(self, card: Any) -> list[dict[str, Any]]:
        """Compute and graphics lists in one: a process that is in both is listed once."""
        found: dict[int, int | None] = {}
        nvml = self._nvml
        for listed in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
            for row in self._told(listed, card) or ():
                known = found.get(row.pid)
                found[row.pid] = row.usedGpuMemory if known is None else max(known, row.usedGpuMemory or 0)
        return [{"pid": pid, "used_bytes": used} for pid, used in found.items()]

    def _told(self, ask: Callable[..., Any], *args: Any) -> Any:
        """What the card answers, None where it does not tell."""
        try:
            return ask(*args)
        except self._nvml.NVMLError:
            return None


class Simulated:
    """The stand-in engine's cards: `gpu.json` {"total_bytes", "count"} and a `PID.json` for each process that holds."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def read(self) -> list[dict[str, Any]]:
        card = self._json("gpu.json") or {}
        rows = [row for pid in self._pids() if _lives(pid) and (row := self._json(f"{pid}.json"))]
        count = max([int(card.get("count", 1)), *(int(row["gpu"]) + 1 for row in rows)])
        return [self._card(index, int(card.get("total_bytes", DEFAULT_SIM_BYTES)), rows) for index in range(count)]

    def _card(self, index: int, total: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
        mine = [{"pid": int(row["pid"]), "used_bytes": int(row["used_bytes"])} for row in rows if row["gpu"] == index]
        used = sum(row["used_bytes"] for row in mine)
        return {
            "index": index, "uuid": f"SIM-{index}", "name": "simulated GPU", "used_bytes": used, "total_bytes": total,
            "utilization": None, "temperature_c": None, "ecc_uncorrected": None, "processes": mine, "bus_id": "",
        }

    def _pids(self) -> list[str]:
        try:
            names = os.listdir(self._folder)    # noqa: PTH208
        except FileNotFoundError:
            return []
        return [name[:-5] for name in names if name.endswith(".json") and name[0].isdigit()]

    def _json(self, name: str) -> dict[str, Any] | None:
        try:
            with open(f"{self._folder}/{name}", "rb") as file:      # noqa: PTH123
                found = json.loads(file.read())
        except (FileNotFoundError, ValueError):     # it ended between the listing and the read
            return None
        return found if isinstance(found, dict) else None


def _lives(pid: str) -> bool:
    """A zombie holds no memory."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:       # noqa: PTH123
            return stat.read().rpartition(b") ")[2][:1] not in b"ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def source() -> Source:
    """Raises `NoGpuError`."""
    if folder := os.environ.get("LLM_WATCHDOG_SIM_GPU"):
        return Simulated(folder)
    import pynvml  # 4 MB, and only where it is needed

    return Nvml(pynvml)


def serve(requests: Any, answers: Any, opened: Callable[[], Source]) -> None:
    """Answer each request until they end, or until nothing can be read any more."""
    cards: Source | None = None
    for line in requests:
        seq = int(line)
        try:
            cards = cards or opened()
            answer: dict[str, Any] = {"seq": seq, "gpus": cards.read()}
        except NoGpuError as error:
            answer = {"seq": seq, "unknown": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "unknown" in answer:
            return


if __name__ == "__main__":
    with open("/proc/self/comm", "w") as comm:      # noqa: PTH123
        comm.write(NAME)
    try:
        serve(sys.stdin, sys.stdout, source)
    except BrokenPipeError:     # the daemon died while we were in the driver
        os._exit(0)             # an ordinary exit would try to flush what nobody reads

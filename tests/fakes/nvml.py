"""pynvml with the answers recorded on one NVIDIA H200 (driver 580.159.04) while a process held 2 GiB.

`by_card` gives another card answers of its own: a value, or an exception that the call raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


class NVMLErrorLibraryNotFound(NVMLError):
    pass


Rows = tuple[tuple[int, int | None], ...]


class RecordedNvml:
    NVMLError = NVMLError
    NVMLError_LibraryNotFound = NVMLErrorLibraryNotFound
    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlMemory_v2 = 0x02000028

    def __init__(
        self, count: int = 1, library: bool = True, refuses: tuple[str, ...] = (), lost: tuple[int, ...] = (),
        compute: Rows = ((425, 2_690_646_016),), graphics: Rows = (), by_card: Mapping[int, Mapping[str, Any]] = {},
    ) -> None:
        self._by_card = by_card
        self._refuses, self._lost, self._library = refuses, lost, library
        self._answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetCount": count,
            "nvmlDeviceGetUUID": "GPU-819b0977-af31-9acf-a464-856d4d11b130",
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3_344_826_368, total=150_754_820_096),
            "nvmlDeviceGetMemoryInfo_v2": SimpleNamespace(used=2_701_000_704, total=150_754_820_096),   # 614 MiB less
            "nvmlDeviceGetPciInfo": SimpleNamespace(domain=0, bus=0, device=6),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
            "nvmlDeviceGetTemperature": 28,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetComputeRunningProcesses": rows(compute),
            "nvmlDeviceGetGraphicsRunningProcesses": rows(graphics),
        }

    def __getattr__(self, call: str) -> Any:
        def answer(*args: Any) -> Any:
            if not self._library:
                raise NVMLErrorLibraryNotFound("NVML Shared Library Not Found")
            if call == "nvmlDeviceGetMemoryInfo" and args[1:] == (self.nvmlMemory_v2,):
                return getattr(self, f"{call}_v2")(args[0])     # a function of its own in the library
            if call in self._refuses:
                raise NVMLError("Not Supported")
            if call == "nvmlDeviceGetHandleByIndex":
                if args[0] in self._lost:
                    raise NVMLError("GPU is lost")
                return SimpleNamespace(index=args[0])
            own = self._by_card.get(getattr(args[0], "index", 0), {}) if args else {}
            if isinstance(told := own.get(call, self._answers[call]), NVMLError):
                raise told
            return told

        return answer


def rows(listed: Rows) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in listed]

"""What the GPU helper reads from a recorded NVML, and what GpuSense makes of a real helper, stopped or killed."""

from __future__ import annotations

import io
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.nvml import NVMLError, RecordedNvml, rows

from vllm_watchdog import proc
from vllm_watchdog.core.events import GpusSampled
from vllm_watchdog.core.readings import Gpu, GpuProcess, Holder, Mark, Unknown
from vllm_watchdog.sense import gpu, gpu_helper
from vllm_watchdog.sense.gpu_helper import NoGpuError, Nvml, serve

GIB = 1 << 30


def one_card(**changes: Any) -> dict[str, Any]:
    (card,) = Nvml(RecordedNvml(**changes)).read()
    return card


# -- what the helper reads

def test_a_card_is_read_as_the_driver_tells_it() -> None:
    assert one_card() == {
        "index": 0, "uuid": "GPU-819b0977-af31-9acf-a464-856d4d11b130", "name": "NVIDIA H200", "used_bytes": 2_701_000_704,
        "total_bytes": 150_754_820_096, "utilization": 0, "temperature_c": 28, "ecc_uncorrected": 0,
        "processes": [{"pid": 425, "used_bytes": 2_690_646_016}], "bus_id": "0000:00:06",
    }


def test_a_driver_that_knows_only_the_old_count_is_read_by_it() -> None:
    card = one_card(refuses=("nvmlDeviceGetMemoryInfo_v2",))
    assert (card["used_bytes"], card["total_bytes"]) == (3_344_826_368, 150_754_820_096)


def test_a_card_whose_memory_is_refused_by_either_count_is_left_out() -> None:
    refused = dict.fromkeys(("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"), NVMLError("Not Supported"))
    assert [card["index"] for card in Nvml(RecordedNvml(count=2, by_card={0: refused})).read()] == [1]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilization"), ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetTotalEccErrors", "ecc_uncorrected"), ("nvmlDeviceGetPciInfo", "bus_id"),
    ],
)
def test_what_a_card_does_not_tell_is_empty_and_the_rest_is_read(call: str, field: str) -> None:
    card = one_card(refuses=(call,))
    assert not card[field]
    assert card["used_bytes"] == 2_701_000_704


def test_memory_of_a_process_that_mig_does_not_tell_is_none() -> None:
    assert one_card(compute=((7, None),))["processes"] == [{"pid": 7, "used_bytes": None}]


def test_a_process_in_both_lists_is_listed_once_with_the_larger_figure() -> None:
    card = one_card(compute=((7, 5), (8, None)), graphics=((7, 9), (8, 2), (9, None)))
    assert card["processes"] == [
        {"pid": 7, "used_bytes": 9}, {"pid": 8, "used_bytes": 2}, {"pid": 9, "used_bytes": None}
    ]


def test_a_process_list_that_is_refused_is_empty() -> None:
    card = one_card(refuses=("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"))
    assert card["processes"] == []


def test_a_lost_card_is_left_out_and_the_others_are_read() -> None:
    assert [card["index"] for card in Nvml(RecordedNvml(count=3, lost=(1,))).read()] == [0, 2]


def test_each_of_two_cards_is_told_with_its_own_figures_and_processes() -> None:
    """A tensor-parallel engine on both, a neighbour on the second one."""
    second = {
        "nvmlDeviceGetUUID": "GPU-07b6a4ff-70e3-4eb3-b6b3-c6b0c3c5d2e1",
        "nvmlDeviceGetMemoryInfo_v2": SimpleNamespace(used=90 * GIB, total=150_754_820_096),
        "nvmlDeviceGetPciInfo": SimpleNamespace(domain=0, bus=0x9A, device=0),
        "nvmlDeviceGetComputeRunningProcesses": rows(((502, 40 * GIB), (777, 49 * GIB))),
    }
    first_card, second_card = Nvml(RecordedNvml(count=2, compute=((501, 2 * GIB),), by_card={1: second})).read()
    assert [row["pid"] for row in first_card["processes"]] == [501]
    assert second_card["processes"] == [{"pid": 502, "used_bytes": 40 * GIB}, {"pid": 777, "used_bytes": 49 * GIB}]
    assert [(card["index"], card["used_bytes"], card["bus_id"]) for card in (first_card, second_card)] == [
        (0, 2_701_000_704, "0000:00:06"), (1, 90 * GIB, "0000:9a:00")]
    assert first_card["uuid"] != second_card["uuid"]


def test_a_card_in_mig_mode_tells_its_memory_and_whose_it_is_but_not_how_much_each_holds() -> None:
    """Utilization and the memory of one process belong to the instances; the card beside it tells both."""
    mig = {
        "nvmlDeviceGetUtilizationRates": NVMLError("Not Supported"),
        "nvmlDeviceGetComputeRunningProcesses": rows(((501, None), (502, None))),
    }
    partitioned, whole = Nvml(RecordedNvml(count=2, by_card={0: mig})).read()
    assert (partitioned["utilization"], partitioned["used_bytes"]) == (None, 2_701_000_704)
    assert partitioned["processes"] == [{"pid": 501, "used_bytes": None}, {"pid": 502, "used_bytes": None}]
    assert (whole["utilization"], whole["processes"]) == (0, [{"pid": 425, "used_bytes": 2_690_646_016}])


def test_a_driver_that_lost_every_card_says_which_and_why() -> None:
    with pytest.raises(NoGpuError, match="GPU 1: GPU is lost"):
        Nvml(RecordedNvml(count=2, lost=(0, 1))).read()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"library": False}, "no NVIDIA driver"),
        ({"refuses": ("nvmlInit",)}, "no NVIDIA driver: Not Supported"),
        ({"count": 0}, "the NVIDIA driver lists no GPU"),
    ],
)
def test_a_host_without_gpus_says_so(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(NoGpuError) as error:
        Nvml(RecordedNvml(**changes))
    assert str(error.value) == why


def test_each_request_is_answered_under_its_number_until_nothing_can_be_read() -> None:
    class Once:
        def __init__(self) -> None:
            self.left = 2

        def read(self) -> list[dict[str, Any]]:
            self.left -= 1
            if not self.left:
                raise NoGpuError("gone")
            return []

    out = io.StringIO()
    serve(io.StringIO("4\n9\n11\n"), out, Once)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"seq": 4, "gpus": []}, {"seq": 9, "unknown": "gone"}
    ]


# -- the helper as a process

@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLM_WATCHDOG_SIM_GPU", str(tmp_path))
    (tmp_path / "gpu.json").write_text(json.dumps({"total_bytes": 80 * GIB}))
    return tmp_path


def hold(cards: Path, pid: int, used: int, index: int = 0) -> None:
    (cards / f"{pid}.json").write_text(json.dumps({"pid": pid, "gpu": index, "used_bytes": used}))


def test_the_helper_ends_with_its_standard_input(cards: Path) -> None:
    helper = gpu.Helper()
    assert helper.ask(20) is not None
    assert Path(f"/proc/{helper.pid}/comm").read_text() == "watchdog-gpu\n"
    assert helper._process.stdin
    helper._process.stdin.close()
    helper.wait(5)
    assert helper.gone()


def test_the_helper_that_loses_its_reader_ends_quietly(cards: Path) -> None:
    with subprocess.Popen(
        gpu.HELPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.close()
        assert process.stdin
        process.stdin.write(b"1\n")
        process.stdin.close()
        assert process.stderr
        assert process.stderr.read() == b""


def test_the_helper_stays_small(cards: Path) -> None:
    """Bare Python has 9 MB; pynvml would add 6."""
    helper = gpu.Helper()
    assert helper.ask(20) is not None
    rss = int(Path(f"/proc/{helper.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    helper.condemn()
    helper.wait(5)
    helper.gone()
    assert rss < 16 << 20


class Desk:
    """A GpuSense, its clock, and what it posted."""

    def __init__(self, silence_s: float = 0.3) -> None:
        self.offset = 0.0
        self.events: queue.Queue[Any] = queue.Queue()
        self.sense = gpu.GpuSense(self.events.put, lambda: time.monotonic() + self.offset, "test", silence_s)
        self.sense.start()

    def sample(self) -> tuple[Gpu, ...] | Unknown:
        self.sense.wake(asked=True)
        event = self.events.get(timeout=25)
        assert isinstance(event, GpusSampled)
        return event.gpus

    def sampled(self) -> tuple[Gpu, ...]:
        """The first good sample: a helper that died may take a turn to be gone."""
        until = time.monotonic() + 10
        while isinstance(reading := self.sample(), Unknown):
            assert time.monotonic() < until, reading
        return reading

    @property
    def pid(self) -> int:
        assert self.sense._helper
        return self.sense._helper.pid


@pytest.fixture
def desk() -> Iterator[Desk]:
    one = Desk()
    yield one
    one.sense.stop(6)
    assert not one.sense._thread.is_alive()
    assert one.sense._helper is None or one.sense._helper._process.returncode is not None


def test_cards_and_their_holders_are_told(desk: Desk, cards: Path) -> None:
    hold(cards, os.getpid(), 7 * GIB)
    hold(cards, 2**22 + 1, 5 * GIB)     # no such process: it left its file behind
    holder = Holder(os.getpid(), proc.title(os.getpid()))
    assert desk.sample() == (
        Gpu(0, "SIM-0", "simulated GPU", 7 * GIB, 80 * GIB, processes=(GpuProcess(holder, 7 * GIB),)),
    )


def test_a_holder_of_ours_carries_its_mark(desk: Desk, cards: Path) -> None:
    child = subprocess.Popen(["sleep", "60"], env={proc.MARK_ENV: "test:primary:4", "PATH": os.environ["PATH"]})
    try:
        hold(cards, child.pid, GIB)
        reading = desk.sample()
        assert isinstance(reading, tuple)
        assert [row.holder for row in reading[0].processes] == [Holder(child.pid, "sleep", Mark("primary", 4))]
    finally:
        child.kill()
        child.wait()


def test_a_process_of_another_namespace_keeps_its_pid(desk: Desk) -> None:
    assert desk.sense._holders.of(2**22 + 1) == Holder(2**22 + 1, "")


def test_a_stopped_helper_is_killed_and_the_silence_told(desk: Desk, cards: Path) -> None:
    desk.sampled()
    os.kill(desk.pid, signal.SIGSTOP)
    reading = desk.sample()
    assert isinstance(reading, Unknown)
    assert re.fullmatch(r"GPU driver unresponsive: no sample for \d s", reading.why)
    assert desk.sampled()       # SIGKILL ends a stopped process: the next one answers


def test_a_helper_that_survives_its_kill_is_neither_waited_for_nor_doubled(
    desk: Desk, cards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D state can't be made here: the kill is withheld instead."""
    desk.sampled()
    helper = desk.sense._helper
    assert helper
    monkeypatch.setattr(helper._process, "kill", lambda: None)
    os.kill(helper.pid, signal.SIGSTOP)
    since = desk.sense._seen_at
    for later in (0, 100):
        desk.offset += later
        began = time.monotonic()
        reading = desk.sample()
        assert isinstance(reading, Unknown)
        assert reading.since == since
        assert reading.why == f"GPU driver unresponsive: no sample for {desk.sense._clock() - since:.0f} s"
        assert time.monotonic() - began < 1
        assert desk.sense._helper is helper
    os.kill(helper.pid, signal.SIGKILL)
    helper.wait(5)
    assert desk.sampled()
    assert desk.pid != helper.pid


def test_a_late_answer_is_not_taken_for_the_new_one(cards: Path) -> None:
    helper = gpu.Helper()
    assert helper.ask(20) is not None
    os.kill(helper.pid, signal.SIGSTOP)
    assert helper.ask(0.01) is None     # request 2
    hold(cards, os.getpid(), 3 * GIB)
    os.kill(helper.pid, signal.SIGCONT)
    answer = helper.ask(20)
    assert answer
    assert answer["seq"] == 3
    helper.condemn()
    helper.wait(5)
    assert helper.gone()


def test_a_helper_that_dies_is_replaced_after_a_backoff_that_doubles(desk: Desk, cards: Path) -> None:
    desk.sampled()
    for failures in (1, 2, 3):
        os.kill(desk.pid, signal.SIGKILL)
        reading = desk.sample()
        assert isinstance(reading, Unknown)
        assert reading.why == "the GPU helper died"
        assert desk.sense._retry_at - desk.sense._clock() == pytest.approx(2.0 ** (failures - 1), abs=0.5)
        assert desk.sense._helper
        desk.sense._helper.wait(5)
        assert isinstance(desk.sample(), Unknown)       # not before its time
        assert desk.sense._helper is None
        desk.sense._helper = gpu.Helper()               # ... and one that dies again before it answered
    desk.offset += 60
    assert desk.sampled()
    assert desk.sense._failures == 0


def test_a_host_without_a_driver_is_told_once_and_looked_at_again_rarely(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLM_WATCHDOG_SIM_GPU", raising=False)
    answer = "input(); print('{\"seq\": 1, \"unknown\": \"no NVIDIA driver\"}')"
    monkeypatch.setattr(gpu, "HELPER", (sys.executable, "-c", answer))
    first = desk.sample()
    assert isinstance(first, Unknown)
    assert first.why == "no NVIDIA driver"
    helper = desk.sense._helper
    assert helper
    helper.wait(5)
    desk.sense.wake()                       # not told again ...
    assert desk.sample() == first           # ... unless somebody asks
    assert desk.events.empty()
    assert desk.sense._helper is None       # and nothing runs meanwhile
    desk.offset += 61
    desk.sense.wake()
    event = desk.events.get(timeout=20)
    assert event.gpus.why == "no NVIDIA driver"
    assert desk.sense._helper


def test_a_helper_that_can_not_be_started_is_a_reading(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "HELPER", ("/nonexistent",))
    reading = desk.sample()
    assert isinstance(reading, Unknown)
    assert reading.why == "the GPU helper can't be started: No such file or directory"


def test_simulated_cards_are_counted_by_the_file_or_by_their_users(cards: Path) -> None:
    hold(cards, os.getpid(), GIB, index=2)
    assert [card["used_bytes"] for card in gpu_helper.source().read()] == [0, 0, GIB]
    (cards / "gpu.json").write_text(json.dumps({"total_bytes": GIB, "count": 4}))
    assert [card["total_bytes"] for card in gpu_helper.source().read()] == [GIB] * 4
    shutil.rmtree(cards)
    assert [card["used_bytes"] for card in gpu_helper.source().read()] == [0]


def test_a_sense_that_was_never_started_can_be_stopped() -> None:
    gpu.GpuSense(print, time.monotonic, "test", 1).stop(1)

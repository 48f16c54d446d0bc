from __future__ import annotations

import pytest

from vllm_watchdog.core import kernel
from vllm_watchdog.core.details import Details
from vllm_watchdog.core.kernel import KernelLog


@pytest.mark.parametrize(
    ("xid", "class_"),
    [
        (31, "xid_app"),
        (94, "xid_app"),
        (79, "xid_node"),
        (160, "xid_node"),
        (95, "xid_reset"),
        (119, "xid_reset"),
        (48, "xid_reset"),
        (63, ""),
        (45, ""),
        (43, ""),
        (74, "xid_other"),
        (150, "xid_other"),
        (999, "xid_other"),
    ],
)
def test_an_xid_has_nvidias_action(xid: int, class_: str) -> None:
    assert KernelLog().read(f"NVRM: Xid (PCI:0000:3b:00): {xid}, pid=7, name=VLLM::EngineCor, x")[0] == class_


def test_no_xid_has_two_actions() -> None:
    sets = (kernel._APP, kernel._IGNORE, kernel._RESET, kernel._NODE)
    assert sum(map(len, sets)) == len(kernel.XID_CLASS)
    assert 154 not in kernel.XID_CLASS  # the driver's own verdict


def test_an_application_error_of_another_program_is_not_ours() -> None:
    assert KernelLog().read("NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=Xorg, x")[0] == ""
    assert KernelLog().read("NVRM: Xid (PCI:0000:3b:00): 31, pid='<unknown>', name=<unknown>, x")[0] == "xid_app"
    assert KernelLog().read("NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=Xorg, x")[0] == "xid_node"


@pytest.mark.parametrize(
    ("action", "class_"),
    [("0", ""), ("1", "xid_reset"), ("2", "xid_node"), ("3", "xid_other"), ("4", "xid_reset"), ("9", "xid_other")],
)
def test_the_drivers_own_verdict_is_taken(action: str, class_: str) -> None:
    found, facts = KernelLog().read(
        f"NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x{action} (X)"
    )
    assert (found, dict(facts)["recovery_action"]) == (class_, int(action))


def test_an_xid_154_without_a_verdict_is_only_told() -> None:
    assert KernelLog().read("NVRM: Xid (PCI:0000:3b:00): 154, something") == (
        "xid_other",
        (("xid", 154), ("pci", "0000:3b:00")),
    )


def test_the_facts_name_gpu_and_process() -> None:
    facts: Details = (("xid", 31), ("pci", "0000:3b:00"), ("pid", 3312), ("name", "VLLM::EngineCor"))
    assert KernelLog().read("NVRM: Xid (PCI:0000:3b:00): 31, pid=3312, name=VLLM::EngineCor, Ch 8")[1] == facts


def test_a_gpu_off_the_bus_is_named_even_over_three_lines() -> None:
    log = KernelLog()
    assert log.read("NVRM: The NVIDIA GPU 0000:b3:00.0") == ("", ())
    assert log.read("NVRM: (PCI ID: 10de:26b5) installed in this system has") == ("", ())
    assert log.read("NVRM: fallen off the bus and is not responding to commands.") == (
        "xid_node",
        (("pci", "0000:b3:00.0"),),
    )
    assert log.read("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.") == ("xid_node", (("pci", "0000:18:00.0"),))


@pytest.mark.parametrize(
    ("message", "class_"),
    [
        ("Out of memory: Killed process 7 (VLLM::Worker_TP) total-vm:1kB, anon-rss:2kB", "host_oom_kill"),
        ("Out of memory: Killed process 7 (vllm)", "host_oom_kill"),
        ("Out of memory: Killed process 7 (python3) total-vm:165000048kB, anon-rss:2kB", "host_oom_kill"),
        ("Out of memory: Killed process 7 (python3) total-vm:900000kB, anon-rss:2kB", ""),
        ("Memory cgroup out of memory: Killed process 7 (postgres) total-vm:165000048kB", ""),
        ("oom-kill:constraint=CONSTRAINT_NONE,global_oom,task_memcg=/x,task=VLLM::EngineCor,pid=7,uid=0", "host_oom_kill"),
        ("oom-kill:constraint=CONSTRAINT_NONE,global_oom,task_memcg=/x,task=postgres,pid=7,uid=0", ""),
        ("postgres invoked oom-killer", ""),
    ],
)
def test_a_victim_is_ours_by_name_or_by_its_cuda_address_space(message: str, class_: str) -> None:
    assert KernelLog().read(message)[0] == class_


def test_a_victim_in_our_cgroup_is_ours() -> None:
    log = KernelLog()
    log.read("oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/system.slice/vllm.service,task=python3,pid=7,uid=0")
    assert log.read("Memory cgroup out of memory: Killed process 7 (python3) total-vm:1kB, anon-rss:2kB") == (
        "host_oom_kill",
        (("pid", 7), ("name", "python3"), ("rss_bytes", 2048)),
    )


APP = "8 11 13 25 31 32 39 40 41 60 68 69 70 71 72 75 76 77 80 82 83 84 85 86 88 89 94 96 97 98 99 100 101 102 103 104 105 126 127 128"  # noqa: E501
IGNORED = "14 37 38 43 44 45 63 66 67 92 93 106 107 121 137 141 152 153 157 161"
RESET = "46 48 62 64 95 109 110 119 120 136 140 143 155 156 158 162"


@pytest.mark.parametrize(
    ("numbers", "class_"),
    [(APP + " 129 130 131 132 133 134 135 139", "xid_app"), (IGNORED, ""), (RESET, "xid_reset"), ("79 160", "xid_node")],
)
def test_the_table_is_nvidias(numbers: str, class_: str) -> None:
    assert {xid for xid, found in kernel.XID_CLASS.items() if found == class_} == set(map(int, numbers.split()))


def test_old_kernels_announce_the_kill() -> None:
    line = "Memory cgroup out of memory: Kill process 4455 (VLLM::EngineCor) score 1000 or sacrifice child"
    assert KernelLog().read(line) == ("host_oom_kill", (("pid", 4455), ("name", "VLLM::EngineCor")))

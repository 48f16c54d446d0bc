"""What the kernel log says about us: NVIDIA Xids, GPUs off the bus, victims of the OOM killer.

Pure.  The immediate actions follow NVIDIA's Xid catalogue.  A line about another program is no failure of ours; the
daemon, which knows its PIDs, filters further by `pid`, `name` and `pci` in the details.
"""

from __future__ import annotations

import re

from vllm_watchdog.core.details import Details, size

KERNEL_NEEDLES = ("NVRM: ", "ut of memory: Kill", "oom-kill:constraint=")


def _numbers(text: str) -> frozenset[int]:
    spans = (part.partition("-") for part in text.split())
    return frozenset(n for first, _, last in spans for n in range(int(first), int(last or first) + 1))


_APP = _numbers("8 11 13 25 31 32 39-41 60 68-72 75-77 80 82-86 88 89 94 96-105 126-135 139")
_IGNORE = _numbers(
    "14 37 38 43-45 63 66 67 92 93 106 107 121 137 141 152 153 157 161"
)  # 45 echoes another Xid or an exit
_RESET = _numbers("46 48 62 64 95 109 110 119 120 136 140 143 155 156 158 162")  # 48: uncorrectable double-bit error
_NODE = _numbers("79 160")
XID_CLASS: dict[int, str] = (
    dict.fromkeys(_APP, "xid_app")
    | dict.fromkeys(_RESET, "xid_reset")
    | dict.fromkeys(_NODE, "xid_node")
    | dict.fromkeys(_IGNORE, "")
)
# Xid 154 states the driver's own verdict, which overrides the table.
RECOVERY_ACTION = {0: "", 1: "xid_reset", 2: "xid_node", 3: "xid_other", 4: "xid_reset"}

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9A-Fa-f:.]+)[^)]*\): (?P<xid>\d+)\b,?(?P<rest>.*)", re.DOTALL)
_RECOVERY = re.compile(r"GPU recovery action changed from 0x[0-9a-fA-F]+ \([^)]*\) to 0x(?P<action>[0-9a-fA-F]+)")
_OWNER = re.compile(r"pid='?(?P<pid>\d+)'?")
_NAME = re.compile(r"name='?(?P<name>[^,'\s]+)")
_OFF_THE_BUS = re.compile(r"NVRM: .{0,200}?fallen off the bus", re.DOTALL)
_GPU = re.compile(r"NVRM: .{0,80}?(?P<pci>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.\d)?)")
_KILLED = re.compile(
    r"(?:Memory cgroup o|O)ut of memory: Kill(?:ed)? process (?P<pid>\d+) \((?P<name>[^)]*)\)(?:,? total-vm:(?P<vm>\d+)kB)?"
    r"(?:, anon-rss:(?P<rss>\d+)kB)?"
)
_OOM_KILL = re.compile(
    r"oom-kill:constraint=.{0,300}?task_memcg=(?P<memcg>[^,]*),task=(?P<name>[^,]*),pid=(?P<pid>\d+)"
)

_OURS = re.compile(r"VLLM::|vllm|pt_main_thread|ray::")
_PYTHON = re.compile(r"python[\d.]*$")
_CUDA_PROCESS_KIB = 32 * 2**20  # CUDA maps tens of GiB of address space; a script that uses no GPU does not


class KernelLog:
    """Reads kernel messages one by one; remembers only the GPU and the cgroup that the line before named."""

    def __init__(self) -> None:
        self._pci = ""
        self._memcg: tuple[int, str] = (0, "")

    def read(self, message: str) -> tuple[str, Details]:
        """Class and facts of one message; the class is "" where nothing is wrong.

        A driver's verdict (Xid 154) is told by a `recovery_action` in the facts.
        """
        if match := _XID.match(message):
            return self._xid(match)
        if _OFF_THE_BUS.match(message):
            pci = match["pci"] if (match := _GPU.match(message)) else self._pci
            return "xid_node", (("pci", pci),)
        if match := _GPU.match(message):
            self._pci = match["pci"]
        elif match := _OOM_KILL.match(message):
            self._memcg = (int(match["pid"]), match["memcg"])
            named = _OURS.match(match["name"])
            return ("host_oom_kill", (("pid", int(match["pid"])), ("name", match["name"]))) if named else ("", ())
        elif match := _KILLED.match(message):
            return self._killed(match)
        return "", ()

    def _xid(self, match: re.Match[str]) -> tuple[str, Details]:
        xid, rest = int(match["xid"]), match["rest"]
        self._pci = match["pci"]
        owner, named = _OWNER.search(rest), _NAME.search(rest)
        name = named["name"] if named else ""
        facts: Details = (("xid", xid), ("pci", match["pci"]))
        facts += (("pid", int(owner["pid"])),) if owner else ()
        facts += (("name", name),) if name else ()
        if xid == 154 and (verdict := _RECOVERY.search(rest)):
            action = int(verdict["action"], 16)
            return RECOVERY_ACTION.get(action, "xid_other"), (*facts, ("recovery_action", action))
        class_ = XID_CLASS.get(xid, "xid_other")
        stranger = name and not (name.startswith("<") or _OURS.match(name) or _PYTHON.match(name))
        return ("" if class_ == "xid_app" and stranger else class_), facts

    def _killed(self, match: re.Match[str]) -> tuple[str, Details]:
        pid, name = int(match["pid"]), match["name"]
        facts: Details = (("pid", pid), ("name", name))
        facts += (("rss_bytes", size(match["rss"], "kB")),) if match["rss"] else ()
        in_our_cgroup = self._memcg[0] == pid and "vllm" in self._memcg[1]
        large = int(match["vm"] or 0) >= _CUDA_PROCESS_KIB
        ours = _OURS.match(name) or (_PYTHON.match(name) and (large or in_our_cgroup))
        return ("host_oom_kill" if ours else ""), facts

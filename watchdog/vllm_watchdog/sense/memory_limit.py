"""The memory limit that we and our engines run under: of the cgroup (v2, or v1's memory controller) and its parents.

What is left is the limit less what is used, without the page cache that the kernel gives back first.  Reads small files
of `/sys/fs/cgroup`; a level without a limit costs one.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60     # v1 writes a number near 2**63 where there is no limit
FILES = {"": ("memory.max", "memory.current", "inactive_file"),     # v2
         "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}


def memory(root: Path = ROOT, membership: Path = Path("/proc/self/cgroup")) -> tuple[int, int] | None:
    """Bytes of the tightest limit, and bytes left of it.  None: no limit, or nobody tells."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found: list[tuple[int, int]] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        controller = "" if number == "0" else "memory" if "memory" in controllers.split(",") else None
        if controller is not None:
            found += _levels(root / controller, path, *FILES[controller])
    return min(found, key=lambda level: level[1], default=None)


def _levels(mount: Path, path: str, limit: str, used: str, cache: str) -> list[tuple[int, int]]:
    """From our own cgroup up to the root, which in a container is the container's; a path of the host is not there."""
    folder = mount / path.lstrip("/")
    levels = []
    for level in (folder, *folder.parents):
        if (seen := _level(level, limit, used, cache)) is not None:
            levels.append(seen)
        if level == mount:
            break
    return levels


def _level(folder: Path, limit: str, used: str, cache: str) -> tuple[int, int] | None:
    try:
        total = int((folder / limit).read_text())       # "max" where there is none
        if total >= UNLIMITED:
            return None
        now = int((folder / used).read_text())
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        return total, max(0, total - now + int(stat.get(cache, 0)))
    except (OSError, ValueError):
        return None

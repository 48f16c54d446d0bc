"""GPUs by UUID, as the driver lists them in /proc: so that a configuration can name a card that keeps its name.

An index is a place in the order of PCI addresses, and that moves when a card is added or fails to come up.  Reads a small
file a card, once a configuration, and asks no driver call that could hang.
"""

from __future__ import annotations

import re
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")       # a folder a card, named by its PCI address: NVML counts in the same order


def index_of(uuid: str) -> int:
    """The index of a card.  Raises ValueError that says what was expected."""
    known = _known()
    if uuid in known:
        return known.index(uuid)
    expected = ", ".join(known[:8]) or f"an index, since {DRIVER} lists no card"
    raise ValueError(f"no card here has the UUID {uuid:.60}, expected {expected}")


def _known() -> list[str]:
    """UUIDs in the order of the cards' addresses; empty for one that does not tell."""
    return [_uuid(information) for information in sorted(DRIVER.glob("*/information"))]


def _uuid(information: Path) -> str:
    try:
        found = re.search(r"^GPU UUID:\s*(GPU-[0-9a-f-]{36})$", information.read_text("utf-8", "replace"), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""

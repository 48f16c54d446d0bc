"""The folders of evidence: where a bundle goes, how its files are written, and which old ones leave.

Owner-only.  Blocks on the disk alone.  Removes nothing but folders that are named like an incident, the oldest first,
and never one that is being written.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

INCIDENT = re.compile(r"\d{8}T\d{6}Z-[\w.-]+")
DUMP = re.compile(r"dump-(\d+)")
MOST_DUMPS = 20  # of one incident; by then the earlier ones say it all
MOST_BYTES = 4 << 20  # of one file


def open_folder(incidents: Path, incident: str, parts: frozenset[str], taken: bool = False) -> Path:
    """Makes the folder of a new bundle: the incident's own, and `dump-2`, `dump-3` … in it for later ones.

    `taken`: another bundle is being written into the incident's own.  Raises OSError, and ValueError for an incident
    that can't name a folder.
    """
    if not INCIDENT.fullmatch(incident):
        raise ValueError(f"not an incident's name: {incident!r}")
    incidents.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = incidents / incident
    folder.mkdir(mode=0o700, exist_ok=True)
    names = {entry.name for entry in folder.iterdir()}
    numbers = [int(found[1]) for name in names if (found := DUMP.fullmatch(name))]
    if not (taken or numbers or names & parts):
        return folder
    number = max(numbers, default=1) + 1
    if number > MOST_DUMPS:
        raise OSError(f"{MOST_DUMPS} bundles of this incident are kept already")
    later = folder / f"dump-{number}"
    later.mkdir(mode=0o700)
    return later


def write(folder: Path, name: str, text: str) -> None:
    """One file of a bundle; of a text that is too long the end is kept.  Raises OSError."""
    data = text.encode(errors="replace")[-MOST_BYTES:]
    fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def prune(incidents: Path, count: int, total_bytes: int, keep: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Removes the oldest incidents over the limits; the names of those removed.  Raises OSError."""
    if not incidents.is_dir():
        return ()
    names = sorted(entry.name for entry in incidents.iterdir() if INCIDENT.fullmatch(entry.name))
    sizes = {name: _size(incidents / name) for name in names}
    removed = []
    for name in names:
        if len(sizes) <= count and sum(sizes.values()) <= total_bytes:
            break
        if name not in keep:
            shutil.rmtree(incidents / name)
            del sizes[name]
            removed.append(name)
    return tuple(removed)


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))

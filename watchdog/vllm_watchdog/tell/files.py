"""What every file of this room has in common: owner-only, replaced whole, set aside when it cannot be read.

Blocks for as long as the disk does, so it is called by the writers' own threads, and at start; never by the loop.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from vllm_watchdog.core.units import stamp
from vllm_watchdog.say import Say

owner_dir, owner_file = 0o700, 0o600


def owner_only_folder(path: Path) -> None:
    """Makes the folder if it is missing (0700).  Raises OSError."""
    path.mkdir(mode=owner_dir, parents=True, exist_ok=True)


def open_owner_only(path: Path, flags: int) -> int:
    """A descriptor of a file that, if this call makes it, only its owner may read.  Raises OSError."""
    owner_only_folder(path.parent)
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, owner_file)


def replace_whole(path: Path, data: bytes) -> None:
    """The file is the old one or the new one, also after a power cut; never half of either.  Raises OSError."""
    draft = path.with_name(path.name + ".new")
    descriptor = open_owner_only(draft, os.O_WRONLY | os.O_TRUNC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)            # without it the rename itself may be lost
    finally:
        os.close(folder)


def set_aside(path: Path, wall: float, why: str, say: Say) -> Path:
    """Renames an unreadable file to NAME.corrupt-TIME, for a human to look at, and says so.  Raises OSError."""
    aside = path.with_name(f"{path.name}.corrupt-{stamp(wall)}")
    path.replace(aside)
    for suffix in ("-wal", "-shm"):     # of SQLite: a new database must not take the old one's log for its own
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).replace(aside.with_name(aside.name + suffix))
    say("file.set_aside", file=str(path), aside=str(aside), why=why[:200])
    return aside

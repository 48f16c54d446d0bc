"""A file that others append to: read on in blocks, through truncation, replacement and our own rotation.

The engine keeps its descriptor for life, so a rotation by renaming would leave it writing into the old file: here the
text is copied and the file truncated, and whatever was not yet read is read from the copy.  Between the last look at
the length and the truncation lie microseconds in which a line could be lost; O_APPEND lets the writer go on at 0.
For one thread.  Blocks for local file operations only; a copy of 64 MiB takes some 50 ms.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

BLOCK = 256 * 1024      # bytes a read: what sense.scan was measured fastest with


class LogFile:
    """`offset`: bytes of the file that were read.  A file that does not exist yet is empty, as is one that can't be read:
    `trouble` says why, in one clause."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.trouble = ""
        self._fd: int | None = None
        self._copy: int | None = None               # descriptor of a rotated copy that is not read to its end

    @property
    def inode(self) -> int:
        """0 where there is no file."""
        return os.fstat(self._fd).st_ino if self._opened() and self._fd is not None else 0

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size if self._opened() and self._fd is not None else 0

    @property
    def rotating(self) -> bool:
        """The offset is one in a rotated copy."""
        return self._copy is not None

    def read(self, most: int = BLOCK) -> bytes:
        """The next block, of at most so many bytes; empty at the end of what there is now."""
        if self._copy is not None and (block := self._read_copy(self._copy)):
            return block
        if not self._opened() or self._fd is None:
            return b""
        block = self._block(self._fd, most)
        if not block and self._renewed():
            block = self._block(self._fd, most)
        self.offset += len(block)
        return block

    def _block(self, fd: int, most: int = BLOCK) -> bytes:
        try:
            return os.pread(fd, min(most, BLOCK), self.offset)
        except OSError as error:
            self.trouble = error.strerror or type(error).__name__
            return b""

    def tail(self, since: int, most: int) -> bytes:
        """The last `most` bytes, none before `since`, of the file that is there now."""
        if not self._opened() or self._fd is None:
            return b""
        start = since if since <= self.size else 0      # it was cut short
        try:
            return os.pread(self._fd, most, max(start, self.size - most))
        except OSError as error:
            self.trouble = error.strerror or type(error).__name__
            return b""

    def skip_to_end(self) -> None:
        self._drop_copy()
        self.offset = self.size

    def rotate(self, keep: int) -> None:
        """Copy to `NAME.1`, the older ones one number up, at most `keep` of them; truncate.

        What the engine writes in the instant between the end of the copy and the truncation is lost.

        Raises OSError (a full disk) and has changed nothing then.  Not while an earlier copy is still being read.
        """
        if self.rotating or not self._opened() or self._fd is None:
            return
        fresh = self.path.with_name(f".{self.path.name}.copy")
        copy = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            length = 0
            while sent := os.sendfile(copy, self._fd, length, 64 << 20):
                length += sent
            os.ftruncate(self._fd, 0)
        except OSError:
            os.close(copy)
            fresh.unlink()
            raise
        for number in range(keep - 1, 0, -1):
            with suppress(FileNotFoundError):
                self._numbered(number).rename(self._numbered(number + 1))
        fresh.rename(self._numbered(1))
        self._copy = copy

    def close(self) -> None:
        self._drop_copy()
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def _opened(self) -> bool:
        if self._fd is None:
            try:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                self.trouble = ""
            except OSError as error:
                self.trouble = error.strerror or type(error).__name__
            else:
                self.trouble = ""
        return self._fd is not None

    def _renewed(self) -> bool:
        """At the end: was the file cut short, or has another one with text in it taken its name?  Then begin there."""
        if self.size < self.offset:
            self.offset = 0
            return True
        with suppress(OSError):
            there = self.path.stat()
            if there.st_ino != self.inode and there.st_size:
                self.close()
                self.offset = 0
                return self._opened()
        return False

    def _read_copy(self, copy: int) -> bytes:
        if block := self._block(copy):
            self.offset += len(block)
            return block
        self._drop_copy()
        self.offset = 0
        return b""

    def _drop_copy(self) -> None:
        if self._copy is not None:
            os.close(self._copy)
        self._copy = None

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

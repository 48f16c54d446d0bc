"""A file in which no daemon begins proves nothing, so it is no journal that replays."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.system.harness import command


@pytest.mark.parametrize("text", ["", '{"model": "m"}\n', '{"say": "journal.lost", "lines": 3}\n'])
def test_what_is_no_journal_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(text, "utf-8")
    said = command("replay", str(file))
    assert (said.code, said.out, said.err) == (2, "", f"{file}: no daemon begins in it, expected a journal\n")

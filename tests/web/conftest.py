from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.web.site import ID, Site, story


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    folder = tmp_path / ID
    folder.mkdir()
    (folder / "README.md").write_text("# what happened")
    (folder / "link.txt").symlink_to("/etc/hostname")
    (folder / "sub").mkdir()
    made = Site(tmp_path, story().document())
    yield made
    made.web.stop(5)
    assert not made.web._thread.is_alive()

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.systemd.box import Box, missing
from tests.systemd.service import Service


@pytest.fixture(scope="session")
def box() -> Iterator[Box]:
    """One machine for all tests; `LLM_WATCHDOG_REQUIRE_SYSTEMD=1`: it must be there."""
    if lacking := missing():
        if os.environ.get("LLM_WATCHDOG_REQUIRE_SYSTEMD"):
            raise AssertionError(lacking)
        pytest.skip(lacking)
    made = Box()
    yield made
    made.stop()


@pytest.fixture
def service(box: Box) -> Iterator[Service]:
    """Installed, not started; whatever a test did to it is undone, and nothing of it may be left."""
    made = Service(box)
    yield made
    made.finish()

"""How the tests run: in which order, and how Hypothesis searches.

Hypothesis tries the same examples at every run, so that a change is judged by what it changed.  `HYPOTHESIS_PROFILE=search`
looks for new ones instead.  A slow machine is no failure: no deadline for one example.

Python collects no garbage while pytest collects tests: nothing of those is garbage, and looking was a third of the time.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

# Workers take whole files in this order.  The long ones come first, so that no worker is left alone with one in the end.
LONG = ("adapters/test_crashes.py", "system/test_alerts.py", "core/test_walk.py", "core/test_world_machine.py",
        "adapters/test_sim.py", "system/", "gateway/", "adapters/", "web/", "")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = str(items[0].config.rootpath / "tests") if items else ""
    items.sort(key=lambda item: next(n for n, name in enumerate(LONG) if str(item.path).startswith(f"{root}/{name}")))

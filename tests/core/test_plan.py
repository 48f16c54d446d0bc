from __future__ import annotations

import pytest
from tests.core.scenes import plan


def test_an_engine_is_found_by_its_name() -> None:
    assert plan().engine("backup").port == 8101
    with pytest.raises(KeyError, match="nobody"):
        plan().engine("nobody")


def test_a_service_bears_its_primarys_name() -> None:
    assert plan().service_of("primary") == plan().service_of("backup") == "primary"
    with pytest.raises(KeyError):
        plan().service_of("nobody")

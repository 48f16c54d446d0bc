"""Cards by UUID, from a copy of what the driver's /proc shows on a host with two NVIDIA H200."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_watchdog import cards

FIRST, SECOND = "GPU-819b0977-af31-9acf-a464-856d4d11b130", "GPU-07b6a4ff-70e3-4eb3-b6b3-c6b0c3c5d2e1"
INFORMATION = """\
Model: \t\t NVIDIA H200
IRQ:   \t\t 33
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.99.00.15
Bus Type: \t PCIe
DMA Size: \t 52 bits
Bus Location: \t {bus}
Device Minor: \t {minor}
GPU Excluded:\t No
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The minor numbers do not follow the addresses: NVML's index does."""
    monkeypatch.setattr(cards, "DRIVER", tmp_path)
    for bus, uuid, minor in (("0000:9a:00.0", SECOND, 0), ("0000:18:00.0", FIRST, 1)):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(INFORMATION.format(uuid=uuid, bus=bus, minor=minor))
    return tmp_path


def test_a_uuid_is_the_index_of_its_place_in_the_order_of_addresses(driver: Path) -> None:
    assert [cards.index_of(uuid) for uuid in (FIRST, SECOND)] == [0, 1]


def test_an_unknown_uuid_is_answered_with_those_that_are_here(driver: Path) -> None:
    with pytest.raises(ValueError, match=f"no card here has the UUID GPU-0, expected {FIRST}, {SECOND}"):
        cards.index_of("GPU-0")


def test_a_card_that_does_not_tell_keeps_its_place(driver: Path) -> None:
    (driver / "0000:18:00.0" / "information").write_text("GPU UUID: \t GPU-????????-????-????-????-????????????\n")
    assert cards.index_of(SECOND) == 1


def test_a_host_that_lists_no_card_says_that_an_index_is_expected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cards, "DRIVER", tmp_path / "none")
    with pytest.raises(ValueError, match=r"expected an index, since \S+ lists no card"):
        cards.index_of(FIRST)

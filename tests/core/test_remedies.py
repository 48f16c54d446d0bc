from __future__ import annotations

from vllm_watchdog.core.kernel import XID_CLASS
from vllm_watchdog.core.remedies import KNOWN_FLAGS, REMOVED_FLAGS, XIDS


def test_no_flag_is_known_and_removed() -> None:
    assert not set(KNOWN_FLAGS) & set(REMOVED_FLAGS)
    assert all(flag == flag.lower() and "_" not in flag for flag in (*KNOWN_FLAGS, *REMOVED_FLAGS))


def test_every_xid_that_is_explained_is_one_that_is_told() -> None:
    assert all(XID_CLASS.get(xid, "xid_other") or xid == 45 for xid in XIDS)

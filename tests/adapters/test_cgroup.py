"""Control groups: folders in the kernel's place; the real ones are tried in tests/systemd."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_watchdog.cgroup import BOOT, LEAF, Group, Groups, NoGroupsError, claim
from vllm_watchdog.core.readings import Mark

ONE, TWO = Mark("primary", 1), Mark("backup-2", 12)


class Said:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, str]]] = []

    def __call__(self, name: str, /, **fields: str) -> None:
        self.lines.append((name, fields))


class Host:
    """What `/proc/self` and the mounted hierarchy say of this process; `of` puts it into a group."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.mount, self.said = folder / "proc", folder / "cgroup", Said()
        self.unit = self.mount / "llm.slice" / "llm-watchdog.service"
        self.unit.mkdir(parents=True)
        self.proc.mkdir()

    def of(self, group: Path, delegated: Path | None = None) -> Host:
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text(f"1\n{os.getpid()}\n")
        hidden = "30 20 0:26 / /somewhere/else rw - cgroup2 cgroup2 rw\n"
        (self.proc / "mountinfo").write_text(f"{hidden}31 20 0:26 / {self.mount} rw,nosuid - cgroup2 cgroup2 rw\n")
        (self.proc / "cgroup").write_text(f"4:memory:/elsewhere\n0::/{group.relative_to(self.mount)}\n")
        if delegated:
            os.setxattr(delegated, "user.delegate", b"1")
        return self

    def claim(self) -> Groups:
        return claim(self.said, self.proc)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(os, "geteuid", lambda: 0)       # root owns everything, so only systemd's word counts
    return Host(tmp_path)


def test_a_delegated_group_is_claimed_and_left_for_a_leaf(host: Host) -> None:
    (host.unit / "primary.7").mkdir()
    groups = host.of(host.unit, delegated=host.unit).claim()
    assert (groups.root, groups.memory) == (host.unit, False)
    assert not (host.unit / "primary.7").exists(), "what an earlier daemon left empty is swept"
    assert (host.unit / LEAF / "cgroup.procs").read_text() == "0", "0 is the one that writes"
    assert not (host.unit / "cgroup.subtree_control").exists(), "an old systemd could not start the next daemon"


def test_a_group_that_is_nobodys_gift_is_left_alone(host: Host) -> None:
    with pytest.raises(NoGroupsError, match=r"llm-watchdog.service is not delegated to us \(Delegate=yes\)"):
        host.of(host.unit).claim()
    assert not (host.unit / LEAF).exists()


def test_a_group_that_belongs_to_our_user_is_delegated_too(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.getuid() or 65534
    if os.getuid() == 0:
        os.chown(host.unit, real, real)
    monkeypatch.setattr(os, "geteuid", lambda: real)
    assert host.of(host.unit).claim().root == host.unit


def test_where_systemd_starts_us_below_controllers_are_turned_on(host: Host) -> None:
    groups = host.of(host.unit / BOOT, delegated=host.unit).claim()
    assert (groups.root, groups.memory) == (host.unit, True)
    assert (host.unit / LEAF / "cpu.weight").read_text() == "1000"
    assert int((host.unit / LEAF / "memory.low").read_text()) == 128 << 20
    assert (host.unit / LEAF / "cgroup.procs").read_text() == "0"


def test_without_controllers_nothing_is_counted(host: Host) -> None:
    host.of(host.unit / BOOT, delegated=host.unit)
    (host.unit / "cgroup.subtree_control").mkdir()      # as a kernel that refuses
    groups = host.claim()
    assert not groups.memory and not (host.unit / LEAF / "cpu.weight").exists()


def test_a_host_without_cgroup_v2_says_so(host: Host) -> None:
    (host.proc / "mountinfo").write_text("31 20 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
    (host.proc / "cgroup").write_text("4:memory:/elsewhere\n")
    with pytest.raises(NoGroupsError, match="this host has no cgroup v2"):
        host.claim()


def test_a_group_that_we_are_not_in_is_never_taken_for_ours(host: Host) -> None:
    host.of(host.unit, delegated=host.unit)
    (host.unit / "cgroup.procs").write_text("1\n")
    with pytest.raises(NoGroupsError, match="is not the control group of this process"):
        host.claim()


def test_a_leaf_that_cannot_be_made_is_told(host: Host) -> None:
    host.of(host.unit, delegated=host.unit)
    (host.unit / LEAF).write_text("")
    with pytest.raises(NoGroupsError, match="daemon: "):
        host.claim()


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    (tmp_path / LEAF).mkdir()
    (tmp_path / "no-number.x").mkdir()
    (tmp_path / "file.7").write_text("")
    return Groups(tmp_path, memory=True, say=Said())


def test_each_generation_has_a_group_and_a_limit_where_memory_is_counted(groups: Groups) -> None:
    group = groups.create(ONE, memory_max=5 << 30)
    assert group and group.path == groups.root / "primary.1" and groups.find(ONE) == group
    assert (group.path / "memory.max").read_text() == str(5 << 30)
    assert (group.path / "memory.oom.group").read_text() == "1"
    assert groups.find(TWO) is None
    other = Groups(groups.root, memory=False, say=Said()).create(TWO, memory_max=1)
    assert other and not (other.path / "memory.max").exists()


def test_a_group_that_cannot_be_made_is_said_and_does_without(groups: Groups) -> None:
    said = Said()
    assert Groups(groups.root / "gone", True, said).create(ONE) is None
    name, fields = said.lines[0]
    assert (name, fields["engine"]) == ("cgroup.failed", "primary#1") and "No such file" in fields["why"]


def test_who_lives_in_the_groups(groups: Groups) -> None:
    for mark, text in ((ONE, "7\n8\n"), (TWO, "9\n")):
        group = groups.create(mark)
        assert group
        (group.path / "cgroup.procs").write_text(text)
    assert groups.inhabitants() == {7: ONE, 8: ONE, 9: TWO}
    assert Groups(groups.root / "gone", True, Said()).inhabitants() == {}


def test_a_sweep_removes_what_is_empty_and_ours(groups: Groups) -> None:
    full, empty = groups.create(ONE), groups.create(TWO)
    assert full and empty
    (full.path / "cgroup.procs").write_text("7\n")
    groups.sweep()
    assert full.path.exists() and not empty.path.exists()
    assert (groups.root / LEAF).exists() and (groups.root / "no-number.x").exists()


def test_what_a_group_tells(tmp_path: Path) -> None:
    group = Group(tmp_path)
    assert (group.populated, group.memory_bytes, group.oom_kills) == (False, None, 0)
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    (tmp_path / "memory.current").write_text("4096\n")
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 31\noom 2\noom_kill 2\noom_group_kill 1\n")
    assert (group.populated, group.memory_bytes, group.oom_kills) == (True, 4096, 2)
    group.kill()
    assert (tmp_path / "cgroup.kill").read_text() == "1"
    Group(tmp_path / "gone").kill()


def test_nobody_of_another_pid_namespace_and_never_init_is_taken_for_an_inhabitant(groups: Groups) -> None:
    """0 is also the parent of init: who takes it for a number owns, and ends, the whole host."""
    group = groups.create(ONE)
    assert group
    (group.path / "cgroup.procs").write_text("0\n0\n1\n7\n")
    assert groups.inhabitants() == {7: ONE}

from __future__ import annotations

import io
from pathlib import Path

import pytest

from vllm_watchdog.app import install as module
from vllm_watchdog.app.install import FILES, UNIT_PROGRAM, Host, InstallError, install, uninstall
from vllm_watchdog.config import Settings

PROGRAM = Path("/srv/dog/bin/llm-watchdog")


@pytest.fixture(autouse=True)
def systemd(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host with this version of systemd, and a Python where services see it."""
    version = [252]
    monkeypatch.setattr(module, "_systemd", lambda: version[0])
    monkeypatch.setattr(module.sys, "executable", "/usr/bin/python3")
    return version


def on(root: Path, dry_run: bool = False) -> tuple[Host, io.StringIO]:
    out = io.StringIO()
    return Host(out, dry_run, root), out


def tree(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


def test_an_installation_is_units_user_folders_and_an_example(tmp_path: Path) -> None:
    host, out = on(tmp_path)
    install(host, PROGRAM)
    files = tree(tmp_path)
    assert set(files) == {file.target for file in FILES if not file.since}
    unit = files["usr/local/lib/systemd/system/llm-watchdog.service"]
    assert f"ExecStart={PROGRAM} run " in unit and UNIT_PROGRAM not in unit
    assert "ran systemctl daemon-reload" in out.getvalue()
    config = tmp_path / "etc/llm-watchdog/config.toml"
    assert config.stat().st_mode & 0o777 == 0o640


def test_the_configuration_names_the_folders_that_the_units_open(tmp_path: Path) -> None:
    install(on(tmp_path)[0], PROGRAM)
    text = (tmp_path / "etc/llm-watchdog/config.toml").read_text()
    assert '\nstate_dir = "/var/lib/llm-watchdog" ' in text and '\nlog_dir = "/var/log/llm-watchdog" ' in text
    assert set(Settings.model_fields["daemon"].annotation.model_fields) >= {"state_dir", "log_dir"}  # type: ignore[union-attr]


def test_a_second_installation_changes_nothing(tmp_path: Path) -> None:
    install(on(tmp_path)[0], PROGRAM)
    before = tree(tmp_path)
    host, out = on(tmp_path)
    install(host, PROGRAM)
    assert tree(tmp_path) == before and "wrote" not in out.getvalue()


def test_an_upgrade_replaces_units_and_keeps_the_configuration(tmp_path: Path) -> None:
    install(on(tmp_path)[0], PROGRAM)
    unit = tmp_path / "usr/local/lib/systemd/system/llm-gateway.service"
    config = tmp_path / "etc/llm-watchdog/config.toml"
    fresh = unit.read_text()
    unit.write_text("old")
    config.write_text("mine")
    host, out = on(tmp_path)
    install(host, PROGRAM)
    assert (unit.read_text(), config.read_text()) == (fresh, "mine")
    assert f"kept {config}: it is yours" in out.getvalue()


def test_a_newer_systemd_gets_the_drop_in_that_it_alone_knows(tmp_path: Path, systemd: list[int]) -> None:
    systemd[0] = 254
    install(on(tmp_path)[0], PROGRAM)
    drop_in = tmp_path / "usr/local/lib/systemd/system/llm-watchdog.service.d/50-subgroup.conf"
    assert "DelegateSubgroup=boot" in drop_in.read_text()
    uninstall(on(tmp_path)[0])
    assert not drop_in.parent.exists()


def test_a_dry_run_writes_nothing_and_says_everything(tmp_path: Path) -> None:
    host, out = on(tmp_path, dry_run=True)
    install(host, PROGRAM)
    assert not tree(tmp_path)
    said = out.getvalue()
    assert all(f"would write {tmp_path / file.target}" in said for file in FILES if not file.since)
    assert "would run systemctl daemon-reload" in said


def test_an_uninstallation_leaves_what_is_the_administrators(tmp_path: Path) -> None:
    install(on(tmp_path)[0], PROGRAM)
    host, out = on(tmp_path)
    uninstall(host)
    assert set(tree(tmp_path)) == {"etc/llm-watchdog/config.toml"}
    said = out.getvalue()
    assert said.index("ran systemctl disable --now llm-watchdog.service llm-gateway.service") < said.index("removed ")
    again, told = on(tmp_path)
    uninstall(again)
    assert "ran" not in told.getvalue()


def test_a_file_that_cannot_be_removed_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / FILES[0].target).mkdir(parents=True)
    with pytest.raises(InstallError, match=f"{FILES[0].target}: .*, expected to be root"):
        uninstall(on(tmp_path)[0])


@pytest.mark.parametrize("hidden", ["/root/venv/bin/llm-watchdog", "/home/me/bin/llm-watchdog", "/tmp/x/bin/llm-watchdog"])
def test_a_program_that_services_cannot_see_is_refused(tmp_path: Path, hidden: str) -> None:
    with pytest.raises(InstallError, match=f"{hidden}: services can't see it there; install into /opt/llm-watchdog"):
        install(on(tmp_path)[0], Path(hidden))
    assert not tree(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "usr").write_text("")
    with pytest.raises(InstallError, match="Not a directory, expected to be root"):
        install(on(tmp_path)[0], PROGRAM)


def test_a_command_that_fails_is_one_sentence(tmp_path: Path) -> None:
    host, _ = on(Path("/"))
    with pytest.raises(InstallError, match=r"^sh -c echo no >&2; exit 3: no$"):
        host.run("sh", "-c", "echo no >&2; exit 3")
    with pytest.raises(InstallError, match=r"^no-such-command: "):
        host.run("no-such-command")

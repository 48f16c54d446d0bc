"""`llm-watchdog install` and `uninstall`: the files and the user that make this a service of a systemd host.

Every step says what it does, and does nothing where that is done already; `dry_run` only says.  Units are ours and are
replaced (an administrator's changes belong into drop-ins); the configuration is theirs and is never touched.  Starts and
stops no engine: an upgrade is `install` and then `llm-watchdog handover`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import vllm_watchdog

PACKAGE = Path(vllm_watchdog.__file__).parent
UNIT_PROGRAM = "/opt/llm-watchdog/bin/llm-watchdog"     # as the units in the repository have it
LIB = "usr/local/lib"       # not /etc, which is the administrator's: a unit there could not be masked
UNITS = ("llm-watchdog.service", "llm-gateway.service", "llm.slice")
SUBGROUP_SINCE = 254        # DelegateSubgroup=
COMMAND_S = 60.0
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")     # noqa: S108 - where no unit of ours looks, or not for long


class InstallError(Exception):
    """One sentence for people."""


@dataclass(frozen=True, slots=True)
class File:
    source: str
    target: str         # below the root
    ours: bool = True   # replaced by an upgrade
    mode: int = 0o644
    since: int = 0      # the oldest systemd that knows what is in it


FILES = (
    *(File(name, f"{LIB}/systemd/system/{name}") for name in UNITS),
    File("50-subgroup.conf", f"{LIB}/systemd/system/llm-watchdog.service.d/50-subgroup.conf", since=SUBGROUP_SINCE),
    File("llm-watchdog.sysusers.conf", f"{LIB}/sysusers.d/llm-watchdog.conf"),
    File("llm-watchdog.tmpfiles.conf", f"{LIB}/tmpfiles.d/llm-watchdog.conf"),    # noqa: S108
    File("config.example.toml", "etc/llm-watchdog/config.example.toml"),
    File("config.example.toml", "etc/llm-watchdog/config.toml", ours=False, mode=0o640),
)
# Where the units let the daemon write; as keys of the configuration, so that every command finds the daemon.
FOLDERS = {
    '#state_dir = "logs/state" ': 'state_dir = "/var/lib/llm-watchdog" ',
    '#log_dir = "logs" ': 'log_dir = "/var/log/llm-watchdog" ',
}
AFTER = (
    ("systemd-sysusers", "llm-watchdog.conf"),
    ("systemd-tmpfiles", "--create", "llm-watchdog.conf"),
    ("chgrp", "llm-watchdog", "/etc/llm-watchdog/config.toml"),
    ("systemctl", "daemon-reload"),
)
NEXT = """\
Next: edit /etc/llm-watchdog/config.toml (model, port, gpus, the path of vllm), then
  llm-watchdog check-config
  systemctl enable --now llm-watchdog llm-gateway
After an upgrade: llm-watchdog handover (no engine is stopped), and systemctl restart llm-gateway (it drains).
Secrets: one file each in /etc/llm-watchdog/credentials, named like its key, 0600 root."""
LEFT = """\
Left as they are: the user llm-watchdog, its folders in /var/lib, /var/log and /var/cache, and /etc/llm-watchdog."""


class Host:
    """Where files go and commands run; `root` other than / and `dry_run` run none."""

    def __init__(self, out: TextIO, dry_run: bool, root: Path = Path("/")) -> None:
        self.out, self.dry_run, self.root = out, dry_run, root

    def say(self, done: str, would: str, what: str) -> None:
        print(f"{would if self.dry_run else done} {what}", file=self.out)

    def run(self, *words: str) -> None:
        """Raises InstallError."""
        self.say("ran", "would run", " ".join(words))
        if self.dry_run or self.root != Path("/"):
            return
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InstallError(f"{words[0]}: {error}") from None
        if done.returncode:
            raise InstallError(f"{' '.join(words)}: {done.stderr.strip() or f'exit status {done.returncode}'}")


def install(host: Host, program: Path | None = None) -> None:
    """Raises InstallError."""
    program = program or _program()
    for path in {program, Path(sys.executable).resolve()}:
        if str(path).startswith(tuple(f"{folder}/" for folder in HIDDEN)):
            raise InstallError(f"{path}: services can't see it there; install into /opt/llm-watchdog, from a checkout and "
                               "with a Python that every user can read, such as the system's own: "
                               "python3.11 -m venv /opt/llm-watchdog && /opt/llm-watchdog/bin/pip install .")
    version = _systemd()
    for file in FILES:
        if version >= file.since:
            _put(host, file, program)
    for words in AFTER:
        host.run(*words)
    print(NEXT, file=host.out)


def uninstall(host: Host) -> None:
    """Stops the services, and with them the engines.  Raises InstallError."""
    present = [name for name in UNITS if (host.root / LIB / "systemd/system" / name).exists()]
    services = [name for name in present if name.endswith(".service")]
    if services:
        host.run("systemctl", "disable", "--now", *services)
    for file in FILES:
        path = host.root / file.target
        if file.ours and path.exists():
            host.say("removed", "would remove", str(path))
            if not host.dry_run:
                _remove(path)
    if present:
        host.run("systemctl", "daemon-reload")
    print(LEFT, file=host.out)


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        raise InstallError(f"{path}: {error.strerror}, expected to be root") from None
    with suppress(OSError):     # an administrator's own drop-ins keep their folder
        path.parent.rmdir()


def _put(host: Host, file: File, program: Path) -> None:
    path, text = host.root / file.target, _text(file.source, program)
    if not file.ours:
        for relative, absolute in FOLDERS.items():
            text = text.replace(relative, absolute)
    try:
        old = path.read_text("utf-8") if path.exists() else None
        if old == text or (old is not None and not file.ours):
            print(f"kept {path}" + ("" if old == text else ": it is yours"), file=host.out)
            return
        host.say("wrote", "would write", str(path))
        if not host.dry_run:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.new")
            new.write_text(text, "utf-8")
            new.chmod(file.mode)
            new.rename(path)
    except OSError as error:
        raise InstallError(f"{path}: {error.strerror}, expected to be root") from None


def _text(name: str, program: Path) -> str:
    for path in _places(name):
        if path.exists():
            text = path.read_text("utf-8")
            return text.replace(UNIT_PROGRAM, str(program)) if name.endswith(".service") else text
    raise InstallError(f"{name}: not in this installation, expected it beside the package")


def _places(name: str) -> Iterator[Path]:
    """In a wheel inside the package, in a checkout beside it."""
    for top in (PACKAGE, PACKAGE.parents[1]):
        yield top / "systemd" / name
        yield top / name


def _program() -> Path:
    called = Path(sys.argv[0]).absolute()
    for path in (called, Path(sys.prefix) / "bin" / "llm-watchdog", Path(UNIT_PROGRAM)):
        if path.name == "llm-watchdog" and path.exists():
            return path
    raise InstallError(f"llm-watchdog: not found beside {sys.executable}, expected it installed by pip")


def _systemd() -> int:
    """Its version.  Raises InstallError."""
    program = shutil.which("systemctl")
    if program is None:
        raise InstallError("this host has no systemd (systemctl is not found)")
    try:
        said = subprocess.run((program, "--version"), capture_output=True, text=True, timeout=COMMAND_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"systemctl: {error}") from None
    found = re.search(r"systemd (\d+)", said)
    return int(found[1]) if found else 0

"""The installed service in a box: as an administrator meets it."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from tests.system.harness import toml
from tests.systemd.box import PROGRAM, PYTHON, Box

Doc = dict[str, Any]

CONFIG = "/etc/llm-watchdog/config.toml"
DROP_IN = "/run/systemd/system/llm-watchdog.service.d/test.conf"
PORTS = count(8200)     # of the box: its network is its own
LEFTOVERS = r"""
import os, sys
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        environ = open(f"/proc/{pid}/environ", "rb").read()
    except OSError:
        continue
    if b"LLM_WATCHDOG_MARK=" in environ:
        print(pid, open(f"/proc/{pid}/comm").read().strip())
"""


PROMPT = '{"model": "stand-in", "prompt": "a", "max_tokens": 2}'
POST = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
urllib.request.urlopen(request, timeout=10).read()
"""


class Service:
    def __init__(self, box: Box) -> None:
        self.box = box
        self.port = next(PORTS)
        self.engine: Doc = {"command": [PYTHON, "-m", "vllm_watchdog.sim"], "model": "stand-in", "port": self.port,
                            "stop_timeout_s": 5}
        self.args: Doc = {"sim-load-s": 0.1}
        self.sections: Doc = {"restart": {"backoff_s": 0.1, "backoff_max_s": 0.2}}
        self.said_from = box.ok("date", "+%s.%N").strip()
        box.ok(PROGRAM, "install")
        self.configure()

    def configure(self, **daemon: Any) -> None:
        folders = {"state_dir": "/var/lib/llm-watchdog", "log_dir": "/var/log/llm-watchdog", "sample_s": 0.2}
        tables = {"daemon": folders | daemon, "engines.primary": self.engine, "engines.primary.args": self.args}
        tables |= self.sections
        lines = [line for name, keys in tables.items()
                 for line in (f"[{name}]", *(f"{key} = {toml(value)}" for key, value in keys.items()))]
        self.box.write(CONFIG, "\n".join(lines) + "\n", 0o640)
        self.box.ok("chgrp", "llm-watchdog", CONFIG)

    def drop_in(self, **keys: str) -> None:
        """Settings of the unit that shorten a wait; gone with `finish`."""
        self.box.write(DROP_IN, "[Service]\n" + "".join(f"{key}={value}\n" for key, value in keys.items()))
        self.box.ok("systemctl", "daemon-reload")

    def finish(self) -> None:
        """Stops it, and proves that nothing is left; then forgets its state."""
        box = self.box
        box.run("systemctl", "stop", "llm-gateway", "llm-watchdog")
        left = self.leftovers()
        box.run("sh", "-c", "pkill -KILL -u llm-watchdog")
        holders, lock = self.listening(), box.run("ls", "/var/lib/llm-watchdog/lock").returncode == 0
        groups = self.groups()
        box.run("systemctl", "unmask", "llm-watchdog")
        box.run("rm", "-f", DROP_IN)
        box.run("systemctl", "daemon-reload")
        box.run("systemctl", "reset-failed")
        box.run("sh", "-c", "rm -rf /var/lib/llm-watchdog/* /var/log/llm-watchdog/*")
        assert not left, f"left behind: {left}"
        assert not holders and not lock and not groups, (holders, lock, groups)

    # -- looking

    def leftovers(self) -> str:
        """Processes that carry a mark."""
        return self.box.ok(PYTHON, "-c", LEFTOVERS).strip()

    def listening(self) -> str:
        lines = self.box.read("/proc/net/tcp").splitlines()[1:]
        return "\n".join(line for line in lines if f":{self.port:04X} 00000000:0000 0A" in line)

    def groups(self) -> list[str]:
        """The control groups of engines."""
        found = self.box.run("sh", "-c", "ls -d /sys/fs/cgroup/llm.slice/llm-watchdog.service/*.[0-9]*").stdout
        return [path.rsplit("/", 1)[1] for path in found.split()]

    def show(self, key: str, unit: str = "llm-watchdog") -> str:
        return self.box.ok("systemctl", "show", unit, "-P", key).strip()

    @property
    def main_pid(self) -> int:
        return int(self.show("MainPID"))

    def nice(self, pid: int) -> int:
        return int(self.box.read(f"/proc/{pid}/stat").rpartition(")")[2].split()[16])

    def status(self) -> Doc | None:
        done = self.box.run(PROGRAM, "status", "--json")
        return json.loads(done.stdout) if done.stdout.startswith("{") else None

    def primary(self) -> Doc:
        doc = self.status()
        assert doc
        return dict(doc["engines"][0])

    def serving(self, after: int = 0) -> Doc:
        def found() -> Doc | None:
            doc = self.status()
            each = doc["engines"][0] if doc else None
            return each if each and each["phase"] == "serving" and each["generation"] > after else None

        return self.box.until(found, f"nothing newer than generation {after} serves")

    def start(self) -> Doc:
        self.box.ok("systemctl", "start", "llm-watchdog")
        return self.serving()

    def said(self, *options: str) -> str:
        """The service's lines of the journal, of this test."""
        self.box.run("journalctl", "--sync")
        since = ("-S", f"@{self.said_from}")
        return self.box.ok("journalctl", "--no-pager", "-u", "llm-watchdog", "-o", "cat", *since, *options)

    def ask(self, body: str = PROMPT, path: str = "/v1/completions", port: int = 0) -> bool:
        """A request to the engine itself, the primary unless `port` is another's: is it answered?"""
        return self.box.run(PYTHON, "-c", POST, f"http://127.0.0.1:{port or self.port}{path}", body).returncode == 0

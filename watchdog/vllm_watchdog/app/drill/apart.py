"""A drill that needs a file system of its own, in a process of its own: it lives in a mount namespace, with a small tmpfs in
place of the logs, which vanishes with it.  `unshare` of util-linux makes it, also for a user who is not root.

    python -m vllm_watchdog.app.drill.apart FAULT FOLDER        prints the result as JSON
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_watchdog.app.drill.inject_sandbox import SANDBOXED
from vllm_watchdog.app.drill.perform import Result, Tell, perform
from vllm_watchdog.app.drill.sandbox import sandbox
from vllm_watchdog.core.drill_verdict import Check, Observed
from vllm_watchdog.core.drills import FAULTS, Fault

APART = frozenset({"disk-full"})
DISK = "size=96m"
LIMIT_S = 180.0


def perform_apart(fault: Fault, folder: Path, tell: Tell) -> Result:
    """In a sandbox of its own."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return Result(fault.name, skipped="not possible here: there is no `unshare` (util-linux)")
    rights = () if os.geteuid() == 0 else ("--map-root-user",)
    tell("  in a sandbox of its own, on a small disk")
    try:
        done = subprocess.run(
            [unshare, "--mount", *rights, sys.executable, "-m", __spec__.name, fault.name, str(folder)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        return decoded(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return Result(fault.name, skipped=f"it was not over after {LIMIT_S:.0f} s")
    except ValueError:
        why = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        return Result(fault.name, skipped=f"not possible here: {why}")


def encoded(result: Result) -> dict[str, Any]:
    return asdict(result) | {"kept": result.kept}


def decoded(value: Mapping[str, Any]) -> Result:
    seen = value["observed"]
    return Result(
        value["fault"], value["skipped"], Observed(**seen | {"incidents": tuple(seen["incidents"])}) if seen else None,
        tuple(Check(**check) for check in value["checks"]), tuple((at, ok) for at, ok in value["answers"]))


def main(name: str, folder: Path) -> int:
    logs = folder / "logs"
    logs.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(logs)], check=False)    # noqa: S607
    if done.returncode:
        return done.returncode
    fault = next(fault for fault in FAULTS if fault.name == name)
    with sandbox(folder) as box:
        result = perform(box, fault, SANDBOXED[name], lambda text: print(text, file=sys.stderr))
    print(json.dumps(encoded(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))

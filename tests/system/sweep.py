"""kill -9 of the daemon at many moments of a start, a restart, a stop, a failover and an engine's death.

    python -m tests.system.sweep [--step 0.05] [--until 2.0] [start restart failover death stop]

Each kill must be followed by a daemon that ends with exactly one engine serving, with never two on one card, and the
journal of it all must replay.  Prints one line an action; exit 1 when one fails.  Some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.system.kills import BEGIN, after, at, chain

LEAVING, COMING = ("now=stopping", "engine.exited", "engine.emptied"), ("now=starting", "engine.spawned", "engine.ready")
SAID = {
    "start": ("daemon.started", *COMING),
    "restart": (*LEAVING, "now=settling", *COMING),
    "failover": ("service.fail", *LEAVING, *COMING),
    "death": ("log.finding", "engine.exited", "engine.emptied", "engine.spawned", "evidence.done"),
    "stop": ("daemon.stopping", "engine.exited", "engine.emptied"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(BEGIN), metavar="|".join(BEGIN))
    parser.add_argument("--step", type=float, default=0.1, help="seconds between two moments")
    parser.add_argument("--until", type=float, default=2.0, help="seconds after the beginning")
    options = parser.parse_args()
    failed = False
    for what in options.what:
        count = int(options.until / options.step) + 1
        moments = [*map(at, SAID[what]), *(after(number * options.step) for number in range(count))]
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
            try:
                chain(Path(folder) / "w", [(what, moment) for moment in moments])
                verdict = "ok"
            except AssertionError as error:
                failed, verdict = True, f"FAILED: {error}"
        print(f"{what}: {len(moments)} kills in {time.monotonic() - began:.0f} s: {verdict}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

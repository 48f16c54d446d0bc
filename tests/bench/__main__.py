"""All benchmarks, or those that are named, one after the other, each in a process of its own.

    python -m tests.bench [NAME...]

Each prints its figures with their goals, medians of five rounds or more, beside its peers in the same run; what is not
installed is left out, with a note.  Peers: `apt-get install monit runit ripgrep nginx-light`, `pip install supervisor
circus vllm-router` in an environment of its own; folders named in BENCH_PATH are searched, too.  Exit 1 where a goal is
missed.  One bench with options: `python -m tests.bench.NAME --help`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.bench.table import ROOT, machine

NAMES = ("restart", "idle", "detection", "growth", "scan", "failover", "gateway")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    names = parser.parse_args().names
    if unknown := set(names) - set(NAMES):
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(NAMES)}")
    print(machine(), flush=True)
    missed = 0
    for name in names or NAMES:
        print(f"\n{name}", flush=True)
        missed |= subprocess.run([sys.executable, "-m", f"tests.bench.{name}"], cwd=ROOT, check=False).returncode
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

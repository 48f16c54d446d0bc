"""`python -m vllm_watchdog.sim [serve] [MODEL] --flag …`: the stand-in as a program."""

from __future__ import annotations

import os
import sys

from vllm_watchdog.sim.api_server import Server
from vllm_watchdog.sim.flags import parse


def main() -> int:
    """Serves until it ends as vLLM would; returns the exit status."""
    options = parse(sys.argv[1:])
    status = Server(options).run()
    return status if options.sim.exit_code is None else options.sim.exit_code


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # connection threads may still wait for clients; vLLM's loop is gone by now, too

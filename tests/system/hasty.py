"""The daemon with the limits that no configuration key sets cut short, so that a test need not wait for them.

`HASTY_RELEASE_S`, `HASTY_CONFIRM_S` and `HASTY_KILL_S` in the environment cut some of them less short.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from vllm_watchdog.app.drill.sandbox_daemon import main, shortened

if __name__ == "__main__":
    release_s, confirm_s = (float(os.environ.get(f"HASTY_{name}_S", "1.0")) for name in ("RELEASE", "CONFIRM"))
    sys.exit(main(Path(sys.argv[sys.argv.index("--config") + 1]),
                  partial(shortened, release_s=release_s, confirm_s=confirm_s)))

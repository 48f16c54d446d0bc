"""How Hypothesis searches: the same examples at every run, so that a change is judged by what it changed.

`HYPOTHESIS_PROFILE=search` looks for new ones instead.  A slow machine is no failure: no deadline for one example.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

"""Drills: faults that are rehearsed on a running service or in a sandbox, timed, taken back, and judged."""

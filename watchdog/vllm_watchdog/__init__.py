"""A host-level watchdog daemon for vLLM."""

__version__ = "0.1.0"

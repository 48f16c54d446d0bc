"""What prompts cost of simulated VRAM beside the engine's own share, with `--sim-kib-per-token`: the articles' memory cliff.

A real vLLM takes its KV cache at the start; what a long prompt takes beyond that (activations, a cache that grows, another
backend's buffers) is here so many KiB for each token that is computed and not forgotten yet.  More than the card has left
is CUDA's OOM.  Reads small local files once a step while it grows.
"""

from __future__ import annotations

from vllm_watchdog.sim import faults, vram
from vllm_watchdog.sim.workers import Holders

TOLD_BYTES = 16 << 20   # a smaller change is not written down


class Peak:
    """What is held now, in bytes."""

    def __init__(self, kib_per_token: float, holders: Holders) -> None:
        self._per_token, self._holders = kib_per_token * 1024, holders
        self.bytes = 0

    def hold(self, own_bytes: int, tokens: int) -> str:
        """The engine's own share, and so many tokens.  Torch's words where there is no room, else nothing."""
        wanted = int(tokens * self._per_token)
        if abs(wanted - self.bytes) < TOLD_BYTES and (wanted or not self.bytes):
            return ""
        where = vram.folder()
        if where is not None and wanted > self.bytes:
            total, card = vram.total_bytes(where), vram.gpu_index(0)
            free = total - sum(use.used_bytes for use in vram.uses(where) if use.gpu == card)
            if wanted - self.bytes > free:
                return faults.oom(wanted - self.bytes, free, total, own_bytes + self.bytes)
        self.bytes = wanted
        self._holders.hold(own_bytes + wanted)
        return ""

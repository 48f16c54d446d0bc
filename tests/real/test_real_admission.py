"""Prompts that together need more KV cache than a real vLLM has: with and without the gateway's limits, changed by a reload.

The articles' case scaled down to a CPU: four clients with some 10,000 tokens each want 40,000 at once of a cache of 32,000.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.fakes.crowd import Got, crowd, p95, verdicts
from tests.real.conftest import Figures
from tests.real.rig import PLAIN, START_S, RealWatchdog, Vllm
from tests.system.harness import Doc, free_port
from tests.system.test_gateway import gateway

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

CACHE, BLOCK = 32_768, 32
ARGS: Doc = {"max-model-len": 16_384, "max-num-seqs": 8, "max-num-batched-tokens": 512, "long-prefill-token-threshold": 16,
             "block-size": BLOCK, "num-gpu-blocks-override": CACHE // BLOCK, "enable-prefix-caching": False}
SHORTS, LONGS, SECONDS = 2, 4, 30.0
SIZES = ((10, 30), (2400, 2800))        # words of four bytes; a byte is a token of this model


def test_prompts_that_wait_for_room_are_not_preempted(vllm: Vllm, tmp_path: Path, figures: Figures) -> None:
    port = free_port()
    sections: dict[str, Doc] = {"gateway": {"listen": f"127.0.0.1:{port}", "hold_s": START_S}}
    host = RealWatchdog(tmp_path / "host", {"primary": vllm.engine(args=ARGS)}, **sections)
    host.start()
    try:
        host.up("primary")
        with gateway(host):
            alone, _ = asked(host, port, 0)
            freely, preempted_freely = asked(host, port, LONGS)
            host.engines["primary"]["max_concurrent_tokens"] = int(CACHE * 0.85)
            host.configure(**(PLAIN | sections))
            assert host.cli("reload").code == 0
            limited, preempted = asked(host, port, LONGS)
            generation = host.engine("primary")["generation"]
    finally:
        host.finish()
    figures("2 short and 4 long clients, limited by tokens", note=(
        f"preempted {preempted_freely:.0f} without limits, {preempted:.0f} with; short p95 alone {p95(alone, False):.2f} s, "
        f"without limits {p95(freely, False):.2f} s, with {p95(limited, False):.2f} s; {verdicts(limited)}"))
    assert preempted_freely > 0, "no pressure, no proof"
    assert preempted == 0 and generation == 1
    assert verdicts(limited).keys() == {"short whole", "long whole"}


def asked(host: RealWatchdog, port: int, longs: int) -> tuple[list[Got], float]:
    """What clients got, and how many requests were preempted meanwhile."""
    before = host.metric("primary", "vllm:num_preemptions_total")
    got = asyncio.run(crowd(port, SHORTS, longs, SECONDS, SIZES, answer=32, deadline_s=START_S, model="tiny"))
    return got, host.metric("primary", "vllm:num_preemptions_total") - before

"""The articles' case: 10 GiB of VRAM are free, and 16 clients ask with 5,000 to 200,000 tokens, one with 100,000 characters.

    python -m tests.bench.admission [SECONDS]           600 by default, for the middle run; the other two take a fifth

Daemon, gateway and the stand-in engine with a memory model: each token of a prompt takes 40 KiB of the card (ChatGLM4-9B:
40 layers, 2 KV heads of 128, two bytes, keys and values) until its request ends, and more than the card has is CUDA's OOM.
Three runs: the six short clients alone; all sixteen with admission; all sixteen without, which must meet the OOM.
Prints what became of every request, and the short ones' p95 with the long ones over that without; exit 1 where a goal is
missed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.fakes.crowd import Got, crowd, p95, verdicts
from tests.system.harness import Doc, Watchdog, engine, free_port
from tests.system.test_gateway import gateway

GIB = 1 << 30
SHORTS, LONGS = 6, 10
SIZES = ((5_000, 5_800), (8_000, 200_000))
RATIO = 1.3
ENGINE = {"token-s": 0.02, "prefill-tokens-per-s": 50_000, "kib-per-token": 40, "kv-tokens": 2_000_000}
ARGS = {"max-model-len": 262_144, "max-num-batched-tokens": 8192, "long-prefill-token-threshold": 256, "max-num-seqs": 64,
        "gpu-memory-utilization": 0.4}
ADMISSION = {"max_concurrent": 10, "max_concurrent_tokens": 235_000}     # 0.9 of what 10 GiB hold
GATEWAY = {"long_share": 0.25, "hold_s": 900.0, "suspect_tokens": 8000}


def watchdog(folder: Path, admission: bool) -> tuple[Watchdog, int]:
    """An 80 GiB card: 32 are the engine's, 38 a neighbour's."""
    card = folder / "card"
    card.mkdir(parents=True)
    (card / "gpu.json").write_text(json.dumps({"total_bytes": 80 * GIB}))
    (card / f"{os.getpid()}.json").write_text(json.dumps({"pid": os.getpid(), "gpu": 0, "used_bytes": 38 * GIB}))
    port = free_port()
    keys: Doc = ADMISSION if admission else {}
    host = Watchdog(folder / "host", {"primary": engine(sim=dict(ENGINE), args=dict(ARGS), gpus=[0], **keys)},
                    env={"LLM_WATCHDOG_SIM_GPU": str(card)}, gateway={"listen": f"127.0.0.1:{port}"} | GATEWAY,
                    thresholds={"vram_degrade": 1.0, "vram_warn": 1.0, "vram_growth": 1.0})
    return host, port


def measured(folder: Path, admission: bool, longs: int, seconds: float) -> tuple[list[Got], int, str]:
    """What the clients got, how many generations the engine needed, and the class of the incident, if there is one."""
    host, port = watchdog(folder, admission)
    host.start()
    try:
        host.serving("primary")
        with gateway(host):
            got = asyncio.run(crowd(port, SHORTS, longs, seconds, SIZES, article=longs > 0))
            generation, row = host.engine("primary")["generation"], host.incident("primary")
    finally:
        host.finish()
    return got, generation, row["class"] if row else ""


def main(seconds: float) -> bool:
    runs = {}
    for name, admission, longs, part in (("short clients alone", True, 0, 0.2), ("all, with admission", True, LONGS, 1.0),
                                         ("all, without admission", False, LONGS, 0.2)):
        with tempfile.TemporaryDirectory() as folder:
            got, generation, cause = runs[name] = measured(Path(folder), admission, longs, seconds * part)
        print(f"{name}, {seconds * part:.0f} s: {verdicts(got)}")
        print(f"    short p95: first token {p95(got, True):.3f} s, whole {p95(got, False):.3f} s; "
              f"{generation} generations of the engine; incident: {cause or 'none'}", flush=True)
    alone, mixed, _ = (got for got, *_ in runs.values())
    first, whole = (p95(mixed, each) / p95(alone, each) for each in (True, False))
    print(f"short p95 with the long ones over without: first token x{first:.2f}, whole x{whole:.2f} (goal {RATIO})")
    goals = {
        "no OOM, one generation": runs["all, with admission"][1:] == (1, ""),
        "no request lost": all(each.verdict == "whole" for each in mixed),
        f"short p95 within {RATIO}": whole <= RATIO,
        "without admission it runs out of memory": runs["all, without admission"][2] == "oom_runtime",
    }
    for goal, met in goals.items():
        print(f"{'met   ' if met else 'MISSED'} {goal}")
    return all(goals.values())


if __name__ == "__main__":
    sys.exit(not main(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0))

"""How an engine loads: the phases of a real start with their log lines, the check for free VRAM, the starts that fail.

It blocks for `--sim-load-s` seconds. Before half of that (vLLM is still importing then) SIGTERM ends the process at
once; later it is only noted, as in vLLM, and ends the engine when it has loaded.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from vllm_watchdog.sim import faults, logs, vram
from vllm_watchdog.sim.flags import VERSION, Options
from vllm_watchdog.sim.workers import Holders

IMPORTED = 0.5
FAILS_AT = 0.8
# Share of the load time that is over, and what is logged then (the order of a real start).
PHASES: tuple[tuple[float, str, str], ...] = (
    (IMPORTED, "gpu_worker.py:331", "Using V2 Model Runner"),
    (0.6, "model_runner.py:369", "Loading model from scratch..."),
    (0.7, "weight_utils.py:1108", "Filesystem type for checkpoints: EXT4. Checkpoint size: {weights_gib:.2f} GiB."),
    (FAILS_AT, "default_loader.py:501", "Loading weights took {load_s:.2f} seconds"),
    (0.85, "model_runner.py:424", "Model loading took {weights_gib:.2f} GiB memory and {load_s:.6f} seconds"),
    (0.95, "gpu_worker.py:759", "Available KV cache memory: {kv_gib:.2f} GiB"),
    (
        0.95,
        "kv_cache_utils.py:2327",
        "GPU KV cache size: {kv_tokens:,} tokens, "
        "Maximum concurrency for {max_model_len:,} tokens per request: {seqs:.2f}x",
    ),
    (1.0, "core.py:402", "init engine (profile, create kv cache, warmup model) took {load_s:.2f} s"),
)


class StartFailedError(Exception):
    """The start failed; the text is the error as Python prints it."""


def load(options: Options, log: logs.Log, holders: Holders, imported: Callable[[], None]) -> None:
    """Loads; calls `imported` when SIGTERM is the engine's own business. Raises StartFailedError."""
    log.info(
        "core.py:133",
        f"Initializing a V1 LLM engine (v{VERSION}) with config: model='{options.model}', speculative_config=None, "
        f"tokenizer='{options.model}', dtype=torch.bfloat16, max_seq_len={options.max_model_len}, "
        f"tensor_parallel_size={options.tensor_parallel_size}, pipeline_parallel_size=1, enforce_eager=True",
    )
    began_at, load_s, budget = time.monotonic(), options.sim.load_s, budget_bytes(options)
    numbers = {
        "load_s": load_s,
        "weights_gib": budget * 0.3 / vram.GIB,
        "kv_gib": budget * 0.6 / vram.GIB,
        "kv_tokens": options.kv_tokens,
        "max_model_len": options.max_model_len,
        "seqs": options.kv_tokens / options.max_model_len,
    }
    for share, where, text in PHASES:
        _pause_until(began_at + share * load_s)
        if share == IMPORTED:
            imported()
            _check_free(options)
        log.info(where, text.format(**numbers))
        holders.hold(int(budget * share))
        if share == FAILS_AT:
            _fail_as_asked(options)


def budget_bytes(options: Options) -> int:
    """What the engine takes of its simulated GPU, in bytes."""
    where = vram.folder()
    return int((vram.total_bytes(where) if where else vram.DEFAULT_TOTAL_BYTES) * options.gpu_memory_utilization)


def failure_text(error: str, options: Options) -> str:
    return error.format(model=options.model, max_model_len=options.max_model_len, max_num_seqs=options.max_num_seqs)


def _pause_until(at: float) -> None:
    while (left_s := at - time.monotonic()) > 0:
        select.select([], [], [], left_s)


def _fail_as_asked(options: Options) -> None:
    failure = faults.START_FAILURES.get(options.sim.fail_start)
    if failure is None:
        return
    if failure.worker:
        logs.Log("Worker").failure("multiproc_executor.py:870", "WorkerProc failed to start.", (), failure.worker)
    raise StartFailedError(failure_text(failure.error, options))


def _check_free(options: Options) -> None:
    """vLLM's own check: what others leave free must cover gpu-memory-utilization × total."""
    if (where := vram.folder()) is None:
        return
    total, wanted = vram.total_bytes(where), budget_bytes(options)
    for rank in range(options.tensor_parallel_size):
        free = total - sum(use.used_bytes for use in vram.uses(where) if use.gpu == vram.gpu_index(rank))
        if free < wanted:
            raise StartFailedError(
                faults.VRAM_BUSY.format(
                    device=f"cuda:{rank}",
                    free=_gib(free),
                    total=_gib(total),
                    share=options.gpu_memory_utilization,
                    wanted=_gib(wanted),
                )
            )


def _gib(size: int) -> str:
    return f"{size / vram.GIB:.2f}".rstrip("0").rstrip(".")

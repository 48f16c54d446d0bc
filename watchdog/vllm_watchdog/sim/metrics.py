"""What `/metrics` shows: vLLM's names, filled from the reports of EngineCore's steps.

Gauges are as old as the last step, so they are stale when the engine is stopped. A step without an output (a chunk of a
long prompt) moves no counter, only the gauges: so does vLLM 0.32. Shared by threads under one lock that is held for
microseconds.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_watchdog.sim.flags import Options
from vllm_watchdog.sim.link import Message

ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REASONS = ("stop", "length", "abort", "error", "repetition")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters since the start, and gauges as of the last step. `finished` is indexed as REASONS."""

    running: int = 0
    waiting: int = 0
    kv_share: float = 0.0
    queried_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    sleep_level: int = 0
    iterations: int = 0
    iteration_tokens: int = 0
    buckets: tuple[int, ...] = (0,) * len(ITERATION_BUCKETS)
    finished: tuple[int, ...] = (0,) * len(REASONS)


Sample = tuple[dict[str, str], float]  # further labels, value

FAMILIES: tuple[tuple[str, str, str], ...] = (
    ("num_requests_running", "gauge", "Number of requests in model execution batches."),
    ("num_requests_waiting", "gauge", "Number of requests waiting to be processed."),
    ("num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason."),
    ("engine_sleep_state", "gauge", "Engine sleep state."),
    ("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage."),
    ("prefix_cache_queries_total", "counter", "Prefix cache queries, in terms of number of queried tokens."),
    ("prefix_cache_hits_total", "counter", "Prefix cache hits, in terms of number of cached tokens."),
    ("num_preemptions_total", "counter", "Cumulative number of preemption from the engine."),
    ("prompt_tokens_total", "counter", "Number of prefill tokens processed."),
    ("generation_tokens_total", "counter", "Number of generation tokens processed."),
    ("request_success_total", "counter", "Count of successfully processed requests."),
)


def samples(counts: Counts) -> dict[str, tuple[Sample, ...]]:
    """The samples of every family, by its name."""
    one = {
        "num_requests_running": counts.running,
        "num_requests_waiting": counts.waiting,
        "kv_cache_usage_perc": counts.kv_share,
        "prefix_cache_queries_total": counts.queried_tokens,
        "prefix_cache_hits_total": 0,
        "num_preemptions_total": counts.preemptions,
        "prompt_tokens_total": counts.prompt_tokens,
        "generation_tokens_total": counts.generation_tokens,
    }
    several: dict[str, tuple[Sample, ...]] = {
        "num_requests_waiting_by_reason": (({"reason": "capacity"}, counts.waiting), ({"reason": "deferred"}, 0)),
        "engine_sleep_state": tuple(
            ({"sleep_state": name}, int(counts.sleep_level == level)) for level, name in enumerate(SLEEP_STATES)
        ),
        "request_success_total": tuple(
            ({"finished_reason": name}, count) for name, count in zip(REASONS, counts.finished, strict=True)
        ),
    }
    return {**{name: (({}, value),) for name, value in one.items()}, **several}


def after_step(counts: Counts, message: Message) -> Counts:
    """The counts after the report of one step."""
    outputs = message["out"]
    gauges = replace(
        counts,
        running=message["running"],
        waiting=message["waiting"],
        kv_share=message["kv_share"],
        queried_tokens=counts.queried_tokens + message["queried_tokens"],
    )
    if not outputs:
        return gauges
    tokens = message["prompt_tokens"] + len(outputs)
    return replace(
        gauges,
        prompt_tokens=counts.prompt_tokens + message["prompt_tokens"],
        generation_tokens=counts.generation_tokens + len(outputs),
        preemptions=counts.preemptions + message["preempted"],
        iterations=counts.iterations + 1,
        iteration_tokens=counts.iteration_tokens + tokens,
        buckets=tuple(n + (tokens <= le) for n, le in zip(counts.buckets, ITERATION_BUCKETS, strict=True)),
    )


class Metrics:
    """The counts of one engine, shared by threads."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._counts = Counts()
        self._started_at = time.time()

    def counts(self) -> Counts:
        with self._lock:
            return self._counts

    def step(self, message: Message) -> None:
        """Takes the report of one step."""
        with self._lock:
            self._counts = after_step(self._counts, message)

    def finish(self, reason: str) -> None:
        """Counts a request that ended."""
        with self._lock:
            finished = tuple(n + (name == reason) for n, name in zip(self._counts.finished, REASONS, strict=True))
            self._counts = replace(self._counts, finished=finished)

    def sleeping(self, level: int) -> None:
        with self._lock:
            self._counts = replace(self._counts, sleep_level=level)

    def render(self) -> str:
        """The text format of Prometheus; without vLLM's own series under --disable-log-stats."""
        lines = _process(self._started_at)
        if self._options.log_stats:
            lines += _vllm(self.counts(), self._options, self._started_at)
        return "\n".join(lines) + "\n"


def _vllm(counts: Counts, options: Options, started_at: float) -> list[str]:
    base = {"engine": "0", "model_name": options.served_names[0]}
    values, lines = samples(counts), []
    for name, kind, text in FAMILIES:
        lines += _family(name, kind, text, [(name, {**base, **more}, value) for more, value in values[name]])
        if kind == "counter":  # as the Prometheus client does for vLLM
            made = name.removesuffix("_total") + "_created"
            lines += _family(made, "gauge", text, [(made, {**base, **more}, started_at) for more, _ in values[name]])
    name = "iteration_tokens_total"
    bounds = (*(str(float(bound)) for bound in ITERATION_BUCKETS), "+Inf")
    buckets = zip(bounds, (*counts.buckets, counts.iterations), strict=True)
    lines += _family(
        name,
        "histogram",
        "Histogram of number of tokens per engine_step.",
        [
            *((f"{name}_bucket", {**base, "le": le}, float(count)) for le, count in buckets),
            (f"{name}_count", base, counts.iterations),
            (f"{name}_sum", base, counts.iteration_tokens),
        ],
    )
    config = {
        "block_size": str(options.block_size),
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "engine": "0",
        "gpu_memory_utilization": str(options.gpu_memory_utilization),
        "kv_cache_size_tokens": str(options.kv_tokens),
        "num_gpu_blocks": str(options.kv_tokens // options.block_size),
    }
    info = "cache_config_info"
    return [*lines, *_family(info, "gauge", "Information of the LLMEngine CacheConfig", [(info, config, 1)])]


def _family(name: str, kind: str, text: str, found: list[tuple[str, dict[str, str], float]]) -> list[str]:
    lines = [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} {kind}"]
    for series, labels, value in found:
        inside = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
        lines.append(f"vllm:{series}{{{inside}}} {float(value)}")
    return lines


def _process(started_at: float) -> list[str]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    return [
        "# HELP process_resident_memory_bytes Resident memory size in bytes.",
        "# TYPE process_resident_memory_bytes gauge",
        f"process_resident_memory_bytes {float(resident)}",
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.",
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started_at:.2f}",
    ]

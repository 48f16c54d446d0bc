from __future__ import annotations

import pytest

from vllm_watchdog.core.details import TEXT_LIMIT, Detail, clip, details_of, size

GIB = 2**30


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 3 has a total capacity of 80.00 GiB of which 512.00 MiB is free. "  # noqa: E501
            "Including non-PyTorch memory, this process has 60.00 GiB memory in use. Process 88 has 18.00 GiB memory in use. "  # noqa: E501
            "Process 89 has 1.00 MiB memory in use.",
            {
                "requested_bytes": GIB * 3 // 2,
                "gpu": 3,
                "total_bytes": 80 * GIB,
                "free_bytes": GIB // 2,
                "used_bytes": 60 * GIB,
                "other_processes": ((88, 18 * GIB), (89, 2**20)),
            },
        ),
        (
            "Tried to allocate 20.00 KiB (GPU 0; 24.00 GiB total capacity; 21.90 GiB already allocated; 1.00 GiB free;",
            {"requested_bytes": 20480, "gpu": 0, "total_bytes": 24 * GIB, "free_bytes": GIB},
        ),
        (
            "Free memory on device cuda:1 (1.0/80.0 GiB) on startup is less than desired GPU memory utilization (0.9, 72.0 GiB).",  # noqa: E501
            {"gpu": 1, "total_bytes": 80 * GIB, "free_bytes": GIB, "gpu_memory_utilization": 0.9, "wanted_bytes": 72 * GIB},
        ),
        (
            "model's max seq len (131072), (16.0 GiB KV cache is needed, which is larger than the available KV cache memory (4.0 GiB). "  # noqa: E501
            "Based on the available memory, the estimated maximum model length is 32032.",
            {
                "max_model_len": 131072,
                "kv_needed_bytes": 16 * GIB,
                "kv_available_bytes": 4 * GIB,
                "estimated_max_model_len": 32032,
            },
        ),
        ("Worker proc VllmWorker-0 died unexpectedly (exit code: -11)", {"exit_code": -11, "worker": "VllmWorker-0"}),
        ("RPC call to execute_model timed out.", {"method": "execute_model"}),
        ("ran for 600059 milliseconds before timing out", {"timeout_s": 600.059}),
        ("vllm serve: error: unrecognized arguments: --swap-space 8", {"arguments": "--swap-space 8"}),
        ("[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000)", {"port": 8000}),
        ("Preemptions: 1,234", {"preemptions": 1}),
        (
            "Error in memory profiling. Initial free memory 2.0 GiB, current free memory 3.0 GiB.",
            {"initial_free_bytes": 2 * GIB, "current_free_bytes": 3 * GIB},
        ),
        ("the maximum number of tokens that can be stored in KV cache (36000)", {"kv_tokens": 36000}),
        ("occurred when warming up sampler with 1024 dummy requests", {"dummy_requests": 1024}),
        ("Worker VllmWorkerProcess pid 1159 died, exit code: -6", {"worker_pid": 1159, "exit_code": -6}),
        ("Engine core proc EngineCore_DP0 died unexpectedly", {"engine": "EngineCore_DP0"}),
        ("Engine core process EngineCore_DP1 died unexpectedly.", {"engine": "EngineCore_DP1"}),
        ("Engine process (pid 77) died.", {"engine_pid": 77}),
        ("Invocation of wake_up method failed", {"method": "wake_up"}),
        ("Waited 600s (configured by", {"timeout_s": 600}),
        ("[FT] No recovery within 120s timeout.", {"timeout_s": 120}),
        ("block found in 60 seconds", {"stalled_s": 60}),
        ("[Watchdog]Dumped stack to /x/y.log due to feed timeout", {"dump": "/x/y.log"}),
        ("vllm serve: error: argument --dtype: invalid choice", {"argument": "--dtype", "problem": "invalid choice"}),
        ("vllm serve: error: argument --dtype: invalid choice: 'x' (choose from y)",
         {"argument": "--dtype", "problem": "invalid choice: 'x' (choose from y)", "value": "x"}),
        ("Model architectures ['FooLM'] are not supported for now", {"architecture": "FooLM"}),
        ("OSError: a/b is not a local folder and", {"model": "a/b"}),
        ("404 Client Error for url: https://huggingface.co/api/x?token=1", {"url": "https://huggingface.co/api/x"}),
        ("nothing", {}),
    ],
)
def test_the_facts_of_a_line_are_numbers_in_bytes_and_seconds(message: str, expected: dict[str, Detail]) -> None:
    assert dict(details_of(message)) == expected


def test_sizes_are_bytes() -> None:
    assert size("1.5", "GiB") == GIB * 3 // 2


def test_evidence_is_short_and_holds_no_secret() -> None:
    assert len(clip("x" * 5000)) == TEXT_LIMIT
    masked = clip("--api-key s3cret token='abcdef' hf_abcdefgh Bearer xyz123 sk-aaaa1111")
    assert not any(secret in masked for secret in ("s3cret", "abcdef", "xyz123", "aaaa1111"))

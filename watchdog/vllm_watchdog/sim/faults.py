"""The faults of the stand-in as tables: what can be asked for on the command line, at run time, and at the start.

`Sim` holds every `--sim-…` flag: a field is a flag (`oom_over_tokens` is `--sim-oom-over-tokens`), its help is the
documentation. `START_FAILURES` are starts that fail with vLLM's own words. No code here acts; the processes do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def _flag(default: Any, kind: type, text: str) -> Any:
    return field(default=default, metadata={"kind": kind, "help": text})


@dataclass(frozen=True, slots=True)
class Sim:
    """The `--sim-…` flags; None or 0 means off."""

    load_s: float = _flag(0.5, float, "seconds from the start to ready, spread over the phases of a real start")
    token_s: float = _flag(0.02, float, "seconds a step (one token for each running request)")
    prefill_tokens_per_s: float = _flag(50_000.0, float, "prompt tokens a second, added to the step that takes them")
    kv_tokens: int = _flag(262_144, int, "size of the KV cache in tokens; more than it holds is preempted")
    answer_tokens: int = _flag(64, int, "tokens of an answer that names no max_tokens (then it ends with 'stop')")
    kib_per_token: float = _flag(
        0.0, float, "each token that is computed takes N KiB of simulated VRAM until its request ends; too many: CUDA OOM"
    )
    oom_over_tokens: int = _flag(0, int, "a prompt longer than N tokens: CUDA OOM, engine death, HTTP 500, exit 0")
    core_death_after_requests: int = _flag(0, int, "EngineCore SIGKILLs itself when request N arrives")
    core_death_after_s: float = _flag(0.0, float, "EngineCore SIGKILLs itself S seconds after ready")
    hang_after_requests: int = _flag(0, int, "EngineCore stops stepping when request N arrives; /health stays 200")
    hang_after_s: float = _flag(0.0, float, "EngineCore stops stepping S seconds after ready")
    hang_on_word: str = _flag("", str, "EngineCore stops stepping on a prompt that holds this word")
    ignore_term: bool = _flag(False, bool, "every process ignores SIGTERM, only SIGKILL ends it")
    fail_start: str = _flag("", str, "the start fails with vLLM's words for this; NAME of the list below")
    exit_code: int | None = _flag(None, int, "exit with N instead of vLLM's own code")
    die_with: str = _flag("", str, "the API server kills itself with this signal (SIGSEGV, SIGABRT, …) once ready")
    die_after_s: float = _flag(0.0, float, "seconds after ready for --sim-die-with")
    leak_mib_per_s: float = _flag(0.0, float, "EngineCore's RSS grows by N MiB/s, up to 1 GiB")
    vram_leak_mib_per_s: float = _flag(0.0, float, "its simulated VRAM grows by N MiB/s")
    flood_mb_per_s: float = _flag(0.0, float, "the API server logs N MB/s of request lines, for at most 60 s")
    linger: bool = _flag(False, bool, "after an engine death the port closes and the API server stays for ever")


SIM_FIELDS = fields(Sim)


@dataclass(frozen=True, slots=True)
class StartFailure:
    """A start that fails: who prints it (`api` before the engine, `core` inside it), and the error's text."""

    process: str
    error: str
    worker: str = ""  # what a worker process logs first, where vLLM has one do so


_SEE = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
_OOM = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of which {free} is free. "
    "Including non-PyTorch memory, this process has {used} memory in use. {others}"
    "Of the allocated memory 38.50 GiB is allocated by PyTorch, with 27.21 MiB allocated in private pools "
    "(e.g., CUDA Graphs), and 6.21 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
    "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)
RUNTIME_OOM = "torch.OutOfMemoryError: " + _OOM.format(
    asked="352.00 MiB", free="273.56 MiB", total="139.80 GiB", used="39.24 GiB",
    others="Process 1733 has 100.28 GiB memory in use. ",
)


def oom(asked: int, free: int, total: int, used: int) -> str:
    """CUDA out of memory, in torch's words; bytes."""
    sizes = {"asked": asked, "free": free, "total": total, "used": used}
    return "torch.OutOfMemoryError: " + _OOM.format(
        **{name: f"{size / 1024**3:.2f} GiB" for name, size in sizes.items()}, others=""
    )


VRAM_BUSY = (
    "ValueError: Free memory on device {device} ({free}/{total} GiB) on startup is less than desired GPU memory "
    "utilization ({share}, {wanted} GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
PORT_IN_USE = "OSError: [Errno 98] Address already in use"
_401 = (
    "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-00000000-000000000000)\n\n"
    "Cannot access gated repo for url https://huggingface.co/{model}/resolve/main/config.json.\n"
    "Access to model {model} is restricted. You must have access to it and be authenticated to access it. "
    "Please log in.\n\n"
    "OSError: You are trying to access a gated repo.\n"
    "Make sure to have access to it at https://huggingface.co/{model}."
)
_404 = (
    "OSError: {model} is not a local folder and is not a valid model identifier listed on "
    "'https://huggingface.co/models'\n"
    "If this is a private repository, make sure to pass a token having permission to this repo either by logging in "
    "with `hf auth login` or by passing `token=<your_token>`"
)
_NO_FOLDER = (
    "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
    "'{model}'. Use `repo_type` argument if needed.\n\n"
    "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
    "'{model}'. Use `repo_type` argument if needed."
)
_OFFLINE = (
    "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached "
    "files.\nCheck your internet connection or see how to run the library in offline mode at "
    "'https://huggingface.co/docs/transformers/installation#offline-mode'."
)
_KV = (
    "ValueError: To serve at least one request with the model's max seq len ({max_model_len}), (16.0 GiB KV cache is "
    "needed, which is larger than the available KV cache memory (3.91 GiB). Based on the available memory, the "
    "estimated maximum model length is 32032. Try increasing `gpu_memory_utilization` (which also "
    "controls CPU memory on the CPU backend) or decreasing `max_model_len` when initializing the engine. " + _SEE
)
_PROFILE = (
    "AssertionError: Error in memory profiling. Initial free memory 41.2 GiB, current free memory 55.87 GiB. This "
    "happens when other processes sharing the same container release GPU memory while vLLM is profiling during "
    "initialization. To fix this, ensure consistent GPU memory allocation or isolate vLLM in its own container."
)
_WARM_UP = (
    "RuntimeError: CUDA out of memory occurred when warming up sampler with {max_num_seqs} dummy requests. Please try "
    "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
)
_NO_KV = (
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
    "the engine (this flag also controls CPU memory reservation on the CPU backend, despite its name). " + _SEE
)
_NCCL = "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"
_WORKER = (
    "Exception: WorkerProc initialization failed due to an exception in a background process. "
    "See stack trace for root cause."
)
_BUSY = (
    "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable\n"
    "CUDA kernel errors might be asynchronously reported at some other API call."
)
NO_SEQUENCES = (
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig\nmax_num_seqs\n"
    "  Input should be greater than or equal to 1 [type=greater_than_equal, input_value=0, input_type=int]"
)
_SPACE = "OSError: [Errno 28] No space left on device"

START_FAILURES: dict[str, StartFailure] = {
    "bad-model": StartFailure("api", _404),
    "no-folder": StartFailure("api", _NO_FOLDER),
    "hf-auth": StartFailure("api", _401),
    "hf-network": StartFailure("api", _OFFLINE),
    "port-in-use": StartFailure("api", PORT_IN_USE),
    "kv-never-fits": StartFailure("core", _KV),
    "no-kv-memory": StartFailure("core", _NO_KV),
    "vram-busy": StartFailure(
        "core", VRAM_BUSY.format(device="cuda:0", free="0.41", total="79.18", share="0.85", wanted="67.3")
    ),
    "profile-race": StartFailure("core", _PROFILE),
    "start-oom": StartFailure("core", _WARM_UP),
    "cuda-busy": StartFailure("core", _BUSY),
    "disk-full": StartFailure("core", _SPACE),
    "nccl": StartFailure("core", _WORKER, worker=_NCCL),
}

RUNTIME_FAULTS: dict[str, str] = {
    "oom": "the next step fails with CUDA out of memory; the engine dies",
    "core_death": "EngineCore SIGKILLs itself",
    "hang": "EngineCore stops stepping",
    "unhang": "EngineCore steps again",
    "leak": "EngineCore's RSS grows by mib_per_s (default 10)",
    "vram_leak": "its simulated VRAM grows by mib_per_s (default 100)",
    "flood": "the API server logs mb_per_s (default 1) for seconds (default 5)",
    "slow": "a step takes token_s (default 0.5) seconds",
    "die": "the API server kills itself with signal (default SIGSEGV)",
}

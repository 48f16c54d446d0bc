"""The failure catalogue of engine logs, as a table: which text, in which place, means which class.

Rank decides between causes and consequences: the highest wins, the earliest among equals.  What a class means to a
human, and its action, is in `catalog`.  Pure data and one look-up.
Source of the texts: the vLLM wheels 0.4.2 to 0.33.0, PyTorch, huggingface_hub, and vLLM's issues.
"""

from __future__ import annotations

import re

from vllm_watchdog.core.places import STARTING, Phase, Place, Row, row
from vllm_watchdog.core.records import Record

__all__ = ["ONLY_AT_START", "ROWS", "STARTUP_CLASSES", "Phase", "Row", "best_row"]

P = Place
_CORE_CLIENT, _WATCH_DOG = frozenset({"core_client.py"}), frozenset({"watch_dog.py"})
_CORE = frozenset({"async_llm_engine.py", "core.py", "engine.py"})  # the process that steps
_SHM, _SCHEDULER = frozenset({"shm_broadcast.py"}), frozenset({"scheduler.py"})

ROWS: tuple[Row, ...] = (
    # hardware, driver: a restart does not help
    row("cuda_hw", 90, P.NATIVE, "CUDA error: uncorrectable ECC error encountered", "uncorrectable ECC error",
        "CUDA error: uncorrectable NVLink error", "uncorrectable NVLink error",
        "Search for `cudaErrorECCUncorrectable'"),
    row("cuda_init", 85, P.NATIVE, "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "CUDA-capable device(s) is/are busy or unavailable", "No CUDA GPUs are available",
        "Failed to infer device type", "Failed to initialize NVML: Driver/library version mismatch",
        "NVMLError_LibRmVersionMismatch: ",
        "Unexpected error from cudaGetDeviceCount()*Error 802: system not yet initialized",
        "CUDA error: system not yet initialized", "Search for `cudaErrorDevicesUnavailable'"),
    row("cuda_init", 85, P.LINE, "Failed to initialize NVML: Driver/library version mismatch"),
    # memory
    row("startup_oom", 82, P.RAISED, "CUDA out of memory occurred when warming up", recoverable=True),
    row("oom", 80, P.NATIVE, "OutOfMemoryError: CUDA out of memory", "OutOfMemoryError: HIP out of memory",
        "CUDA out of memory", "HIP out of memory", "OutOfMemoryError('*out of memory", "CUDA error: out of memory",
        "CUDA Error: out of memory at ", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory",
        "Search for `cudaErrorMemoryAllocation'", "HIP error: out of memory", recoverable=True),
    row("oom", 80, P.LINE, "CUDA Error: out of memory at *cumem_allocator", recoverable=True),
    # the CUDA context is lost
    row("cuda_fault", 80, P.NATIVE, "CUDA error: an illegal memory access was encountered",
        "CUDA error: an illegal instruction was encountered", "CUDA error: device-side assert triggered",
        "CUDA error: unspecified launch failure", "CUDA error: misaligned address",
        "CUDA error: invalid program counter",
        "CUDA driver error: an illegal memory access was encountered", "CUDA driver error: unspecified launch failure",
        "Triton Error [CUDA]: an illegal memory access", "Triton Error [CUDA]: misaligned address",
        "Triton Error [CUDA]: unspecified launch failure", "Triton Error [CUDA]: device-side assert",
        "Search for `cudaErrorIllegalAddress'", "Search for `cudaErrorAssert'", "Search for `cudaErrorLaunchFailure'",
        "Search for `cudaErrorMisalignedAddress'", "HIP error: an illegal memory access was encountered"),
    row("cuda_fault", 72, P.NATIVE, "Triton Error [CUDA]: ", "AcceleratorError: CUDA error: "),
    row("cuda_fault", 72, P.RAISED, "CUDA error: ", "CUDA driver error: ", "CUBLAS_STATUS_EXECUTION_FAILED",
        files=_CORE),
    # a worker's word on a kernel, which tells not why; the engine's own account of its death names the incident
    row("cuda_fault", 45, P.NATIVE, "CUDA error: CUBLAS_STATUS_", "CUBLAS_STATUS_EXECUTION_FAILED"),
    row("cuda_fault", 45, P.LINE, "terminate called after throwing an instance of 'c10::"),
    # start-up
    row("hf_auth", 76, P.RAISED, "GatedRepoError: ", "You are trying to access a gated repo", phases=STARTING),
    row("model_not_found", 75, P.RAISED, "RepositoryNotFoundError: ", "RevisionNotFoundError: ", "HFValidationError: ",
        "OSError: *is not a local folder and is not a valid model identifier", "Can't load the configuration of '",
        "OSError: *does not appear to have a file named config.json", "Invalid repository ID or local directory specified",
        phases=STARTING),
    row("model_not_found", 75, P.LINE, "  Value error, Invalid repository ID or local directory specified",
        phases=STARTING),
    row("compile_failure", 75, P.RAISED, "torch._inductor.exc.", "torch._dynamo.exc.", "InductorError: ",
        "BackendCompilerFailed: ", "Triton Error [CUDA]: device kernel image is invalid",
        "CUDA error: no kernel image is available for execution on the device"),
    row("hf_auth", 71, P.RAISED, "401 Client Error", "403 Client Error", phases=STARTING),
    row("hf_network", 70, P.RAISED, "We couldn't connect to 'https://", "LocalEntryNotFoundError: ",
        "ConnectionError: *NameResolutionError(", "NameResolutionError: ", "ConnectError: *name resolution",
        "500 Server Error", "502 Server Error", "503 Server Error", "504 Server Error", "429 Client Error",
        "ConnectionError: *Max retries exceeded with url", "OfflineModeIsEnabled: ", phases=STARTING),
    row("hf_network", 70, P.LINE, "requests.exceptions.ReadTimeout: ", "requests.exceptions.ConnectTimeout: ",
        "httpx.ReadTimeout: ", "httpx.ConnectTimeout: ", phases=STARTING),
    row("startup_kv_insufficient", 78, P.RAISED, "No available memory for the cache blocks.",
        "To serve at least one request with *KV cache is needed, which is larger than the available KV cache memory",
        "The model's max seq len *is larger than the maximum number of tokens that can be stored in KV cache (",
        "The model*is larger than the maximum number of tokens that can be stored in KV cache (",
        "Cannot auto-fit max_model_len"),
    row("startup_vram_busy", 79, P.RAISED, "Free memory on device *is less than desired GPU memory utilization",
        "Free memory on device *is less than the engine's budget"),
    row("startup_profile_race", 79, P.RAISED, "Error in memory profiling."),
    row("port_in_use", 70, P.RAISED, "OSError: [Errno 98] Address already in use",
        "OSError: [Errno 98] error while attempting to bind on address", phases=STARTING),
    row("port_in_use", 70, P.SERVER, "[Errno 98] error while attempting to bind on address",
        "[Errno 98] Address already in use"),
    row("bad_args", 68, P.RAISED, "pydantic*ValidationError: *validation error* for ",
        "Model architectures *are not supported for now",
        "User-specified max_model_len (", "max_num_batched_tokens (*is smaller than max_model_len",
        "Total number of attention heads (*must be divisible by tensor parallel size",
        "Bfloat16 is only supported on GPUs",
        "ModuleNotFoundError: No module named 'vllm", phases=STARTING),
    row("bad_args", 68, P.LINE, "  Value error, User-specified max_model_len (", phases=STARTING),    # what would do
    row("fs_error", 70, P.RAISED, "PermissionError: [Errno 13]", "[Errno 28] No space left on device",
        "RuntimeError: *No space left on device (os error 28)", "[Errno 30] Read-only file system",
        "Unexpected bus error encountered in worker", phases=STARTING),
    row("fs_error", 70, P.LINE, "Bus error (core dumped)", "Fatal Python error: Bus error",
        "ERROR: Unexpected bus error encountered in worker", phases=STARTING),
    row("startup_timeout", 60, P.RAISED, "Timed out waiting for engine core processes to start."),
    row("startup_failed", 30, P.RAISED, "EngineCore failed to start.", "WorkerProc failed to start.",
        "WorkerProc initialization failed", "Engine core initialization failed.",
        "Engine process failed to start", "Failed core proc(s):"),
    # hangs and collectives
    row("nccl_timeout", 70, P.NATIVE, "Watchdog caught collective operation timeout: WorkNCCL(",
        "Process group watchdog thread terminated with exception",
        "To avoid data inconsistency, we are taking the entire process down",
        "ProcessGroupNCCL's watchdog got stuck for", "Heartbeat monitor timed out!"),
    row("nccl_error", 65, P.NATIVE, "NCCL error: unhandled system error", "NCCL error: unhandled cuda error",
        "NCCL error: remote process exited or there was a network error", "NCCL error: ", "NCCL error in: ",
        "DistBackendError: NCCL error"),
    row("step_timeout", 60, P.RAISED, "RPC call to execute_model timed out.", "RPC call to sample_tokens timed out.",
        "RPC call to execute_dummy_batch timed out.", "RPC call to take_draft_token_ids timed out.",
        "Engine iteration timed out. This should never happen!"),
    row("engine_stall", 58, P.NOTE, "[Watchdog]Dumped stack to *due to feed timeout", files=_WATCH_DOG),
    row("shm_stall", 10, P.NOTE, "No available shared memory broadcast block found in ", "No available block found in ",
        files=_SHM),
    row("kv_pressure", 8, P.NOTE, "Sequence group *is preempted by PreemptionMode.", files=_SCHEDULER),
    # processes that ended
    row("worker_died", 55, P.ENGINE, "Worker proc *died unexpectedly",
        "Worker VllmWorkerProcess pid *died, exit code: ",
        "Worker *pid *died, exit code: ", "RayWorkerProc rank=*died unexpectedly"),
    row("engine_proc_died", 50, P.ENGINE, "Engine core proc *died unexpectedly"),
    row("engine_proc_died", 50, P.NOTE, "[shutdown] MPClient: engine core exited unexpectedly", files=_CORE_CLIENT),
    row("engine_proc_died", 50, P.RAISED, "Engine core process *died unexpectedly"),
    # the engine says that it is dead
    row("engine_dead_v1", 50, P.ENGINE, "EngineCore encountered a fatal error.", "[FT] No recovery within "),
    row("engine_dead_v1", 46, P.ENGINE, "Got fatal signal from worker processes, shutting down."),
    row("engine_dead_v1", 40, P.ENGINE, "EngineCore hit an exception:", "AsyncLLM output_handler failed."),
    row("engine_dead_v1", 40, P.RAISED, "EngineDeadError: EngineCore encountered an issue."),
    row("engine_dead_v0", 40, P.ENGINE, "Engine background task failed",
        "MQLLMEngine is already dead, terminating server process",
        "AsyncLLMEngine has failed, terminating server process",
        "AsyncLLMEngine is already dead, terminating server process",
        "RuntimeError('Engine process (pid *died."),
    row("engine_dead_v0", 40, P.RAISED, "AsyncEngineDeadError: Background loop ",
        "AsyncEngineDeadError: Task finished unexpectedly.",
        "MQEngineDeadError: Engine loop is not running.", "Engine process (pid *died.",
        "Task finished unexpectedly. This should never happen!"),
)

_ARGPARSE = re.compile(
    r"[\w./-]+(?: [\w./-]+){0,3}: error: "
    r"(?:unrecognized arguments|argument [-/]|the following arguments are required|ambiguous option)"
)
_NO_MODULE = re.compile(
    r"[\w./-]*python[\w.]*: (?:No module named vllm\b|Error while finding module specification for 'vllm)"
)
ROWS += tuple(
    Row("bad_args", 68, Place.LINE, pattern, pattern, needles, STARTING, frozenset())
    for pattern, needles in (
        (_ARGPARSE, (": error: ",)),
        (_NO_MODULE, (": No module named vllm", ": Error while finding module specification for ")),
    )
)
ONLY_AT_START = tuple({each.class_: None for each in ROWS if each.phases == STARTING})
STARTUP_CLASSES = frozenset(each.class_ for each in ROWS if each.phases == STARTING or each.class_.startswith("startup_"))


def best_row(record: Record, phase: Phase) -> Row | None:
    """The row of the highest rank that this record matches in this phase."""
    found: Row | None = None
    for each in ROWS:
        if (found is None or each.rank > found.rank) and phase in each.phases and each.matches(record):
            found = each
    return found

# ruff: noqa: E501 - log lines are as long as they are
"""Log excerpts as engines of all versions would print them, each with the class and action expected: data for the tests.

Written from vLLM's format strings and public issues, varied in version, prefix, colour, transport and JSON; and hostile
ones, where prompts, names, URLs and outputs hold the words of failures.
"""

from __future__ import annotations

import json

RESTART, FAILOVER, STOP, WAIT, ALERT = "restart", "failover", "config-error-stop", "wait-vram", "alert-only"
OOM = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.25 GiB of which 642.94 MiB is "
    "free. Including non-PyTorch memory, this process has 60.00 GiB memory in use."
)
OOM_OTHER = OOM + " Process 88121 has 18.40 GiB memory in use."
DEAD = (
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
    "See stack trace (above) for the root cause."
)
INIT = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
READY = "INFO:     Application startup complete."
SHM = ("No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are "
       "hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization).")
OK = 'INFO:     192.0.2.7:41000 - "POST /v1/chat/completions HTTP/1.1" 200 OK'


def v0(message: str, at: str = "async_llm_engine.py:43", level: str = "ERROR", who: str = "") -> str:
    """0.4 to 0.7: no opening bracket."""
    return f"{who}{level} 06-02 09:14:13 {at}] {message}\r"


def v8(message: str, at: str = "core.py:398", level: str = "ERROR", who: str = "") -> str:
    """0.8.0 to 0.10.1."""
    return f"{who}{level} 05-06 02:29:07 [{at}] {message}\r"


def v33(message: str, at: str = "core.py:1586", level: str = "ERROR", who: str = "EngineCore") -> str:
    """0.10.2 and later."""
    return f"({who} pid=377) {level} 11-25 03:00:00 [{at}] {message}\r"


def worker(message: str, level: str = "ERROR") -> str:
    return v33(message, "multiproc_executor.py:962", level, "Worker_TP0")


def api(message: str, at: str = "async_llm.py:943", level: str = "ERROR") -> str:
    return v33(message, at, level, "APIServer")


def stats(prompt: float, generation: float, running: int, waiting: int, extra: str = "", level: str = "INFO") -> str:
    return v33(
        f"Engine 000: Avg prompt throughput: {prompt} tokens/s, Avg generation throughput: {generation} tokens/s, "
        f"Running: {running} reqs, Waiting: {waiting} reqs, {extra}GPU KV cache usage: 1.0%, Prefix cache hit rate: 0.0%",
        "loggers.py:335", level, "APIServer",
    )


def v0_stats(running: int, generation: float = 0.0) -> str:
    return v0(
        f"Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: {generation} tokens/s, Running: {running} reqs, "
        "Swapped: 0 reqs, Pending: 0 reqs, GPU KV cache usage: 3.0%, CPU KV cache usage: 0.0%.", "metrics.py:345", "INFO",
    )


def as_json(message: str, level: str = "ERROR", name: str = "vllm.v1.engine.core", exc_info: str = "", who: str = "EngineCore") -> str:
    entry = {"asctime": "2026-11-25 03:00:00,123", "levelname": level, "name": name, "processName": who, "process": 377,
             "message": message}
    return json.dumps(entry | ({"exc_info": exc_info} if exc_info else {}))


def coloured(line: str) -> str:
    return (line.replace("ERROR", "\x1b[31mERROR\x1b[0m").replace("[core", "\x1b[90m[core")
            .replace("(EngineCore pid=377)", "\x1b[0;36m(EngineCore pid=377)\x1b[0;0m"))


def of(*lines: str) -> str:
    return "\n".join(lines) + "\n"


TRACE = "Traceback (most recent call last):"
HEAD = "EngineCore encountered a fatal error."
BEGIN = (api("vLLM API server version 0.20.2", "api_server.py:1977", "INFO"), api("Using max model len 8192", "model.py:1", "INFO"))
UP = (*BEGIN, READY, OK)

# name, class, action, text
FAILURES: tuple[tuple[str, str, str, str], ...] = (
    ("oom, 0.8 bare", "oom_runtime", RESTART, of(v8(HEAD), v8(TRACE), v8(f"torch.OutOfMemoryError: {OOM}"), v8(DEAD, "async_llm.py:399"))),
    ("oom, old torch name", "oom_runtime", RESTART, of(v0_stats(3, 9.0), v0("Engine background task failed"), v0(f"torch.cuda.OutOfMemoryError: {OOM}"))),
    ("oom, oldest text", "oom_runtime", RESTART, of(
        v0("Engine background task failed"),
        v0("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.69 GiB total capacity; "
           "21.90 GiB already allocated; 1.20 GiB free; 22.00 GiB reserved in total by PyTorch)"))),
    ("oom, JSON lines", "oom_runtime", RESTART, of(as_json(HEAD, exc_info=f"{TRACE}\n  File \"x.py\", line 1, in y\ntorch.OutOfMemoryError: {OOM}"))),
    ("oom, colours", "oom_runtime", RESTART, of(*map(coloured, (v33(HEAD), v33(TRACE), v33(f"torch.OutOfMemoryError: {OOM}"))))),
    ("oom, logging prefix", "oom_runtime", RESTART, of(*("[node-3] " + each for each in (v33(HEAD), v33(f"torch.OutOfMemoryError: {OOM}"))))),
    ("oom, docker compose", "oom_runtime", RESTART, of(*("vllm-1  | " + each for each in (v33(HEAD), v33(f"torch.OutOfMemoryError: {OOM}"))))),
    ("oom, CRI timestamps", "oom_runtime", RESTART, of(*("2026-05-06T02:29:07.123456789Z stdout F " + each for each in (v33(HEAD), v33(f"torch.OutOfMemoryError: {OOM}"))))),
    ("oom, journald", "oom_runtime", RESTART, of(*("Nov 29 14:41:57 gpu-host vllm[539]: " + each for each in (v33(HEAD), v33(f"torch.OutOfMemoryError: {OOM}"))))),
    ("oom, DEBUG paths", "oom_runtime", RESTART, of(v33(HEAD, "v1/engine/core.py:1195"), v33(f"torch.OutOfMemoryError: {OOM}", "v1/engine/core.py:1195"))),
    ("oom, ROCm", "oom_runtime", RESTART, of(*UP, v33(HEAD), v33("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.00 GiB."))),
    ("oom, TP worker confirmed by the executor", "oom_runtime", RESTART, of(
        *UP, worker("WorkerProc hit an exception."), worker(TRACE), worker(f"torch.OutOfMemoryError: {OOM}"),
        v33(HEAD), v33(f"RuntimeError: Worker failed with error '{OOM}', please check the stack trace above for the root cause"),
        v33("Worker proc VllmWorker-0 died unexpectedly (exit code: -15), shutting down executor.", "multiproc_executor.py:316"))),
    ("oom, 0.8.4 tuple text", "oom_runtime", RESTART, of(v8("EngineCore hit an exception: Traceback (most recent call last):"), v8(
        f"RuntimeError: ('Worker failed with error %s, please check the stack trace above for the root cause', '{OOM}')"),
        v8("Got fatal signal from worker processes, shutting down. See stack trace above for root cause issue.", "core_client.py:191", "CRITICAL"))),
    ("oom, log ends in the worker's traceback", "oom_runtime", RESTART, of(*UP, worker("WorkerProc hit an exception."), worker(f"torch.OutOfMemoryError: {OOM}"))),
    ("oom, cublas", "oom_runtime", RESTART, of(*UP, v33(HEAD), v33("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))),
    ("oom, torchrun prefix", "oom_runtime", RESTART, of(OK, f"[rank0]: torch.OutOfMemoryError: {OOM}")),
    ("start-up oom in graph capture", "startup_oom", STOP, of(*BEGIN, v33("EngineCore failed to start."), v33(TRACE), v33(f"torch.OutOfMemoryError: {OOM}"), INIT)),
    ("start-up oom beside a neighbour", "startup_oom", WAIT, of(*BEGIN, v33("EngineCore failed to start."), v33(f"torch.OutOfMemoryError: {OOM_OTHER}"), INIT)),
    ("start-up oom in a worker", "startup_oom", STOP, of(
        worker("WorkerProc failed to start."), worker(f"torch.OutOfMemoryError: {OOM}"),
        v33("EngineCore failed to start."), v33("Exception: WorkerProc initialization failed due to an exception in a background process."), INIT)),
    ("start-up oom, V0 bare traceback", "startup_oom", STOP, of(
        TRACE, '  File "/x/vllm/worker/worker.py", line 9, in determine_num_available_blocks', "    self.model_runner.profile_run()",
        f"torch.OutOfMemoryError: {OOM}")),
    ("illegal access", "cuda_fault", RESTART, of(*UP, v33(HEAD), v33("RuntimeError: CUDA error: an illegal memory access was encountered"))),
    ("illegal access, native only", "cuda_fault", RESTART, of(
        *UP, "[rank1]:[E626 23:10:17.48 ProcessGroupNCCL.cpp:1896] [PG ID 2 PG GUID 3 Rank 1] Process group watchdog thread terminated "
        "with exception: CUDA error: an illegal memory access was encountered", "terminate called after throwing an instance of 'c10::DistBackendError'")),
    ("what() of an abort", "cuda_fault", RESTART, of(OK, "terminate called after throwing an instance of 'c10::Error'", "  what():  CUDA error: an illegal memory access was encountered")),
    ("misaligned address, JSON", "cuda_fault", RESTART, of(as_json(HEAD, exc_info=f"{TRACE}\ntorch.AcceleratorError: CUDA error: misaligned address"))),
    ("triton fault", "cuda_fault", RESTART, of(*UP, v33(HEAD), v33("RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered"))),
    ("triton, other", "cuda_fault", RESTART, of(*UP, v33(HEAD), v33("RuntimeError: Triton Error [CUDA]: invalid argument"))),
    ("cublas failed", "cuda_fault", RESTART, of(OK, "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(`")),
    ("fault while loading a LoRA", "cuda_fault", RESTART, of(*UP, v33("Invocation of add_lora method failed"), v33("RuntimeError: CUDA error: device-side assert triggered"), v33(HEAD))),
    ("nvlink", "cuda_hw", FAILOVER, of(*UP, v33(HEAD), v33("torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution"))),
    ("ecc beats oom", "cuda_hw", FAILOVER, of(*UP, v33(HEAD), v33(f"torch.OutOfMemoryError: {OOM}"), v33("RuntimeError: CUDA error: uncorrectable ECC error encountered"))),
    ("no gpu", "cuda_init", FAILOVER, of(*BEGIN, TRACE, "RuntimeError: No CUDA GPUs are available")),
    ("no device type", "cuda_init", FAILOVER, of(TRACE, "RuntimeError: Failed to infer device type")),
    ("fabric manager", "cuda_init", FAILOVER, of(*BEGIN, TRACE, "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before "
     "calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized")),
    ("0.9 TP engine death", "engine_dead_v1", RESTART, of(OK, v8(HEAD), v8(TRACE), v8("IndexError: list index out of range"), v8("AsyncLLM output_handler failed.", "async_llm.py:399"))),
    ("engine dead, nothing else (0.20)", "engine_dead_v1", RESTART, of(*UP, api("AsyncLLM output_handler failed."), api(TRACE), api(DEAD), "INFO:     Shutting down")),
    ("fatal error, then the process ends", "engine_dead_v1", RESTART, of(
        *UP, v33(HEAD), v33("KeyError: 'x'"), api("[shutdown] MPClient: engine core exited unexpectedly; starting cleanup", "core_client.py:839", "WARNING"))),
    ("background loop stopped", "engine_dead_v0", RESTART, of(OK, "ERROR:    Exception in ASGI application", TRACE, "vllm.engine.async_llm_engine.AsyncEngineDeadError: Background loop is stopped.")),
    ("mq dead", "engine_dead_v0", RESTART, of(v0("AsyncLLMEngine has failed, terminating server process", "launcher.py:99", "CRITICAL"))),
    ("engine process killed, 0.18", "engine_proc_died", RESTART, of(*UP, api("Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.", "core_client.py:598"), api(DEAD))),
    ("engine process killed, several servers", "engine_proc_died", RESTART, of(*UP, TRACE, "RuntimeError: Engine core process EngineCore_DP1 died unexpectedly.")),
    ("the engine alone was terminated", "engine_proc_died", RESTART, of(
        *UP, v33("[shutdown] EngineCore: trigger received signal=SIGTERM", "core.py:1455", "INFO"),
        api("[shutdown] MPClient: engine core exited unexpectedly; starting cleanup", "core_client.py:839", "WARNING"),
        api("AsyncLLM output_handler failed."), api(DEAD), "INFO:     Shutting down")),
    ("worker killed", "worker_died", RESTART, of(*UP, v33("Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", "multiproc_executor.py:316"), v33(HEAD), api(DEAD))),
    ("ray worker", "worker_died", RESTART, of(*UP, v33("RayWorkerProc rank=3 died unexpectedly, shutting down executor.", "ray_executor_v2.py:523"))),
    ("step timeout", "step_timeout", RESTART, of(*UP, v33(SHM, "shm_broadcast.py:681", "INFO"), v33(HEAD), v33("TimeoutError: RPC call to execute_model timed out."), api(DEAD))),
    ("iteration timeout, V0", "step_timeout", RESTART, of(v0("Engine iteration timed out. This should never happen!"), v0("Engine background task failed"))),
    ("blocked queue, 0.5", "shm_stall", ALERT, of(*UP, *[v0("No available block found in 60 second.", "shm_broadcast.py:404", "WARNING")] * 2)),
    ("V0 stall", "engine_stall", RESTART, of(READY, v0_stats(2, 9.0), *[v0_stats(1)] * 6)),
    ("deferred requests only", "scheduler_deadlock", RESTART, of(*UP, *[stats(0.0, 0.0, 0, 0, "Deferred: 4 reqs, ", "DEBUG")] * 4)),
    ("preemption, V0", "kv_pressure", ALERT, of(OK, v0("Sequence group cmpl-1 is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache space.", "scheduler.py:1242", "WARNING"))),
    ("nccl heartbeat", "nccl_timeout", RESTART, of(OK, "[rank0]:[F1125 03:00:00.1 ProcessGroupNCCL.cpp:1554] [PG ID 0 Rank 0] [PG ID 0 PG GUID 0 Rank 0] Heartbeat monitor timed out! Process will be terminated")),
    ("nccl peer", "nccl_error", RESTART, of(*UP, v33(HEAD), v33("RuntimeError: NCCL error: remote process exited or there was a network error"))),
    ("kv, V0", "startup_kv_insufficient", STOP, of(TRACE, "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache (36000). Try increasing")),
    ("kv, other spelling", "startup_kv_insufficient", STOP, of(v33("EngineCore failed to start."), v33(
        "ValueError: To serve at least one request with the models's max seq len (32768), (4.50 GiB KV cache is needed, which is larger than the available KV cache memory (2.10 GiB)."), INIT)),
    ("auto-fit", "startup_kv_insufficient", STOP, of(v33("EngineCore failed to start."), v33("ValueError: Cannot auto-fit max_model_len: not even one block fits"), INIT)),
    ("vram busy, 0.9", "startup_vram_busy", WAIT, of(*BEGIN, v8("EngineCore failed to start."), v8("ValueError: Free memory on device (10.1/79.18 GiB) on startup is less than desired GPU memory utilization (0.9, 71.26 GiB). Decrease"), INIT)),
    ("vram busy, 0.33", "startup_vram_busy", WAIT, of(v33("EngineCore failed to start."), v33("ValueError: Free memory on device cuda:1 (10.1/79.18 GiB) on startup is less than the engine's budget after excluding the weight cache"), INIT)),
    ("profile race, V0", "startup_profile_race", WAIT, of(TRACE, "AssertionError: Error in memory profiling. This happens when the GPU memory was not properly cleaned up")),
    ("port, uvicorn", "port_in_use", STOP, of("INFO:     Started server process [1]", "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use")),
    ("model path", "model_not_found", STOP, of(*BEGIN, "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
     "  Value error, Invalid repository ID or local directory specified: '/models/nope'.")),
    ("unauthorized repository that does not exist", "model_not_found", STOP, of("huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. (Request ID: Root=1)",
     "OSError: a/b is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'")),
    ("bad token", "hf_auth", STOP, of(TRACE, "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/api/whoami-v2")),
    ("hub offline", "hf_network", RESTART, of(TRACE, "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the files on the Hub", "OSError: We couldn't connect to 'https://huggingface.co' to load the files")),
    ("hub 504", "hf_network", RESTART, of("huggingface_hub.errors.HfHubHTTPError: 504 Server Error: Gateway Time-out for url: https://huggingface.co/api/models/a/b")),
    ("bad value", "bad_args", STOP, of("usage: vllm serve [model_tag] [options]", "vllm serve: error: argument --max-num-seqs: invalid int value: 'many'")),
    ("old entry point's parser", "bad_args", STOP, of("api_server.py: error: unrecognized arguments: --enable-flash-attn")),
    ("pydantic", "bad_args", STOP, of(*BEGIN, TRACE, "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig", "max_num_seqs", "  Input should be greater than or equal to 1")),
    ("architecture", "bad_args", STOP, of(TRACE, "ValueError: Model architectures ['FooForCausalLM'] are not supported for now. Supported architectures: dict_keys([])")),
    ("longer than the model", "bad_args", STOP, of(TRACE, "ValueError: User-specified max_model_len (999999) is greater than the derived max_model_len")),
    ("dynamo", "compile_failure", STOP, of(*BEGIN, v33("EngineCore failed to start."), v33("torch._dynamo.exc.BackendCompilerFailed: backend='<vllm>' raised:"), INIT)),
    ("permission", "fs_error", STOP, of(*BEGIN, TRACE, "PermissionError: [Errno 13] Permission denied: '/root/.cache/huggingface/hub'")),
    ("bus error", "fs_error", STOP, of(*BEGIN, "Fatal Python error: Bus error")),
    ("oom, JSON with a ready server", "oom_runtime", RESTART, of(
        as_json("non-default args: {}", "INFO", "vllm.entrypoints.serve.startup"), as_json("Application startup complete.", "INFO", "uvicorn.error"),
        as_json("WorkerProc hit an exception.", "ERROR", "vllm.v1.executor.multiproc_executor", f"{TRACE}\ntorch.OutOfMemoryError: {OOM}", "Worker_TP0"),
        as_json(HEAD, exc_info=f"{TRACE}\nRuntimeError: Worker failed with error 'x'"))),
    ("oom, docker json-file", "oom_runtime", RESTART, of(*(json.dumps({"log": line + "\n", "stream": "stdout", "time": "t"}) for line in (v33(HEAD), v33(f"torch.OutOfMemoryError: {OOM}"))))),
    ("start-up oom, V0 engine process", "startup_oom", STOP, of(
        v0(OOM, "engine.py:366"), v0(TRACE, "engine.py:366"), v0('  File "/x/vllm/worker/worker.py", line 9, in determine_num_available_blocks', "engine.py:366"),
        v0(f"torch.OutOfMemoryError: {OOM}", "engine.py:366"), "Process SpawnProcess-1:", TRACE, f"torch.OutOfMemoryError: {OOM}",
        "RuntimeError: Engine process failed to start. See stack trace for the root cause.")),
    ("ready timeout, worker oom is the cause", "startup_oom", STOP, of(*BEGIN, worker("WorkerProc failed to start."), worker(f"torch.OutOfMemoryError: {OOM}"),
     "TimeoutError: Timed out waiting for engine core processes to start. Waited 600s")),
    ("unknown start-up failure", "startup_failed", RESTART, of(*BEGIN, v33("EngineCore failed to start."), v33("KeyError: 'rope'"), INIT)),
    ("wake, TP", "wake_failed", RESTART, of(*UP, worker("WorkerProc hit an exception."), worker("RuntimeError: CUDA Error: out of memory at /w/csrc/cumem_allocator.cpp:62"), v33("Invocation of wake_up method failed"))),
    ("second start after a failed one", "startup_vram_busy", WAIT, of(*UP, v33(HEAD), v33(f"torch.OutOfMemoryError: {OOM}"), *BEGIN,
     v33("EngineCore failed to start."), v33("ValueError: Free memory on device cuda:0 (0.4/79.18 GiB) on startup is less than desired GPU memory utilization (0.9, 71.26 GiB)."), INIT)),
    ("failure after a bar without a newline", "engine_dead_v1", RESTART, of(
        *UP, "(EngineCore pid=377) \rLoading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00,  2.68it/s]" + v33(HEAD), v33("KeyError: 1"))),
    ("failure before our stop", "oom_runtime", RESTART, of(*UP, v33(HEAD), v33(f"torch.OutOfMemoryError: {OOM}"), api("[shutdown] API server: shutdown triggered", "launcher.py:254", "INFO"))),
)

KERNEL: tuple[tuple[str, str, str, str], ...] = (
    ("cgroup oom by memcg", "host_oom_kill", RESTART, of(
        "[88212.1] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/system.slice/vllm.service,task_memcg=/system.slice/vllm.service,task=python3,pid=4455,uid=0",
        "[88212.2] Memory cgroup out of memory: Killed process 4455 (python3) total-vm:2000000kB, anon-rss:53799012kB, file-rss:0kB")),
    ("large python", "host_oom_kill", RESTART, of("Nov 29 14:41:57 gpu-host kernel: [88212.2] Out of memory: Killed process 4455 (python3) total-vm:165000048kB, anon-rss:53799012kB, file-rss:0kB")),
    ("kmsg", "host_oom_kill", RESTART, of("6,1234,88212000000,-;Out of memory: Killed process 77 (VLLM::Worker_TP) total-vm:165000048kB, anon-rss:1kB")),
    ("pt_main_thread, dmesg -T", "host_oom_kill", RESTART, of("[Sat Nov 29 14:41:57 2026] Out of memory: Killed process 77 (pt_main_thread) total-vm:1kB")),
    ("xid 79", "xid_node", FAILOVER, of("[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", "[1.1] NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.")),
    ("xid 79 wins over its echoes", "xid_node", FAILOVER, of("[1.0] NVRM: Xid (PCI:0000:3b:00): 45, pid=1, name=VLLM::EngineCor, Ch 1", "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "[1.2] NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=VLLM::EngineCor")),
    ("driver asks for a reset", "xid_reset", FAILOVER, of("[1.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=VLLM::EngineCor, MMU Fault", "[1.1] NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")),
    ("driver asks for a reboot", "xid_node", FAILOVER, of("4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 154, pid=2, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x2 (Node Reboot Required)")),
    ("driver withdraws", "xid_app", RESTART, of("[1.0] NVRM: Xid (PCI:0000:3b:00): 13, pid=1, name=python3, Graphics Exception", "[1.0] NVRM: Xid (PCI:0000:3b:00): 95, pid=1", "[1.1] NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")),
    ("gsp timeout, journal", "xid_reset", FAILOVER, of("Nov 29 14:41:57 gpu-host kernel: NVRM: Xid (PCI:0000:3b:00): 119, pid=9, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU0 GSP!")),
    ("contained ecc, MIG", "xid_app", RESTART, of("[1.0] NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 94, pid=7, name=VLLM::EngineCor, Contained: SM (0x1)")),
    ("no prefix", "xid_app", RESTART, of("NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python3, MMU Fault")),
    ("own workflow", "xid_other", ALERT, of("[1.0] NVRM: Xid (PCI:0000:3b:00): 149, pid=7, NETIR_LINK_EVT")),
    ("unknown xid", "xid_other", ALERT, of("[1.0] NVRM: Xid (PCI:0000:3b:00): 999, something new")),
    ("double bit error", "xid_reset", FAILOVER, of("[1.0] NVRM: Xid (PCI:0000:3b:00): 48, pid=7, An uncorrectable double bit error (DBE) has been detected")),
    ("mixed journal", "host_oom_kill", RESTART, of(*["Nov 29 14:41:57 h vllm[5]: " + OK] * 5, "Nov 29 14:41:58 h kernel: Out of memory: Killed process 6 (VLLM::EngineCor) total-vm:1kB")),
)

QUOTES = (HEAD, f"torch.OutOfMemoryError: {OOM}", DEAD, "CUDA error: an illegal memory access was encountered",
          "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "vllm serve: error: unrecognized arguments: --x")

BENIGN: tuple[tuple[str, str], ...] = (
    *((f"prompt at INFO, old version: {quote[:20]}", of(*UP, v8(f"Received request chatcmpl-1: prompt: 'why: {quote}', params: SamplingParams(n=1)", "logger.py:39", "INFO")))
      for quote in QUOTES),
    *((f"multi-line prompt at INFO: {quote[:20]}", of(*UP, v8("Received request chatcmpl-1: prompt: 'a", "logger.py:39", "INFO"), v8(quote, "logger.py:39", "INFO"), v8("b', params", "logger.py:39", "INFO")))
      for quote in QUOTES),
    *((f"prompt holds a whole record: {quote[:20]}", of(*UP, v33(f"Request chatcmpl-5 JSON body: ERROR 05-06 02:29:07 [core.py:398] {quote}", "request_logger.py:84", "DEBUG")))
      for quote in QUOTES),
    *((f"JSON log of a prompt: {quote[:20]}", of(as_json(f"Received request: 'x\n{quote}'", "INFO", "vllm.entrypoints.serve.utils.request_logger"))) for quote in QUOTES),
    *((f"output at INFO: {quote[:20]}", of(*UP, api(f"Generated response chatcmpl-1: output: '{quote}', finish_reason: stop", "request_logger.py:109", "INFO"))) for quote in QUOTES),
    *((f"output printed bare: {quote[:20]}", of(*UP, f"The log says: {quote}")) for quote in QUOTES),
    *((f"error of one request quotes it: {quote[:20]}", of(*UP, api("Error in chat completion stream generator.", "serving.py:1272"), api(TRACE, "serving.py:1272"), api(quote, "serving.py:1272")))
      for quote in QUOTES),
    ("URL", of(*UP, 'INFO:     192.0.2.7:1 - "GET /v1/EngineCore%20encountered%20a%20fatal%20error.?q=CUDA+out+of+memory HTTP/1.1" 404 Not Found')),
    ("request id in a KeyError", of(*UP, v33("Unexpected error pre-processing request CUDA out of memory"), v33("KeyError: 'torch.OutOfMemoryError: CUDA out of memory'"), v33(f"torch.OutOfMemoryError: {OOM}"))),
    ("LoRA name", of(*UP, api("Loaded new LoRA adapter: name 'EngineDeadError: EngineCore encountered an issue.'", "serving_models.py:9", "INFO"))),
    ("model name", of(api("non-default args: {'model_tag': 'CUDA out of memory', 'served_model_name': ['EngineDeadError']}", "startup.py:96", "INFO"), READY)),
    ("words at the start of a bare output", of(*UP, "CUDA out of memory is a common error.", "Error: CUDA out of memory", "EngineCore encountered a fatal error.")),
    ("words in an odd exception", of(*UP, v33("ValueError: bad prompt given: CUDA out of memory. Tried to allocate"))),
    ("record forged behind a sentence", of(*UP, "please explain this line ERROR 05-06 02:29:07 [core.py:398] EngineCore encountered a fatal error.")),
    ("carriage return in a record", of(*UP, f"INFO 05-06 02:29:07 [logger.py:39] prompt: 'x\rERROR 05-06 02:29:07 [core.py:398] {HEAD}'")),
    ("kernel words in the engine's output", of(*UP, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "[1.0] Out of memory: Killed process 1 (vllm) total-vm:1kB")),
    ("add_lora, TP=1", of(*UP, v33("Invocation of add_lora method failed"), v33(TRACE), v33(f"torch.OutOfMemoryError: {OOM}"), stats(1.0, 9.0, 1, 0))),
    ("clean stop, JSON", of(
        as_json('192.0.2.7:1 - "POST /v1/completions HTTP/1.1" 200', "INFO", "uvicorn.access"), as_json("Shutting down", "INFO", "uvicorn.error"),
        as_json("AsyncLLM output_handler failed.", name="vllm.v1.engine.async_llm", exc_info=f"{TRACE}\n{DEAD}"))),
    ("add_lora, TP=1, JSON", of(as_json("Invocation of add_lora method failed", exc_info=f"{TRACE}\ntorch.OutOfMemoryError: {OOM}"))),
    ("worker error that tokens outlive", of(*UP, worker("WorkerProc hit an exception."), worker(f"torch.OutOfMemoryError: {OOM}"), stats(1.0, 9.0, 1, 0))),
    ("oom of one request in the server", of(*UP, "ERROR:    Exception in ASGI application", TRACE, f"torch.OutOfMemoryError: {OOM}", OK, stats(1.0, 9.0, 1, 0))),
    ("worker exception alone", of(*UP, worker("WorkerProc hit an exception."), worker(TRACE), worker("ValueError: no such adapter"))),
    ("clean stop, 0.33", of(*UP, api("[shutdown] API server: shutdown triggered", "launcher.py:254", "INFO"), api("[shutdown] Process manager: force killing remaining processes count=1", "utils.py:620", "WARNING"), api("AsyncLLM output_handler failed."), api(DEAD))),
    ("clean stop, old", of(OK, v8("Shutting down FastAPI HTTP server.", "launcher.py:74", "INFO"), v8("AsyncLLM output_handler failed.", "async_llm.py:399"), v8(DEAD, "async_llm.py:399"))),
    ("Ctrl+C reaches the engine first", of(*UP, v33("[shutdown] EngineCore: trigger received signal=SIGINT", "core.py:1455", "INFO"), api("AsyncLLM output_handler failed."), api(DEAD),
     api("[shutdown] MPClient: engine core exited unexpectedly; starting cleanup", "core_client.py:839", "WARNING"), api("[shutdown] API server: shutdown triggered", "launcher.py:254", "INFO"))),
    ("uvicorn stops, then noise", of(*UP, "INFO:     Shutting down", api("AsyncLLM output_handler failed."), api(DEAD))),
    ("worker ended by the shutdown", of(*UP, v33("Worker proc VllmWorker-0 died unexpectedly (exit code: -15), shutting down executor.", "multiproc_executor.py:316"))),
    ("trouble on the way up", of(*BEGIN, "requests.exceptions.ConnectionError: (MaxRetryError('x (Caused by NameResolutionError(y'))", READY, OK)),
    ("one blocked queue while serving", of(*UP, v33(SHM, "shm_broadcast.py:681", "INFO"), stats(1.0, 9.0, 1, 0), v33(SHM, "shm_broadcast.py:681", "INFO"))),
    ("stall that ended", of(*UP, *[v33(SHM, "shm_broadcast.py:681", "INFO")] * 3, stats(1.0, 9.0, 1, 0))),
    ("deadlock that ended", of(*UP, *[stats(0.0, 0.0, 0, 3, level="DEBUG")] * 5, stats(1.0, 9.0, 1, 0))),
    ("two slow starts of the queue", of(*UP, *[stats(0.0, 0.0, 0, 3, level="DEBUG")] * 2)),
    ("idle", of(*UP, *[stats(0.0, 0.0, 0, 0, level="DEBUG")] * 9)),
    ("V0 stale gauges are V1's", of(*UP, *[stats(0.0, 0.0, 5, 1, level="DEBUG")] * 9)),
    ("context length, 400", of(*UP, api("Error in preprocessing prompt inputs", "serving_chat.py:200"), api("ValueError: This model's maximum context length is 8192 tokens.", "serving_chat.py:200"))),
    ("serving, files missing for one LoRA", of(*UP, "ERROR:    Exception in ASGI application", TRACE, "OSError: x/y is not a local folder and is not a valid model identifier", "PermissionError: [Errno 13] Permission denied")),
    ("hub retry at start", of(*BEGIN, "'(MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Caused by NameResolutionError(x)\"))' thrown while requesting HEAD https://huggingface.co", "Retrying in 1s [Retry 1/5].", READY)),
    ("torch warnings", of(*UP, "[rank0]:[W1201 18:00:00.1 ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not called before program exit", "W0528 1:1 torch/_dynamo/convert_frame.py:9] torch._dynamo.exc. hit config.recompile_limit")),
    ("other program's xid", "[1.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=9, name=Xorg, MMU Fault\n"),
    ("ignored xids", of(*(f"[1.0] NVRM: Xid (PCI:0000:3b:00): {n}, pid=7, name=VLLM::EngineCor" for n in (43, 45, 63, 92)))),
    ("small python script", "[1.0] Out of memory: Killed process 7 (python3) total-vm:900000kB, anon-rss:800000kB\n"),
    ("oom-kill of another", "[1.0] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/user.slice,task=chrome,pid=7,uid=0\n"),
    ("chatty kernel", of("[1.0] NVRM: loading NVIDIA UNIX Open Kernel Module", "[1.1] vllm[9]: segfault", "[1.2] usb 3-2: reset high-speed USB device")),
    ("empty", ""),
    ("text that is no log", "hello\nworld\n"),
)

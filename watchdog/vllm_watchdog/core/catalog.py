"""What every class means to a human: title, severity, action and what to change, in English and Chinese.

The only place that ties a class to an action; signatures say how a class is recognised, detectors how it is sampled.
The actions are the policy's default: it still checks who holds the memory and how often it has tried.  Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    NONE = "none"
    WARNING = "warning"
    FATAL = "fatal"


class Action(StrEnum):
    RESTART = "restart"
    FAILOVER = "failover"
    CONFIG_ERROR_STOP = "config-error-stop"
    WAIT_VRAM = "wait-vram"
    ALERT_ONLY = "alert-only"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Text:
    en: str
    zh: str

    def of(self, language: str) -> str:
        """`language`: zh, or anything else for English."""
        return self.zh if language == "zh" else self.en

    @property
    def own_zh(self) -> str:
        """The Chinese, empty where it is the English one."""
        return "" if self.zh == self.en else self.zh


Words = Text | str      # a sentence of ours, or what somebody else wrote: it stays as it is


def both(words: Words) -> Text:
    return words if isinstance(words, Text) else Text(words, words)


@dataclass(frozen=True, slots=True)
class Entry:
    title: Text
    severity: Severity
    action: Action
    advice: tuple[Text, ...]


T = Text
LESS_BATCH = T("Lower --max-num-batched-tokens (8192, then 4096) and --max-num-seqs (64, then 16).",
               "调低 --max-num-batched-tokens（8192，再 4096）和 --max-num-seqs（64，再 16）。")
LESS_UTIL = T("Lower --gpu-memory-utilization by 0.05 to leave room for activations.",
              "把 --gpu-memory-utilization 调低 0.05，给激活留出空间。")
MORE_UTIL = T("Raise --gpu-memory-utilization, or use --kv-cache-dtype fp8 or a quantized model.",
              "调高 --gpu-memory-utilization，或用 --kv-cache-dtype fp8 或量化模型。")
SHORTER = T("Set --max-model-len to the estimated maximum length or below (`auto` since 0.14).",
            "把 --max-model-len 设为不超过估计的最大长度（0.14 起可用 auto）。")
NEIGHBOUR = T("See who holds the memory with nvidia-smi; stop orphaned VLLM:: processes before the next start.",
              "用 nvidia-smi 查看谁占用显存；下次启动前先结束遗留的 VLLM:: 进程。")
EAGER = T("Try --enforce-eager to leave compilation and CUDA graphs out.",
    "试试 --enforce-eager，跳过编译和 CUDA graph。")
POISON = T("If it returns with the same request, keep that request out; read the dumped scheduler output.",
           "若同一请求再次触发，先拦下该请求；查看日志中转储的调度输出。")
REPLACE = T("Drain the host, reset the GPU or reboot; replace the card if it returns.",
            "排空主机，重置 GPU 或重启；若再次出现则更换显卡。")
KERNEL = T("Read the kernel log of that minute for Xid, OOM killer or segfault.",
    "查看当时的内核日志：Xid、OOM killer、段错误。")
STACKS = T("Read the stack dump in the evidence folder; with TP/PP > 1 check NCCL and NVLink.",
           "查看证据目录中的堆栈；TP/PP > 1 时检查 NCCL 与 NVLink。")
HANG = T("If it returns, give the stacks and the vLLM version to its maintainers; meanwhile try --enforce-eager or another "
         "--attention-backend, one at a time.",
         "若再次发生，把堆栈和 vLLM 版本反馈给上游；同时逐项尝试 --enforce-eager 或更换 --attention-backend。")
SHM = T("Give the container more /dev/shm (--shm-size 16g or --ipc=host); set NCCL_DEBUG=INFO.",
        "为容器增大 /dev/shm（--shm-size 16g 或 --ipc=host）；设置 NCCL_DEBUG=INFO。")
HOST_MEM = T("Lower --api-server-count or --cpu-offload-gb (--swap-space up to 0.16), or raise the cgroup's MemoryMax.",
             "调低 --api-server-count 或 --cpu-offload-gb（0.16 及以前还有 --swap-space），或提高 cgroup 的 MemoryMax。")
FLAGS = T("Run `llm-watchdog doctor`: it names the flags that this vLLM version does not know. Take them out.",
          "运行 `llm-watchdog doctor`，它会列出当前 vLLM 版本不认识的参数；去掉这些参数。")
FIRST_LINE = T("Read the first traceback above the verdict's lines: it holds the root cause.",
               "阅读结论行之前的第一个 traceback：根因在那里。")
PLANNED = T("Plan a drain and a restart; upgrade vLLM if a leak of this version is known.",
            "安排排空并重启；若该版本有已知泄漏则升级 vLLM。")

WARM_UP = T("Lower --max-num-seqs: the warm-up runs that many dummy requests.",
            "调低 --max-num-seqs：预热会运行同样数量的假请求。")
FREE_SHARE = T("If nobody holds it, lower --gpu-memory-utilization (its default rose to 0.92 in 0.20).",
               "若无人占用，调低 --gpu-memory-utilization（0.20 起默认升至 0.92）。")
PRESSED = T("Lower --max-num-seqs, or give more KV cache: --gpu-memory-utilization, --kv-cache-dtype fp8.",
            "调低 --max-num-seqs，或增大 KV cache：--gpu-memory-utilization、--kv-cache-dtype fp8。")
MEMORY_MAX = T("Or raise MemoryMax of the service's cgroup (cgroup.txt shows it), if the host has the memory.",
               "若主机内存充足，也可提高服务 cgroup 的 MemoryMax（现值见 cgroup.txt）。")
READY = T("Raise VLLM_ENGINE_READY_TIMEOUT_S if the model is large or its storage slow.",
          "模型大或存储慢时，调高 VLLM_ENGINE_READY_TIMEOUT_S。")
PORT = T("Stop the process on it (ss -ltnp), or change the engine's port.",
         "结束占用者（ss -ltnp），或更换引擎端口。")
MODEL = T("Correct the model's path or repository name.", "更正模型路径或仓库名。")
TERMS = T("Accept the model's terms and give HF_TOKEN to the engine.", "接受模型条款，并为引擎提供 HF_TOKEN。")
DISK = T("Free disk space or correct the permissions of the model cache (HF_HOME) and /dev/shm.",
         "清理磁盘，或修正模型缓存（HF_HOME）与 /dev/shm 的权限。")

_F, _W = Severity.FATAL, Severity.WARNING
A = Action


def _entry(en: str, zh: str, severity: Severity, action: Action, *advice: Text) -> Entry:
    return Entry(T(en, zh), severity, action, advice)


CATALOG: dict[str, Entry] = {
    "none": _entry("no failure that I know", "没有已知的故障", Severity.NONE, A.IGNORE),
    "snapshot": _entry("A snapshot that an operator asked for", "人工触发的现场快照", Severity.NONE, A.IGNORE),
    # engine death
    "engine_dead_v1": _entry("The engine died in a step", "引擎在推理步骤中崩溃", _F, A.RESTART, FIRST_LINE, POISON),
    "engine_dead_v0": _entry("The engine's background loop died", "引擎后台循环已停止", _F, A.RESTART, FIRST_LINE,
        T("Upgrade: V0 servers linger after this with every request failing.",
        "请升级：V0 服务此后会一直存活但请求全部失败。")),
    "engine_proc_died": _entry("The engine process was ended from outside", "引擎进程被外部终止", _F, A.RESTART,
        KERNEL),
    "worker_died": _entry("A worker process died", "worker 进程异常退出", _F, A.RESTART, KERNEL, SHM),
    "startup_failed": _entry("The engine did not start", "引擎启动失败", _F, A.RESTART, FIRST_LINE),
    "unexpected_exit": _entry("The server exited unasked, without a line that explains it",
        "服务进程意外退出，日志中没有原因", _F,
        A.RESTART, KERNEL),
    # memory
    "oom_runtime": _entry("GPU out of memory while serving", "服务中显存不足", _F, A.RESTART, LESS_BATCH, LESS_UTIL,
        NEIGHBOUR),
    "startup_oom": _entry("GPU out of memory while starting", "启动时显存不足", _F, A.CONFIG_ERROR_STOP,
        LESS_UTIL, WARM_UP, NEIGHBOUR),
    "host_oom_kill": _entry("The kernel's OOM killer ended a process of the engine", "内核 OOM killer 杀死了引擎进程",
        _F,
        A.RESTART, HOST_MEM, NEIGHBOUR),
    "startup_kv_insufficient": _entry("The KV cache can never fit", "KV cache 放不下，引擎无法启动", _F,
        A.CONFIG_ERROR_STOP, SHORTER, MORE_UTIL, NEIGHBOUR),
    "startup_vram_busy": _entry("The GPU's memory is not free for the start", "启动时显存被占用", _F, A.WAIT_VRAM,
        NEIGHBOUR, FREE_SHARE),
    "startup_profile_race": _entry("Another process released GPU memory during profiling",
        "显存分析期间有其他进程释放显存", _F,
        A.WAIT_VRAM, NEIGHBOUR, T("Start the engines of one GPU one after another.", "同一 GPU 上的引擎应依次启动。")),
    "sleep_failed": _entry("The standby could not be put to sleep", "备用引擎无法进入休眠", _F, A.RESTART,
        T("See that --enable-sleep-mode is set and the host has room for the weights.",
          "确认已设置 --enable-sleep-mode，且主机内存足以容纳权重。")),
    "standby_lost": _entry("The sleeping standby is gone", "休眠的备用引擎已丢失", _W, A.ALERT_ONLY,
        T("The next failover is a cold start. Use failover and failback in a quiet hour to have it back.",
          "下一次切换将是冷启动；可在空闲时段执行 failover 再 failback 以恢复。")),
    "wake_failed": _entry("Waking from sleep mode failed; the engine may be half mapped",
        "休眠唤醒失败，显存可能只恢复了一半", _F,
        A.RESTART, NEIGHBOUR, T("Keep the sleeping engine's memory free on its GPU, or use standby = \"cold\".",
          "为休眠引擎预留显存，或使用 standby = \"cold\"。")),
    "kv_pressure": _entry("Requests are preempted: the KV cache is full", "KV cache 不足，请求被抢占", _W, A.ALERT_ONLY,
        PRESSED),
    "vram_high": _entry("GPU memory is over its limit", "显存超过告警阈值", _W, A.ALERT_ONLY, LESS_BATCH, NEIGHBOUR),
    "vram_degrade": _entry("GPU memory stays over its limit: fewer requests, then the backup",
        "显存持续过高：先降并发，再切换到备用引擎", _F, A.FAILOVER,
        LESS_BATCH, LESS_UTIL),
    "vram_growth": _entry("GPU memory grows over the level after warm-up", "显存超出预热后的水平并持续增长", _W,
        A.ALERT_ONLY,
        PLANNED, LESS_UTIL),
    "vram_held": _entry("GPU memory did not come back after the engine ended", "引擎退出后显存未释放", _F,
        A.WAIT_VRAM, NEIGHBOUR),
    "rss_high": _entry("Host memory of the engine is over its limit", "引擎占用的主机内存超过告警阈值", _W, A.ALERT_ONLY,
        HOST_MEM),
    "rss_leak": _entry("Host memory of the engine keeps growing", "引擎占用的主机内存持续增长（疑似泄漏）", _W,
        A.ALERT_ONLY, PLANNED, HOST_MEM),
    "fd_leak": _entry("Open files of the engine keep growing", "引擎打开的文件数持续增长", _W, A.ALERT_ONLY, PLANNED,
        T("Raise the limit of open files (LimitNOFILE in systemd, ulimit -n) until the leak is found.",
        "找到泄漏之前，先提高打开文件数上限（systemd 的 LimitNOFILE，或 ulimit -n）。")),
    "preemptions": _entry("Requests are preempted again and again: their work is done twice",
        "请求反复被抢占，重复计算", _W, A.ALERT_ONLY, PRESSED),
    "oom_rate": _entry("The service runs out of GPU memory again and again", "服务反复显存不足", _W, A.ALERT_ONLY,
        LESS_BATCH, LESS_UTIL),
    # hangs
    "step_timeout": _entry("A step did not answer in time", "推理步骤超时", _F, A.RESTART, STACKS,
        T("If steps are really that long, raise VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS.",
        "若确实需要更久，调高 VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS。")),
    "shm_stall": _entry("The engine waits for its workers for minutes", "引擎等待 worker 超过一分钟", _W,
        A.ALERT_ONLY, STACKS, SHM),
    "engine_stall": _entry("The engine makes no progress", "引擎不再产出 token", _F, A.RESTART, STACKS, HANG),
    "engine_hang": _entry("The engine hangs: no token comes, and its counters stand still",
        "引擎卡死：探测请求无响应，计数器停滞", _F, A.RESTART,
        STACKS, HANG),
    "api_unreachable": _entry("The API server refuses /health or answers it with 5xx",
        "API 服务拒绝 /health 或返回 5xx", _F, A.RESTART, FIRST_LINE),
    "scheduler_deadlock": _entry("Requests wait and none runs", "请求只排队不执行（调度死锁）", _F, A.RESTART,
        T("Reject prompts larger than the KV cache: lower --max-model-len.",
        "拒绝超过 KV cache 的请求：调低 --max-model-len。")),
    "nccl_timeout": _entry("A collective operation timed out", "NCCL 集合通信超时", _F, A.RESTART, STACKS, SHM),
    "nccl_error": _entry("NCCL failed", "NCCL 出错", _F, A.RESTART, SHM,
        T("Check the fabric: nvidia-smi topo -m, the fabric manager, NCCL_P2P_DISABLE=1 as a test.",
          "检查互联：nvidia-smi topo -m、fabric manager，可用 NCCL_P2P_DISABLE=1 试验。")),
    # GPU
    "cuda_fault": _entry("A CUDA kernel failed; the context is lost", "CUDA kernel 出错，上下文已失效", _F, A.RESTART,
        POISON,
        T("Set CUDA_LAUNCH_BLOCKING=1 to find the kernel; try another --attention-backend.",
          "设置 CUDA_LAUNCH_BLOCKING=1 定位出错的 kernel；换一个 --attention-backend。")),
    "cuda_hw": _entry("The GPU reports a hardware error", "GPU 硬件错误", _F, A.FAILOVER, REPLACE),
    "cuda_init": _entry("CUDA can't be initialized", "CUDA 无法初始化", _F, A.FAILOVER,
        T("Driver and library must match: reboot after an update; check the fabric manager and CUDA_VISIBLE_DEVICES.",
          "驱动与库版本须一致：更新驱动后重启；检查 fabric manager 与 CUDA_VISIBLE_DEVICES。")),
    "xid_app": _entry("The driver faults the engine's work (Xid)", "驱动报告应用错误（Xid）", _F, A.RESTART, POISON),
    "xid_reset": _entry("The GPU needs a reset (Xid)", "GPU 需要重置（Xid）", _F, A.FAILOVER, REPLACE),
    "xid_node": _entry("The GPU is lost until the host reboots (Xid)", "GPU 掉卡，需重启主机（Xid）", _F, A.FAILOVER,
        REPLACE),
    "xid_other": _entry("The driver reports an Xid with a workflow of its own", "驱动报告需专门处理的 Xid", _W,
        A.ALERT_ONLY, REPLACE),
    "gpu_driver_unresponsive": _entry("The GPU driver does not answer", "GPU 驱动无响应", _F, A.FAILOVER, REPLACE),
    # start
    "startup_timeout": _entry("The engine was not ready in vLLM's own time", "引擎未在 vLLM 限时内就绪", _F, A.RESTART,
        READY),
    "load_timeout": _entry("The engine was not ready within load_timeout_s", "引擎未在 load_timeout_s 内就绪", _F,
        A.RESTART,
        T("Raise load_timeout_s, or put the weights on local disk.", "调高 load_timeout_s，或把权重放到本地磁盘。"),
        EAGER),
    "port_in_use": _entry("The port is taken", "端口被占用", _F, A.CONFIG_ERROR_STOP, PORT),
    "port_stranger": _entry("A process that is not ours answers on the engine's port", "引擎端口被其他进程占用并应答",
        _F,
        A.CONFIG_ERROR_STOP, T("Stop the named PID: with SO_REUSEPORT both would share the connections.",
          "结束该 PID：SO_REUSEPORT 会让两者分走连接。")),
    "model_not_found": _entry("The model does not exist there", "找不到模型", _F, A.CONFIG_ERROR_STOP, MODEL),
    "hf_auth": _entry("Hugging Face refuses access to the model", "Hugging Face 拒绝访问该模型", _F,
        A.CONFIG_ERROR_STOP, TERMS),
    "hf_network": _entry("Hugging Face can't be reached", "无法连接 Hugging Face", _F, A.RESTART,
        T("Download the model once and serve its local path with HF_HUB_OFFLINE=1.",
        "预先下载模型，用本地路径并设 HF_HUB_OFFLINE=1。")),
    "bad_args": _entry("vLLM refuses its arguments", "vLLM 拒绝启动参数", _F, A.CONFIG_ERROR_STOP, FLAGS),
    "compile_failure": _entry("Compilation failed", "编译失败", _F, A.CONFIG_ERROR_STOP,
        T("Remove ~/.cache/vllm/torch_compile_cache and try once more.",
        "删除 ~/.cache/vllm/torch_compile_cache 后再试一次。"), EAGER),
    "fs_error": _entry("The file system refuses", "文件系统错误（磁盘满或无权限）", _F, A.CONFIG_ERROR_STOP, DISK),
    "spawn_failed": _entry("The engine's command can't be started", "无法启动引擎命令", _F, A.CONFIG_ERROR_STOP,
        T("Correct engines.NAME.command: an executable file, by its full path.",
        "更正 engines.NAME.command：可执行文件的完整路径。")),
    # lifecycle
    "orphan_procs": _entry("Processes of an ended engine live on", "已退出的引擎残留孤儿进程", _W, A.ALERT_ONLY,
        NEIGHBOUR),
    "shutdown_stuck": _entry("The server does not finish its shutdown", "服务停止过程卡住", _W, A.ALERT_ONLY,
        T("Close the client's connections, or set --shutdown-timeout.", "关闭客户端连接，或设置 --shutdown-timeout。")),
    "exit_stuck": _entry("The engine did not leave within its grace", "引擎未在宽限期内退出", _W, A.ALERT_ONLY, STACKS),
    "wedged": _entry("A process survived SIGKILL: the driver holds it", "进程无法被 SIGKILL 结束，卡在驱动中", _F,
        A.FAILOVER, REPLACE),
    "budget_spent": _entry("The restart budget is spent; held for a human", "重启次数已用尽，等待人工处理", _F,
        A.ALERT_ONLY,
        T("Correct the cause, then `llm-watchdog restart ENGINE`.", "排除原因后运行 `llm-watchdog restart ENGINE`。")),
    "crash_loop": _entry("The engine fails again and again; restarts do not cure it", "引擎反复失败，重启无法解决", _W,
        A.ALERT_ONLY,
        T("Compare the causes with `llm-watchdog incidents`; correct the most frequent one.",
          "用 `llm-watchdog incidents` 比较各次原因，先解决最常见的一个。")),
    "engine_down": _entry("No engine serves", "没有引擎在服务", _F, A.ALERT_ONLY,
        T("Read the incident's timeline: it says what is being waited for. `llm-watchdog status` shows it now.",
          "阅读事件时间线，了解正在等待什么；`llm-watchdog status` 显示当前状态。")),
    "log_lost": _entry("The engine runs without a log: its disk is full", "磁盘已满，引擎在没有日志的情况下运行", _W,
        A.ALERT_ONLY,
        T("Free space on the log disk, then `llm-watchdog restart ENGINE` in a quiet hour.",
          "清理日志磁盘，然后在空闲时段运行 `llm-watchdog restart ENGINE`。")),
    "disk_low": _entry("The disk is almost full", "磁盘空间不足", _W, A.ALERT_ONLY,
        T("Free space for logs, evidence and the model cache.", "为日志、证据和模型缓存腾出空间。")),
}

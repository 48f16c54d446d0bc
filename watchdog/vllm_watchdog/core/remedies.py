"""What to change, as sentences with blanks: `advice` fills them from a case.  Pure data, English and Chinese.

Figures and flags come from vLLM's own texts and parsers, Xids from NVIDIA's Xid catalogue.
"""

from __future__ import annotations

from vllm_watchdog.core.catalog import Text

T = Text

# -- memory of the card
FEWER_TOKENS = T("Set --max-num-batched-tokens {new} (it is {now}): a step's activations take that much less memory.",
                 "设 --max-num-batched-tokens {new}（现为 {now}）：单步激活占用的显存随之减小。")
DEFAULT_TOKENS = T("Set --max-num-batched-tokens {new}: it is not set, and vLLM takes {now} on a card of this size.",
                   "设 --max-num-batched-tokens {new}：当前未设置，vLLM 在这种显卡上默认取 {now}。")
FEWER_SEQS = T("If it returns, set --max-num-seqs {new} (it is {now}).",
               "若再次发生，设 --max-num-seqs {new}（现为 {now}）。")
DEFAULT_SEQS = T("If it returns, set --max-num-seqs 64: it is not set, and vLLM takes 256, on most 70 GB cards 1024.",
                 "若再次发生，设 --max-num-seqs 64：当前未设置，vLLM 默认 256，多数 70 GB 以上的卡默认 1024。")
WARM_UP_SEQS = T("Set --max-num-seqs {new}: the warm-up ran {now} dummy requests.",
                 "设 --max-num-seqs {new}：预热时跑了 {now} 个假请求。")
CHUNKED = T("Take out --no-enable-chunked-prefill: without chunks a whole prompt is one step.",
            "去掉 --no-enable-chunked-prefill：不分块时整个 prompt 在一步内算完。")
UTIL_TO = T("Set --gpu-memory-utilization {new} (it is {now}): {asked} were asked for and {free} were free. The KV cache "
            "gets {gib} smaller.",
            "设 --gpu-memory-utilization {new}（现为 {now}）：申请 {asked}，只剩 {free}。KV cache 会减少 {gib}。")
UTIL_UNSET = T("Set --gpu-memory-utilization {new} (not set: vLLM takes {now}): {asked} were asked for and {free} were "
               "free. The KV cache gets {gib} smaller.",
               "设 --gpu-memory-utilization {new}（未设置，vLLM 默认 {now}）：申请 {asked}，只剩 {free}。KV cache 会减少 "
               "{gib}。")
UTIL_LESS = T("Set --gpu-memory-utilization {new} (it is {now}), to leave room for activations.",
              "设 --gpu-memory-utilization {new}（现为 {now}），给激活留出空间。")
UTIL_FREE = T("If nobody else needs it, set --gpu-memory-utilization {new} (it is {now}): {free} of {total} were free.",
              "若确实无人占用，设 --gpu-memory-utilization {new}（现为 {now}）：{total} 中只有 {free} 空闲。")
HOLDER = T("Another process holds {gib} of GPU memory: PID {pid}{name}. Stop it, move it, or lower "
           "--gpu-memory-utilization.",
           "另一个进程占用 {gib} 显存：PID {pid}{name}。结束或迁走它，或调低 --gpu-memory-utilization。")
ORPHAN = T("A process of another vLLM holds {gib} of GPU memory: PID {pid}{name}. If its API server is gone it is an "
           "orphan: end it before the next start.",
           "另一个 vLLM 的进程占用 {gib} 显存：PID {pid}{name}。若它的 API server 已不在，就是孤儿进程：下次启动前先结束它"
           "。")

# -- the KV cache
FIT_LEN = T("Set --max-model-len {new}: the longest that vLLM says fits (asked for: {now}).",
            "设 --max-model-len {new}：vLLM 给出的可容纳最大值（当前要求 {now}）。")
UTIL_MORE = T("Or set --gpu-memory-utilization {new} (it is {now}): the KV cache needs {need}, {have} are left for it.",
              "或设 --gpu-memory-utilization {new}（现为 {now}）：KV cache 需要 {need}，只剩 {have}。")
UTIL_UP = T("Set --gpu-memory-utilization {new} (it is {now}): after the weights nothing was left for the KV cache.",
            "设 --gpu-memory-utilization {new}（现为 {now}）：装完权重后没有留给 KV cache 的显存。")
FP8_FITS = T("Or set --kv-cache-dtype fp8: it halves the KV cache to {half}, which fits into {have}.",
             "或设 --kv-cache-dtype fp8：KV cache 减半为 {half}，可放入 {have}。")
FP8_HALVES = T("--kv-cache-dtype fp8 halves the KV cache to {half}: more than the {have} there are, so shorten, too.",
               "--kv-cache-dtype fp8 使 KV cache 减半为 {half}，仍超过现有的 {have}，还需缩短长度。")
SMALLER_MODEL = T("The weights leave no room: a quantized model (AWQ, GPTQ, FP8), or more cards (--tensor-parallel-size).",
                  "权重已占满显存：换量化模型（AWQ、GPTQ、FP8），或用更多卡（--tensor-parallel-size）。")
PRESSED = T("Set --max-num-seqs {new} (it is {now}): fewer requests share the KV cache, and fewer are preempted.",
            "设 --max-num-seqs {new}（现为 {now}）：共享 KV cache 的请求减少，抢占也随之减少。")
PRESSED_FP8 = T("--kv-cache-dtype fp8 doubles the tokens that the KV cache holds.",
                "--kv-cache-dtype fp8 使 KV cache 可容纳的 token 翻倍。")
MODEL_LEN = T("Set --max-model-len {new} or less: the model's own maximum (asked for: {now}).",
              "设 --max-model-len {new} 或更小：这是模型自身的上限（当前要求 {now}）。")

# -- host memory
VICTIM = T("The kernel ended {name}, which held {gib} of host memory. kernel.txt and cgroup.txt say which limit was met.",
           "内核结束了 {name}，当时它占用 {gib} 主机内存。触及的上限见 kernel.txt 与 cgroup.txt。")
LESS_OFFLOAD = T("Set --{flag} {new} (it is {now} GiB): that memory is the host's.",
                 "设 --{flag} {new}（现为 {now} GiB）：这部分占用的是主机内存。")
ONE_API = T("Set --api-server-count 1 (it is {now}): each API server is a process with its own memory.",
            "设 --api-server-count 1（现为 {now}）：每个 API server 都是单独占内存的进程。")
LEAK_HOST = T("Since warm-up host memory grew by {rss} while GPU memory stayed flat: objects of the host side (Python, API "
              "server, tokenizer) are not released. Plan a restart, and look for a known leak of this vLLM version.",
              "预热后主机内存增长 {rss}，显存持平：主机侧对象（Python、API server、tokenizer）未释放。安排重启，并查该 "
              "vLLM 版本的已知泄漏。")
LEAK_BOTH = T("Since warm-up host memory grew by {rss} and GPU memory by {vram}: the KV cache or the allocator does not "
              "give back. Lower --gpu-memory-utilization, and set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
              "预热后主机内存增长 {rss}、显存增长 {vram}：KV cache 或分配器没有归还。调低 --gpu-memory-utilization，并设 "
              "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True。")
LEAK_CARD = T("Since warm-up GPU memory grew by {vram} while host memory stayed flat: the allocator's cache, or another "
              "process on the card. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
              "预热后显存增长 {vram}，主机内存持平：分配器缓存，或同卡的其他进程。设 "
              "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True。")
NO_LEAK = T("Neither host nor GPU memory grew since warm-up: this was a peak of one step, not a leak.",
            "预热后主机内存与显存均未增长：这是单步峰值，不是泄漏。")

# -- requests
LONG_PROMPT = T("A prompt of about {tokens} tokens was in flight: limit it with --max-model-len, or let chunked prefill "
                "cut it (--max-num-batched-tokens 2048 to 8192).",
                "当时有一个约 {tokens} token 的 prompt：用 --max-model-len 限制，或让 chunked prefill 把它切开（"
                "--max-num-batched-tokens 2048 到 8192）。")
MAYBE_PROMPT = T("A prompt of about {tokens} tokens was in flight: if it ends like this again with a long one, limit "
                 "--max-model-len.",
                 "当时有一个约 {tokens} token 的 prompt：若再次在长 prompt 时出现，用 --max-model-len 限制。")
READ_KERNEL = T("Read the end of kernel.txt beside this page (UTC): an OOM kill, an Xid or a segfault of that minute? If "
                "not, a person or a program of this host ended the process (`kill`, a container runtime).",
                "看本目录 kernel.txt 的末尾（UTC）：当时是否有 OOM kill、Xid 或段错误；若都没有，则是本机的人或程序"
                "结束了进程（kill、容器运行时）。")
QUARANTINED = T("The gateway keeps that prompt (content {hash}) from the engines; after correcting the limit clear the "
                "list: see the quarantine in docs/behaviour.md.",
                "网关已拦下该 prompt（内容 {hash}）；调整限制后可清空隔离名单，见 docs/behaviour.md 的 quarantine。")

# -- how it ended
KILLED = T("{who} was ended by signal 9 (SIGKILL), from outside: kernel.txt shows whether the OOM killer did it; if not, "
           "somebody or something on this host did (`kill -9`, a container runtime).",
           "{who} 被信号 9（SIGKILL）从外部结束：先看 kernel.txt 是否为 OOM killer；若不是，则是本机的人或程序（kill -9、容"
           "器运行时）。")
SEGFAULT = T("{who} ended in a segmentation fault (signal 11): a native library failed; kernel.txt names it. Match the "
             "versions of driver, CUDA and torch.",
             "{who} 段错误退出（信号 11）：某个原生库出错，kernel.txt 有库名。核对驱动、CUDA、torch 的版本。")
ABORTED = T("{who} aborted (signal 6): the last lines of log-tail.txt hold the assertion, often of NCCL or CUDA.",
            "{who} 主动中止（信号 6）：断言在 log-tail.txt 末尾，常来自 NCCL 或 CUDA。")
ILLEGAL = T("{who} met an instruction that this CPU lacks (signal 4): install the build for this CPU.",
            "{who} 执行了本机 CPU 不支持的指令（信号 4）：安装与 CPU 匹配的构建。")
BUS = T("{who} ended in a bus error (signal 7): /dev/shm is too small or a disk failed. Raise --shm-size.",
        "{who} 总线错误退出（信号 7）：/dev/shm 太小或磁盘故障。增大 --shm-size。")
READ_STACKS = T("Read stacks.txt beside this page: look for VLLM::EngineCore and its workers; the topmost lines of their "
                "MainThread say what they wait for.",
                "看本目录的 stacks.txt：找 VLLM::EngineCore 及其 worker，MainThread 最上面的几行就是它在等什么。")
OTHER_BACKEND = T("If it returns, give the stacks and the vLLM version to its maintainers; meanwhile try another "
                  "--attention-backend (--enforce-eager is set already).",
                  "若再次发生，把堆栈和 vLLM 版本反馈给上游；同时尝试更换 --attention-backend（--enforce-eager 已设置）。")
DUMPED_STACK = T("vLLM wrote the stack itself: {path}.", "vLLM 自己写了堆栈：{path}。")
READ_END = T("It left by itself, with code {code}: the last lines of its log, above and in log-tail.txt, say why.",
             "它自己以退出码 {code} 退出：原因见其日志末尾（上文及 log-tail.txt）。")
READ_LOG = T("Read log-tail.txt beside this page from its end upwards to the first traceback: it holds the root cause.",
             "从本目录 log-tail.txt 末尾往上找第一个 traceback，根因在那里。")

# -- start
DROP_FLAG = T("Take --{flag} out of args: {hint}.", "从 args 中去掉 --{flag}：{hint}。")
TYPO = T("--{flag} is no flag of this vLLM: did you mean --{near}?", "此 vLLM 没有 --{flag} 参数：是否想写 --{near}？")
UNKNOWN_FLAG = T("Take --{flag} out of args, or correct it: this vLLM has no such flag (`vllm serve --help=all`).",
                 "去掉或更正 --{flag}：此 vLLM 没有该参数（vllm serve --help=all）。")
WRONG_VALUE = T("Set {flag} otherwise: {problem} (it is {value}).", "更正 {flag}：{problem}（现为 {value}）。")
WRONG = T("Set {flag} otherwise: {problem}.", "更正 {flag}：{problem}。")
WRONG_TOO = T("Also wrong: {also}.", "另外：{also}。")
WRONG_SETTINGS = T("Correct args, vLLM says what it lacks: {problem}.", "按 vLLM 的提示更正 args：{problem}。")
DROP_MODULE = T("{module} is gone from vLLM: start it by `vllm serve MODEL` (command = [\"vllm\", \"serve\"]).",
                "vLLM 已移除 {module}：用 vllm serve MODEL 启动（command = [\"vllm\", \"serve\"]）。")
FREE_PORT = T("See who has the port with `ss -ltnp 'sport = :{port}'`, stop it, or give the engine another port.",
              "用 ss -ltnp 'sport = :{port}' 查看谁占用端口，结束它或给引擎换端口。")
MISSING_MODEL = T("Correct the model: {model} is neither a folder of this host nor a repository one may read.",
                  "更正模型：{model} 既不是本机目录，也不是可读的仓库。")
ACCEPT_TERMS = T("Accept the terms of {model} on Hugging Face, and give its account's token to the engine (HF_TOKEN).",
                 "在 Hugging Face 上接受 {model} 的条款，并把该账号的令牌交给引擎（HF_TOKEN）。")
FULL_DISK = T("The disk is full{where}: free space (`df -h`, the model cache HF_HOME, old logs).",
              "磁盘已满{where}：清理空间（df -h、模型缓存 HF_HOME、旧日志）。")
NO_PERMISSION = T("The engine's user may not use {path}: correct its owner or mode, or set HF_HOME elsewhere.",
                  "引擎用户无权访问 {path}：修改属主或权限，或更换 HF_HOME。")
MORE_READY = T("Set VLLM_ENGINE_READY_TIMEOUT_S={new} in the engine's env (it was {now} s), if the model is just slow to "
               "load.",
               "若模型只是加载慢，在引擎 env 中设 VLLM_ENGINE_READY_TIMEOUT_S={new}（当前 {now} 秒）。")

# -- the card itself.  Meaning by number, NVIDIA's Xid catalogue; remedy by class.
XID = T("Xid {xid} on {where}: {meaning}.", "{where} 上的 Xid {xid}：{meaning}。")
XIDS: dict[int, Text] = {
    13: T("a kernel's exception, as a rule an illegal access of the program", "内核异常，多为程序非法访问"),
    31: T("a page fault of the program (illegal address)", "程序访问了非法地址（MMU 缺页）"),
    32: T("a corrupted push buffer: driver, PCIe or memory", "push buffer 损坏：驱动、PCIe 或内存问题"),
    45: T("the driver cleaned up after another error or an exit", "驱动在其他错误或进程退出后做清理"),
    48: T("an uncorrectable double-bit ECC error", "无法纠正的双比特 ECC 错误"),
    61: T("the card's microcontroller stopped", "显卡内部微控制器中断"),
    62: T("the card's microcontroller halted", "显卡内部微控制器停止"),
    64: T("a failed row remapping: the card's spare memory rows are used up", "行重映射失败：备用行可能已用尽"),
    74: T("an NVLink error", "NVLink 错误"),
    79: T("the card has fallen off the bus", "显卡掉卡（从 PCIe 总线消失）"),
    94: T("a contained ECC error: only the program that met it is lost", "已隔离的 ECC 错误：只影响触发它的进程"),
    95: T("an uncontained ECC error: everything on the card is lost", "未隔离的 ECC 错误：卡上所有进程受影响"),
    109: T("a context switch that timed out", "上下文切换超时"),
    119: T("the GPU system processor did not answer", "GSP 响应超时"),
    120: T("an error of the GPU system processor", "GSP 出错"),
    140: T("an unrecovered ECC error", "未恢复的 ECC 错误"),
    143: T("the card could not be initialized", "显卡初始化失败"),
    154: T("the driver says that the card needs a recovery action", "驱动声明需要恢复操作"),
}
XID_UNKNOWN = T("see NVIDIA's Xid catalogue", "含义见 NVIDIA Xid 手册")
RESET = T("Stop every process on that card, then `nvidia-smi --gpu-reset -i {gpu}`; if it returns, replace the card.",
          "停掉该卡上的所有进程，执行 nvidia-smi --gpu-reset -i {gpu}；若再次出现则换卡。")
REBOOT = T("Drain the host and reboot it; if it returns, check seating, power and PCIe riser, and replace the card.",
           "排空主机并重启；若再次出现，检查插槽、供电、转接线，并换卡。")
OWN_XID = T("This is the program's own fault: if it returns, note the request that was running, and try another "
            "--attention-backend or vLLM version.",
            "属于程序自身错误：若再次出现，记下当时的请求，换 --attention-backend 或 vLLM 版本再试。")

# Flags of the newest vLLM's past, with what took their place.  Source: the argument parsers of 15 releases up to 0.33.
REMOVED_FLAGS: dict[str, Text] = {
    "disable-frontend-multiprocessing": T("last in 0.8.5; leave it out", "0.8.5 之后移除，直接去掉"),
    "disable-log-requests": T("gone by 0.18.1; requests are not logged unless --enable-log-requests asks for it",
                              "0.18.1 起移除；默认不再记录请求，需要时用 --enable-log-requests"),
    "device": T("last in 0.8.5; the platform is found by itself", "0.8.5 之后移除，平台自动识别"),
    "enable-flash-attn": T("never a flag of vLLM; --attention-backend chooses the backend",
                           "vLLM 从未有过；用 --attention-backend 选择后端"),
    "engine-use-ray": T("last in 0.5.4; use --distributed-executor-backend ray",
                        "0.5.4 之后移除；用 --distributed-executor-backend ray"),
    "guided-decoding-backend": T("last in 0.11.2; use --structured-outputs-config.backend",
                                 "0.11.2 之后移除；用 --structured-outputs-config.backend"),
    "max-seq-len-to-capture": T("last in 0.8.5; use --max-cudagraph-capture-size",
                                "0.8.5 之后移除；用 --max-cudagraph-capture-size"),
    "num-scheduler-steps": T("last in 0.8.5; leave it out", "0.8.5 之后移除，直接去掉"),
    "preemption-mode": T("last in 0.8.5; leave it out", "0.8.5 之后移除，直接去掉"),
    "swap-space": T("last in 0.16; leave it out, or use --kv-offloading-size",
                    "0.16 之后移除；去掉，或用 --kv-offloading-size"),
    "use-v2-block-manager": T("last in 0.8.5; leave it out", "0.8.5 之后移除，直接去掉"),
    "worker-use-ray": T("last in 0.6.6; use --distributed-executor-backend ray",
                        "0.6.6 之后移除；用 --distributed-executor-backend ray"),
}
# Common flags of today, for the nearest spelling of one that is unknown.
KNOWN_FLAGS = (
    "api-server-count", "attention-backend", "block-size", "cpu-offload-gb", "data-parallel-size",
    "distributed-executor-backend", "download-dir", "dtype", "enable-chunked-prefill", "enable-log-requests",
    "enable-prefix-caching", "enable-sleep-mode", "enforce-eager", "gpu-memory-utilization", "kv-cache-dtype",
    "kv-cache-memory-bytes", "kv-offloading-size", "load-format", "max-model-len", "max-num-batched-tokens", "max-num-seqs",
    "no-enable-chunked-prefill", "no-enable-prefix-caching", "pipeline-parallel-size", "quantization", "reasoning-parser",
    "served-model-name", "shutdown-timeout", "tensor-parallel-size", "tokenizer", "tool-call-parser", "trust-remote-code",
)

"""Every sentence that says why: of a failure, a symptom, a line of the timeline; with blanks, in English and Chinese.

`phrases` has what pages and alerts say around them.  Pure data.
"""

from __future__ import annotations

from vllm_watchdog.core.catalog import Text

T = Text

# -- a phase that lasted too long
NOT_SPAWNED = T("it was not started within {s} s", "{s} 秒内未能启动")
NOT_READY = T("not ready after {s} s", "{s} 秒后仍未就绪")
NOT_ASLEEP = T("it did not fall asleep within {s} s", "{s} 秒内未能进入休眠")
NOT_AWAKE = T("it was not awake, with a token, within {s} s", "{s} 秒内未能唤醒并产出 token")
NO_TOKEN = T("no token for {s} s: the counters stand still and a one-token request is not answered",
             "{s} 秒没有产出 token：计数器不动，单 token 请求也无应答")
DOUBTED = T("{why}; it is taken for hung in {s} s unless it moves", "{why}；若仍无进展，{s} 秒后判定为卡死")
NO_ACTIVITY = T("not ready, and no CPU or disk activity for {s} s", "尚未就绪，且 {s} 秒没有 CPU 或磁盘活动")

# -- the end of a process
END_UNSEEN = T("it ended; it was an earlier daemon's child, so its exit code is unknown",
               "它已结束；由先前的守护进程启动，退出码未知")
END_UNWATCHED = T("{mark} ended while no watchdog ran", "{mark} 在没有 watchdog 运行时结束")
END_SIGNAL = T("it was ended by signal {code}, which we did not send", "被信号 {code} 结束，并非由我们发出")
END_CODE = T("it exited with code {code}", "以退出码 {code} 退出")
LAST_LINE = T("{how}; its log ends in: {line}", "{how}；日志最后一行：{line}")
MEMBER_DIED = T("{process} (PID {pid}) ended while its API server lives",
                "{process}（PID {pid}）已结束，而其 API server 仍在")
OOM_KILLED = T("the kernel ended {n} of the processes of {mark} for memory, says its control group",
               "据其控制组，内核因内存不足结束了 {mark} 的 {n} 个进程")

# -- what it answers
UNHEALTHY = T("/health {health} for {s} s", "/health {health} 已 {s} 秒")
STRANGER = T("port {port} is served by {who}, not by {mark}", "端口 {port} 由 {who} 提供服务，而不是 {mark}")
SHARED_PORT = T("port {port} is shared with {who}: it takes part of the requests",
                "端口 {port} 与 {who} 共用：部分请求会被其接走")
NO_LOG = T("{mark} runs without a log, its output is lost: {why}", "{mark} 没有日志，输出已丢失：{why}")
STANDBY_LOST = T("{engine} is gone, and {primary} has the memory: the next failover is a cold start",
                 "{engine} 已不在，显存由 {primary} 占用：下一次故障切换将是冷启动")
NOT_SERVED = T("no engine has served {service} for {s} s: {engine} is {phase}",
               "{s} 秒没有引擎为 {service} 提供服务：{engine} {phase}")
CRASH_LOOP = T("{engine} failed {n} times within a day; a restart does not cure it",
               "{engine} 一天内失败 {n} 次；重启无法解决")
OOM_RATE = T("out of memory {n} times within {s} s", "{s} 秒内显存不足 {n} 次")

# -- what an adapter says of itself, in English
NOT_STARTED = T("{why}", "未能启动：{why}")
NOT_SLEPT = T("{why}", "未能休眠：{why}")
NOT_WOKEN = T("{why}", "未能唤醒：{why}")
DRIVER_LOST = T("{why}", "GPU 驱动无应答：{why}")

# -- thresholds
CARD_HIGH = T("GPU {gpu}: {share} of {total} GiB in use, threshold {limit}",
              "GPU {gpu}：{total} GiB 已用 {share}，阈值 {limit}")
CARD_DEGRADED = T("GPU {gpu}: {share} of {total} GiB in use, threshold {limit} for {s} s",
                  "GPU {gpu}：{total} GiB 已用 {share}，超过阈值 {limit} 达 {s} 秒")
CARD_GROWN = T("GPU {gpu}: {share} of {total} GiB in use, {grown} of the card more than after warm-up",
               "GPU {gpu}：{total} GiB 已用 {share}，比预热后多占全卡的 {grown}")
CARD_GROWS = T("{level}; it grows by {growth}", "{level}；{growth}")
DISK_LOW = T("{left} GiB left on the log disk, wanted {wanted}", "日志盘剩余 {left} GiB，要求 {wanted}")
CACHE_FULL = T("KV cache {share} full, {waiting} waiting", "KV cache 已用 {share}，{waiting} 个请求排队")
PREEMPTED = T("{n} requests a minute are preempted, threshold {limit} for {s} s",
              "每分钟 {n} 个请求被抢占，超过阈值 {limit} 达 {s} 秒")
RSS_HIGH = T("{size} GiB resident, threshold {limit}", "常驻内存 {size} GiB，阈值 {limit}")

# -- growth
GROWS = T("{rate} {unit} a minute: {limit} reached in about {eta}", "每分钟增长 {rate} {unit}：约 {eta}后达到{limit}")
RSS_GROWS = T("resident memory grows by {growth}", "常驻内存{growth}")
RSS_GROWS_IN = T("resident memory grows by {growth}, most of it {who}", "常驻内存{growth}，主要来自 {who}")
FILES_GROW = T("open files of {who} grow by {growth}", "{who} 打开的文件{growth}")
OF_HOST = T("the host's {total} GiB are", "主机内存上限 {total} GiB")
OF_GROUP = T("the cgroup's {total} GiB are", "控制组内存上限 {total} GiB")
OF_CARD = T("the card's {total} GiB are", "显卡容量 {total} GiB")
OF_FILES = T("its limit of {total} is", "其上限 {total} 个")
UNITS = {"MiB": T("MiB", "MiB"), "files": T("files", "个文件")}

# -- lines of the timeline
SYMPTOM = T("{class_}: {words}", "{class_}：{words}")
PHASE = T("{engine}: {was} -> {now}", "{engine}：{was} → {now}")
STARTING = T("starting {mark}", "正在启动 {mark}")
WAKING = T("waking {mark}", "正在唤醒 {mark}")
SERVES = T("{mark} serves", "{mark} 开始提供服务")
AWAKE = T("{mark} is awake, after {s} s", "{mark} 已唤醒，耗时 {s} 秒")
EXITED = T("{mark} exited with code {code}", "{mark} 以退出码 {code} 退出")
REAPED = T("orphans ended: {killed}", "已清理残留进程：{killed}")
FILED = T("{folder}{missing}", "{folder}{missing}")
NOT_FILED = T("none{missing}", "没有证据{missing}")
WITHOUT = T("; without {part}", "；缺少 {part}")
LEFT = T("the watchdog was stopped; the incident goes on when it starts again", "watchdog 已停止；下次启动后事件继续")
LEFT_ALONE = T("{engine} is left alone: automatic actions are paused", "未处理 {engine}：自动处理已暂停")
OVER = T("{symptom} of {subject}", "{subject} 的 {symptom}")
DRIVER_BACK = T("gpu_driver_unresponsive", "GPU 驱动已恢复应答")
LOWERED = T("the gateway lets {to} requests through at a time, because: {why}", "网关同时只放行 {to} 个请求，原因：{why}")
RESTORED = T("lowering, after {s} s: the gateway lets through what comes", "{s} 秒后解除限流：网关恢复正常并发")
TURNED = T("{leaving} -> {to}, because: {why}", "{leaving} → {to}，原因：{why}")
PLANNED = T("planned restart of {mark}: {leak}, and no request runs or waits",
            "按计划重启 {mark}：{leak}，且没有请求在运行或排队")
CALM = T("calm for {s} s", "已平稳 {s} 秒")
UNKNOWN_SERVICE = T("{service} is not configured any more", "{service} 已不在配置中")
RESTART = T("restart of {engine}", "重启 {engine}")
FORGIVEN = T("{engine} is not held any more", "{engine} 已解除停止重试")
ASKED_FOR = T("asked for by an operator", "由运维人员要求")

# Words of `Entry.what`.
STEPS = {
    "opened": T("opened", "发生"), "symptom": T("symptom", "症状"), "cleared": T("cleared", "消除"),
    "resolved": T("resolved", "恢复"), "phase": T("phase", "阶段"), "exited": T("exited", "退出"),
    "evidence": T("evidence", "证据"), "no evidence": T("no evidence", "无证据"), "stopped": T("stopped", "停止"),
    "killed": T("killed", "强制结束"), "reaped": T("reaped", "清理"), "started": T("started", "启动"),
    "woken": T("woken", "唤醒"), "ready": T("ready", "就绪"), "failover": T("failover", "故障切换"),
    "failback": T("failback", "切回"), "lowered": T("lowered", "限流"), "operator": T("operator", "人工操作"),
    "paused": T("paused", "已暂停"), "left": T("left", "已停止"), "action": T("action", "动作"),
    "in flight": T("in flight", "当时请求"), "waited": T("waited", "等待"), "drill": T("drill", "演练"),
}
PHASES = {
    "stopped": T("stopped", "已停止"), "releasing": T("releasing", "等待显存"), "starting": T("starting", "启动中"),
    "loading": T("loading", "加载中"), "serving": T("serving", "服务中"), "suspect": T("suspect", "无响应"),
    "dozing": T("dozing", "进入睡眠"), "asleep": T("asleep", "睡眠"), "waking": T("waking", "唤醒中"),
    "dumping": T("dumping", "取证中"), "stopping": T("stopping", "停止中"), "killing": T("killing", "清理进程"),
    "wedged": T("wedged", "卡死"), "settling": T("settling", "读取末尾日志"), "backoff": T("backoff", "等待重启"),
    "held": T("held", "已搁置"),
}

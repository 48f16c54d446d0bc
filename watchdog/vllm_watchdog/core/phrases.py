"""Every sentence about an incident, with blanks, in English and Chinese: page, terminal and alerts share them.

`catalog` has what classes mean, `remedies` what to change, `journal_phrases` the journal in words.  Pure data; `filled`
puts the figures in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_watchdog.core.catalog import Text

T = Text

# -- the incident's page
HEADINGS = {
    "todo": T("What to change", "建议"),
    "proof": T("What proves it", "证据"),
    "flight": T("What was in flight", "当时的请求"),
    "memory": T("Memory at the time", "当时的内存"),
    "done": T("What was done", "已采取的动作"),
    "files": T("Files", "文件"),
    "timeline": T("Timeline", "时间线"),
}
LABELS = {
    "when": T("when", "时间"),
    "engine": T("engine", "引擎"),
    "failures": T("failures", "各次故障"),
    "cause": T("cause", "原因"),
    "ended": T("how it ended", "退出方式"),
    "gap": T("service gap", "服务中断"),
    "clients": T("clients", "客户端"),
    "rss": T("host memory of the engine (RSS)", "引擎占用的主机内存（RSS）"),
    "kv": T("KV cache", "KV cache"),
    "requests": T("requests in the engine", "引擎内的请求"),
    "host": T("host memory available", "主机可用内存"),
    "what": T("what", "项目"),
    "used": T("at the time", "当时"),
    "compare": T("to compare", "对比"),
}
HAPPENED = T("It happened at {time} to engine {engine} (generation {generation}) of service {service}{host}.",
             "{time} 发生在服务 {service} 的引擎 {engine}（第 {generation} 代）{host}。")
HAPPENED_ON_HOST = T("It was seen at {time} and concerns the whole host{host}.", "{time} 发现，涉及整台主机{host}。")
ON_HOST = T(" on host {host}", "，主机 {host}")
PROOF_ABOVE = T("The log lines stand above.", "日志原文见上方英文部分。")
NO_DEEDS = T("Nothing was done: it is only watched.", "未采取动作，仅观察。")
FILES = T("Evidence lies beside this page (`bundle.txt` lists it); every step with its time is in `timeline.jsonl`.",
          "证据文件在本目录（清单见 `bundle.txt`），逐条时间线见 `timeline.jsonl`。")

WARM = T("{gib} after warm-up", "预热后 {gib}")
WARN_AT = T("threshold {share}", "告警阈值 {share}")
OURS_HOLDS = T("the engine {gib}", "引擎 {gib}")
OTHER_HOLDS = T("{who} {gib}", "{who} {gib}")
OF_TOTAL = T("of {gib}", "共 {gib}")
COUNTS = T("{running} running, {waiting} waiting", "运行 {running}，排队 {waiting}")

# -- its state
SNAPSHOT = T("Nothing was wrong: this is a snapshot, taken on request.", "没有故障：这是按要求保存的现场快照。")
RESOLVED = T("Resolved after {lasted}; nothing more must be done now.", "已恢复，历时 {lasted}；目前无需处理。")
RESOLVED_HELD = T("The service is restored, but a human is still needed: {page}.",
                  "服务已恢复，但仍需人工处理：{page}。")
NEEDED = T("Not resolved, a human is needed: {page}.", "未恢复，需要人工处理：{page}。")
THEN = T("Flags stand in `args` of {places} in the configuration. After a change: `llm-watchdog reload`, which "
         "says what needs a restart of the watchdog. Then, changed or not: {commands}; the others serve on.",
         "参数写在配置文件 {places} 的 args 里。改后执行 llm-watchdog reload（它会说明哪些改动须重启 watchdog）；"
         "无论是否改过，都再执行 {commands}，其他引擎不受影响。")
PLACE = T("[engines.{engine}]", "[engines.{engine}]")
LET_GO = T("`llm-watchdog restart {engine}`", "`llm-watchdog restart {engine}`")
AND, COMMA = T(" and ", " 和 "), T(", ", "、")
LEFT = T("Not resolved: the watchdog was stopped by an operator, its engines with it; it goes on when the watchdog starts "
         "again.",
         "未恢复：watchdog 已被运维人员停止，引擎随之停止；下次启动后继续。")
WATCHED = T("Not over: it is watched, and nothing had to be stopped.", "未结束：持续观察中，暂未停止任何引擎。")
DOWN = T("Not resolved: no engine serves since {time}; the watchdog is replacing it.",
         "未恢复：{time} 起无引擎提供服务，watchdog 正在替换。")
UNSERVED = T("Not resolved: no engine has served yet, tried since {time}; the watchdog tries again.",
             "未恢复：{time} 起尝试启动，尚无引擎提供过服务；watchdog 继续尝试。")
UP = T("An engine serves, nothing must be done now; resolved when it has stayed calm for a while.",
       "引擎正在提供服务，目前无需处理；稳定一段时间后判定恢复。")

# -- why only a human can help
HELD_ALIKE = T("{engine} is held: another try would fail alike ({why})", "{engine} 已停止重试：再试也会同样失败（{why}）")
HELD_OFTEN = T("{engine} is held: {failures} failures within {window} s, {budget} are allowed; the last was {blame}",
               "{engine} 已停止重试：{window} 秒内失败 {failures} 次，最多允许 {budget} 次；最后一次是 {blame}")
NO_START = T("{engine} can't be started: {why}", "{engine} 无法启动：{why}")
NO_WAKE = T("{engine} can't be woken: {why}", "{engine} 无法唤醒：{why}")
RIVAL_LEFT = T("{engine} still has processes", "{engine} 仍有进程")
STRAY_LEFT = T("{engine} is not gone yet", "{engine} 尚未退出")
NO_SAMPLE = T("no GPU sample has come", "没有 GPU 采样")
CARD_LACKS = T("GPU {gpu} lacks {lacks} GiB, held by {holders}", "GPU {gpu} 还缺 {lacks} GiB，占用者：{holders}")
NAMELESS = T("a process that the driver does not name", "驱动未给出名称的进程")
UNKILLABLE = T("{engine} survived SIGKILL for {after} s (PID {pid}); no second engine is started on its GPUs; the driver "
               "or a reboot must free them",
               "{engine} 在 SIGKILL 后 {after} 秒仍未退出（PID {pid}）；"
               "不会在其 GPU 上启动第二个引擎；需由驱动或重启主机释放")

# -- what clients saw
NEVER_DOWN = T("The service was never without an engine.", "服务未中断。")
DOWN_SINCE = T("No engine serves since {time}.", "{time} 起无引擎提供服务。")
DOWN_UNTIL_LEFT = T("No engine served for {s}, until the watchdog was stopped at {time}; none serves since.",
                    "无引擎提供服务共 {s}，{time} watchdog 被停止，此后仍无引擎服务。")
NEVER_SERVED = T("No engine has served yet: it was the first start, at {time}.",
                 "首次启动（{time}），尚无引擎提供过服务。")
DOWN_FOR = T("No engine served for {s}, until {time}.", "无引擎提供服务共 {s}，至 {time}。")
WAITED = T("{n} requests that waited in the gateway were answered: the longest {longest} after it had come, half of them "
           "within {median}", "{n} 个请求在网关等待后得到应答：从到达到应答最长 {longest}，中位 {median}")
WAITED_ONE = T("one request that waited in the gateway was answered {longest} after it had come",
               "1 个请求在网关等待，到达 {longest} 后得到应答")
WAITED_NONE = T("no request that waited in the gateway was answered", "在网关等待的请求均未得到应答")
UNANSWERED = T("; {n} got no answer", "；{n} 个未得到应答")
SENT_AGAIN = T("; {n} were sent to an engine again", "；{n} 个被重新发送")
SENT_AGAIN_ONE = T("; one was sent to an engine again", "；1 个被重新发送")
NO_GATEWAY = T("Nobody is known to have waited in a gateway; clients of the engine itself saw errors meanwhile.",
               "没有网关的记录：直连引擎的客户端在此期间会看到错误。")
FLIGHT = T("requests in flight on {mark}: {n}, of them already answering: {begun}",
           "{mark} 上有 {n} 个请求，其中 {begun} 个已开始应答")
LARGEST = T("; the longest {bytes} bytes (about {tokens} tokens), {age} old, {state}, {verdict}, content {hash}",
            "；最长的 {bytes} 字节（约 {tokens} token），已 {age}，{state}，{verdict}，内容 {hash}")
BEGUN = T("answering", "应答中")
NOT_BEGUN = T("not begun", "未开始")
VERDICTS = {
    "replayed": T("sent again", "已重发"), "held": T("held", "等待中"), "cut": T("cut off", "被中断"),
    "suspect": T("kept from the next engine as the suspect", "作为嫌疑请求被拦下"), "refused": T("refused", "被拒绝"),
}

# -- its failures
FAILURES = T("{n} failures: {list}", "共 {n} 次故障：{list}")
FAILURE = T("{time} {mark}: {title} ({class_})", "{time} {mark} 故障：{title}（{class_}）")
PROVED = T("; proof: {text}", "；依据：{text}")
ENDS = T("; how it ended: {how}", "；退出方式：{how}")
HERE = T("; evidence: this folder", "；证据：本目录")
FILED = T("; evidence: {folder}/", "；证据：{folder}/")
LESSON = T("{title} ({class_})", "{title}（类别 {class_}）")
LESSON_FILED = T("{title} ({class_}; the files named here lie in {folder}/)",
                 "{title}（类别 {class_}；所述文件在 {folder}/）")

# -- how a generation ended
EXITS = {
    0: T("exit code 0, which means nothing: vLLM exits with 0 when its engine dies",
         "退出码 0，不代表正常：vLLM 在引擎崩溃时也以 0 退出"),
    1: T("exit code 1: an error that the log shows", "退出码 1：错误见日志"),
    126: T("exit code 126, by which a shell says that its command can't be executed", "退出码 126：shell 无法执行其命令"),
    127: T("exit code 127, by which a shell says that its command was not found", "退出码 127：shell 找不到其命令"),
}
REFUSED = T("exit code 2: vLLM refused its command line", "退出码 2：vLLM 拒绝了命令行参数")
EXIT = T("exit code {code}", "退出码 {code}")
SIGNALLED = T("ended by signal {code}, which the watchdog did not send; see kernel.txt",
              "被信号 {code} 结束，并非 watchdog 发出；见 kernel.txt")
OURS = T("the watchdog stopped what was left of it, after the failure", "故障后由 watchdog 停止残余进程")
UNSEEN = T("nobody saw how: it was not this daemon's child", "退出方式未知：不是本守护进程的子进程")

# -- deeds, by the timeline's words
DEEDS = {
    "evidence": T("evidence saved", "已保存证据"),
    "stopped": T("{engine} was told to stop", "要求 {engine} 停止"),
    "killed": T("{engine} did not stop in time and was killed", "{engine} 未按时停止，已强制结束"),
    "reaped": T("what it left behind was killed: {killed}", "清理残留进程：{killed}"),
    "started": T("{engine} was started", "启动 {engine}"),
    "woken": T("{engine} was woken", "唤醒 {engine}"),
    "ready": T("{engine} serves", "{engine} 开始提供服务"),
    "failover": T("failover from {leaving} to {to}, because {because}", "故障切换：{leaving} → {to}，原因：{because}"),
    "failback": T("failback from {leaving} to {to}, because {because}", "切回：{leaving} → {to}，原因：{because}"),
    "lowered": T("the gateway lets {to} requests through at a time: {because}", "网关并发降到 {to}：{because}"),
    "operator": T("an operator asked for {verb} of {engine}", "运维人员执行 {verb}（{engine}）"),
    "paused": T("{engine} was left alone: automatic actions are paused", "自动处理已暂停，未处理 {engine}"),
    "drill": T("it was a drill: {fault} was brought about on purpose", "这是演练：人为注入 {fault}"),
    "left": T("the watchdog was stopped by an operator", "watchdog 被运维人员停止"),
    "action": T("{text}", "{text}"),
}
FAILED_OFTEN = T("it failed {times} times within {window}", "{window} 内失败 {times} 次")
FAILED_BEFORE = T("it failed {times} times within {window} (the time before: {before} at {before_at})",
                  "{window} 内失败 {times} 次（上一次：{before_at} {before}）")
BECAUSE = {
    "failures": T("it failed more than after_failures times", "失败次数超过 after_failures"),
    "oom_again": T("it ran out of memory again", "再次显存不足"),
    "degraded": T("its GPU memory stayed over the limit", "显存持续超限"), "held": T("it is held", "已停止重试"),
    "operator": T("an operator asked for it", "人工操作"), "down": T("it failed and the other was ready",
                                                                     "当前引擎失效，另一引擎已就绪"),
    "stable": T("the backup was stable for long enough", "备用引擎已足够稳定"),
    "prepare": T("both fit", "两者可并存"), "backup_held": T("the backup is held", "备用引擎已停止重试"),
    "leaks": T("it leaks memory", "内存泄漏"),
}


class _Blanks(dict[str, Any]):
    """A blank that nobody fills stays empty: an event leaves out what it does not know."""

    def __missing__(self, _: str) -> str:
        return ""


def filled(text: Text, /, **blanks: Any) -> Text:
    """The sentence with its blanks filled.  A Text in a blank is said in its own language."""
    def said(language: str) -> str:
        words = {name: value.of(language) if isinstance(value, Text) else value for name, value in blanks.items()}
        return text.of(language).format_map(_Blanks(words))

    return Text(said("en"), said("zh"))


NOTHING = T("", "")


def strung(texts: Iterable[Text], between: Text = NOTHING) -> Text:
    """One after the other."""
    told = tuple(texts)
    return Text(between.en.join(text.en for text in told), between.zh.join(text.zh for text in told))


def joined(texts: Iterable[Text]) -> Text:
    """Several sentences as one."""
    return strung(texts, T("; ", "；"))


def listed(texts: Iterable[Text]) -> Text:
    """One, two and three, as a list."""
    return strung(texts, AND)

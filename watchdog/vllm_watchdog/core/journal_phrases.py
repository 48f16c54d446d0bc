"""The events of the journal as sentences, with blanks, in English and Chinese: for `llm-watchdog events` and the page.

Pure data; `worded` puts an event's fields in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.phrases import filled

T = Text

EVENTS = {
    "alert.delivered": T("alert ({kind}) of {incident} delivered to {channel}", "告警（{kind}）{incident} 已送达 {channel}"),
    "alert.failed": T("alert ({kind}) to {channel} failed: {why}; tried again in {again_in_s} s",
                      "告警（{kind}）发往 {channel} 失败：{why}；{again_in_s} 秒后重试"),
    "alert.given_up": T("alert ({kind}) of {incident} to {channel} given up: {why}",
                        "放弃发送告警（{kind}）{incident} 到 {channel}：{why}"),
    "alert.lost": T("alert ({kind}) of {incident} lost: {why}", "告警（{kind}）{incident} 丢失：{why}"),
    "alert.unusable": T("the channel {channel} can't be used: {why}", "渠道 {channel} 无法使用：{why}"),
    "cgroup.claimed": T("each engine has a control group of its own below {root}; memory is {memory}",
                        "每个引擎在 {root} 下有自己的控制组；内存：{memory}"),
    "cgroup.failed": T("{engine} has no control group of its own: {why}", "{engine} 没有自己的控制组：{why}"),
    "cgroup.unknown": T("no control groups of our own: {why}", "没有自己的控制组：{why}"),
    "clock.stepped": T("the wall clock was stepped by {by_s} s", "系统时钟跳变 {by_s} 秒"),
    "config.read": T("the configuration was read again: {changes}", "配置已重新读取：{changes}"),
    "config.refused": T("the new configuration is not valid, nothing was changed: {why}", "新配置无效，未作任何更改：{why}"),
    "control.reader_dropped": T("a reader of the control socket was {lines_behind} lines behind and was dropped",
                                "控制套接字的一个读者落后 {lines_behind} 行，已断开"),
    "control.accept_failed": T("the control socket takes no connection: {why}", "控制套接字无法接受连接：{why}"),
    "daemon.leaving": T("the watchdog leaves its engines to the next one: {engines}",
                        "watchdog 把引擎交给下一个：{engines}"),
    "daemon.reloaded": T("the new configuration counts", "新配置已生效"),
    "daemon.started": T("the watchdog started: {engines} engines configured, {survivors} still ran",
                        "watchdog 启动：配置 {engines} 个引擎，{survivors} 个仍在运行"),
    "daemon.stopping": T("the watchdog stops ({by}), its engines with it", "watchdog 停止（{by}），引擎随之停止"),
    "drill": T("{incident} is a drill: {fault}", "{incident} 是演练：{fault}"),
    "engine.adopted": T("{engine} (PID {pid}) still runs and was adopted, then {then}",
                        "{engine}（PID {pid}）仍在运行，已接管（{then}）"),
    "engine.emptied": T("no process of {engine} is left", "{engine} 的进程已全部结束"),
    "engine.exited": T("{engine} exited with code {code} while {phase}", "{engine} 在 {phase} 阶段退出，退出码 {code}"),
    "engine.member_died": T("{process} (PID {pid}) of {engine} ended while its API server lives",
                            "{engine} 的 {process}（PID {pid}）已结束，API server 仍在"),
    "engine.phase": T("{engine}: {was} -> {now} ({because})", "{engine}：{was} → {now}（{because}）"),
    "engine.ready": T("{engine} serves, {after_s} s after its start", "{engine} 开始提供服务，启动耗时 {after_s} 秒"),
    "engine.renewed": T("{engine} is restarted as planned: {because} {text}", "按计划重启 {engine}：{because} {text}"),
    "engine.slept": T("{engine} went to sleep in {took_s} s {why}", "{engine} 进入休眠，耗时 {took_s} 秒 {why}"),
    "engine.woke": T("{engine} woke in {took_s} s {why}", "{engine} 被唤醒，耗时 {took_s} 秒 {why}"),
    "engine.spawn_failed": T("{engine} could not be started: {why}", "{engine} 启动失败：{why}"),
    "engine.spawned": T("{engine} runs as PID {pid}", "{engine} 已启动，PID {pid}"),
    "engine.stray": T("{engine} is left over: {action}", "残留的 {engine}：{action}"),
    "evidence.done": T("evidence of {incident} is in {folder}", "{incident} 的证据已保存到 {folder}"),
    "file.set_aside": T("{file} could not be read ({why}); it is kept as {aside}",
                        "{file} 无法读取（{why}），已改名为 {aside}"),
    "gateway.casualties": T("the gateway tells of {engine}: {text}", "网关报告 {engine}：{text}"),
    "gateway.waited": T("clients of {service}: {text}", "{service} 的客户端：{text}"),
    "gpus.unknown": T("the GPUs can't be read: {why}", "无法读取 GPU 状态：{why}"),
    "history.failed": T("the history can't be written: {why}; {waiting} wait, {lost} lost",
                        "无法写入历史：{why}；等待 {waiting} 条，丢失 {lost} 条"),
    "history.unreadable": T("the history can't be read: {why}", "无法读取历史：{why}"),
    "incident.opened": T("incident {incident} is open ({urgency}): {text}", "事件 {incident} 发生（{urgency}）：{text}"),
    "incident.recalled": T("incident {incident} was open in the history and is taken over",
                           "事件 {incident} 在历史中仍未恢复，继续跟踪"),
    "incident.reminder": T("incident {incident} is still open ({urgency}): {text}",
                            "事件 {incident} 仍未恢复（{urgency}）：{text}"),
    "incident.resolved": T("incident {incident} is resolved", "事件 {incident} 已恢复"),
    "incident.worsened": T("incident {incident} got worse ({urgency}, {class_}): {text}",
                           "事件 {incident} 加重（{urgency}，{class_}）：{text}"),
    "kernel.unknown": T("the kernel log can't be read: {why}", "无法读取内核日志：{why}"),
    "log.finding": T("the log of {engine} says {class_}: {text}", "{engine} 的日志显示 {class_}：{text}"),
    "operator.asked": T("an operator asked: {verb} {engine} {text}", "运维人员请求：{verb} {engine} {text}"),
    "page.failed": T("the page of {incident} can't be written: {why}", "无法写入 {incident} 的页面：{why}"),
    "probe.proves_nothing": T("a one-token request proves nothing about {engine}: {why}",
                              "单 token 探测无法判断 {engine}：{why}"),
    "service.failover": T("{service}: failover from {leaving} to {to} ({because})",
                          "{service}：故障切换 {leaving} → {to}（{because}）"),
    "service.failback": T("{service}: failback from {leaving} to {to} ({because})",
                          "{service}：切回 {leaving} → {to}（{because}）"),
    "service.lowered": T("{service}: the gateway lets {to} requests through at a time ({because})",
                         "{service}：网关并发降到 {to}（{because}）"),
    "service.restored": T("{service}: the gateway lets through what comes, after {after_s} s",
                          "{service}：{after_s} 秒后网关恢复正常并发"),
    "store.failed": T("{file} can't be written: {why}", "无法写入 {file}：{why}"),
    "symptom.cleared": T("{symptom} of {subject} is over", "{subject} 的 {symptom} 已消除"),
    "symptom.raised": T("{symptom} of {subject}: {text}", "{subject} 出现 {symptom}：{text}"),
}


def worded(name: str, fields: Mapping[str, Any]) -> Text | None:
    """An event in words; None for one that has no phrase (yet): its fields are shown as they are.  `x_zh`: x in Chinese."""
    known = EVENTS.get(name)
    if known is None:
        return None
    told = filled(known, **{key: Text(value, fields[f"{key}_zh"]) if f"{key}_zh" in fields else value
                            for key, value in fields.items()})
    return Text(" ".join(told.en.split()), " ".join(told.zh.split()))

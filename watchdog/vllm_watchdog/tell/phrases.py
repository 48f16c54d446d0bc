"""The words that alerts are made of, in each language: one table, so that none is scattered in code.  Pure.

What a class of failure means stands in `core.catalog`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vllm_watchdog.core.catalog import Text


class Language(StrEnum):
    EN = "en"
    ZH = "zh"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Tongue:
    name: str                   # a field of catalog.Text
    colon: str
    comma: str
    semicolon: str
    head: str                   # the title of a message
    over: str                   # the same, when nothing is wrong any more
    trial: str                  # the title of a test
    group: str                  # the title of a message about several
    kinds: dict[str, str]
    urgencies: dict[str, str]
    labels: dict[str, str]
    engine: str
    plans: dict[str, str]       # what is done, by the catalogue's action, while nothing was yet
    lasted: str
    seconds: str
    minutes: str
    test: str

    def of(self, text: Text) -> str:
        return text.zh if self.name == "zh" else text.en


EN = Tongue(
    name="en", colon=": ", comma=", ", semicolon="; ",
    head="[{kind}, {urgency}] {title}: {service} on {host}", over="[{kind}] {title}: {service} on {host}",
    trial="[{kind}] {title} ({host})", group="[{count} ALERTS] {kinds} on {host}",
    kinds={"opened": "OPENED", "worsened": "WORSE", "reminder": "STILL OPEN", "resolved": "RESOLVED", "test": "TEST"},
    urgencies={"warning": "warning", "critical": "critical", "page": "human needed"},
    labels={"host": "Host", "engine": "Engine", "cause": "Cause", "failures": "Failures", "state": "State", "action": "Done",
            "gap": "Gap", "opened": "Opened", "resolved": "Resolved", "next": "Next", "folder": "Evidence"},
    engine="{engine} (service {service})",
    plans={"restart": "it will be restarted", "failover": "the backup will take over", "wait-vram": "waits for the memory",
           "config-error-stop": "held, since another try would fail alike", "alert-only": "nothing, it is only told"},
    lasted="{at}, after {lasted}", seconds="{:.0f} s", minutes="{:.0f} min",
    test="A test of this channel; nothing is wrong.",
)
ZH = Tongue(
    name="zh", colon="：", comma="，", semicolon="；",
    head="【{kind}，{urgency}】{title}：{host} 上的 {service}", over="【{kind}】{title}：{host} 上的 {service}",
    trial="【{kind}】{title}（{host}）", group="【{count} 条告警】{host}：{kinds}",
    kinds={"opened": "故障", "worsened": "恶化", "reminder": "仍未恢复", "resolved": "已恢复", "test": "测试"},
    urgencies={"warning": "警告", "critical": "严重", "page": "需要人工处理"},
    labels={"host": "主机", "engine": "引擎", "cause": "原因", "failures": "各次故障",
            "state": "现状", "action": "已采取的动作",
            "gap": "中断", "opened": "开始", "resolved": "恢复", "next": "下一步", "folder": "证据目录"},
    engine="{engine}（服务 {service}）",
    plans={"restart": "即将重启", "failover": "即将切换到备用引擎", "wait-vram": "等待显存释放",
           "config-error-stop": "已停止：再次启动也会同样失败", "alert-only": "无，仅告警"},
    lasted="{at}，历时 {lasted}", seconds="{:.0f} 秒", minutes="{:.0f} 分钟",
    test="这是通道测试，没有故障。",
)
TONGUES = {Language.EN: (EN,), Language.ZH: (ZH,), Language.BOTH: (EN, ZH)}

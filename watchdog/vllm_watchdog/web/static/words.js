"use strict";
// Every word of the page, in English and Chinese.
const WORDS = {
  en: {
    skip: "Skip to the engines", lowered: "lowered to {n} requests at a time", engines: "Engines", memory: "GPU memory", load: "Load", history: "Incidents",
    alerts: "Alert channels", machine: "Host and daemon", journal: "Journal, live", snapshot: "Snapshot", theme: "Theme",
    pause: "Pause", resume: "Resume", restart: "Restart", failover: "Fail over", failback: "Fail back", did_failover: "failed over", did_failback: "failed back",
    warning: "warning", critical: "critical", page: "human needed", healthy: "Healthy", degraded: "Degraded", down: "Down", unknown: "No contact", live: "live",
    q_serving: "Serving?", q_last: "What happened", q_doing: "Being done", q_next: "Room left",
    serves: "{engine} serves", on_port: "port {port}, since {since}", nobody: "nobody serves {service}",
    all_serve: "{n} services, all served", of_served: "{n} of {m} services served",
    nothing_ever: "No failure so far", gap: "gap {s}", gap_open: "nobody serves yet",
    ago: "{s} ago", nothing_to_do: "Nothing to do", watching: "watching", paused: "Automatic actions are paused",
    waits_human: "Waits for you: {who}", type_restart: "correct the cause, then type: {command}", type_read: "read what to do: {command}", deeds: "What was done", working: "{engine}: {phase}", next_try: "next try in {s}",
    no_gpu: "No GPU reading", headroom: "{left} GiB under its limit", over: "{left} GiB over its limit",
    none_near: "no threshold crossed",
    phase_stopped: "stopped", phase_releasing: "waits for memory", phase_starting: "starting", phase_loading: "loading",
    phase_serving: "serving", phase_suspect: "not answering", phase_dozing: "falling asleep", phase_asleep: "asleep",
    phase_waking: "waking", phase_dumping: "taking evidence", phase_stopping: "stopping", phase_killing: "ending its processes",
    phase_wedged: "wedged", phase_settling: "reading its last log lines", phase_backoff: "waits to restart", phase_held: "held",
    standby: "standby for {engine}", generation: "generation {n}", up: "up {s}", since: "for {s}",
    rss: "RSS", kv: "KV cache", running: "running", waiting: "waiting", waits: "Its start waits:", tokens: "tokens/s", cpu: "CPU cores",
    used_of: "{used} of {total} GiB ({share})", warn: "warn", degrade: "degrade", others: "others",
    opened: "opened {when}", lasted: "lasted {s}", still: "open", no_history: "None so far.",
    no_channels: "None configured.", delivered: "last delivered {s} ago", never: "nothing delivered yet", n_waiting: "{n} waiting",
    memory_free: "Memory free", disk_free: "Log disk free", load_avg: "Load", kernel: "Kernel log", read: "read",
    version: "Version", lag: "Loop lag", up_since: "Daemon up", restarts: "Restarts, 24 h",
    gone: "No contact with the daemon for {s}. What is shown is from {when}; the engines go on without it.",
    loading_page: "asking the daemon …", cause: "Cause", advice: "What to change", timeline: "Timeline",
    proof: "Log lines that prove it", evidence: "Evidence", show_files: "Show the files", close: "Close",
    no_files: "No file is left of it.",
    ask_restart: "Stop {engine} and start it again? Its requests are cut; its failures are forgiven.",
    ask_failover: "Let the backup of {engine} serve?", ask_failback: "Let {engine} serve again?",
    ask_pause: "Stop automatic actions? Engines are watched, but not restarted.", ask_resume: "Automatic actions again?",
    ask_snapshot: "Write an evidence bundle now?", ask_files: "Evidence is shown to operators only.",
    token: "Token (daemon.token; kept until this tab closes)", reason: "Reason (optional)", go: "Do it", cancel: "Cancel",
    not_operable: "Set daemon.token to operate from here; until then: llm-watchdog {verb}", done: "Done", failed: "Refused",
    of_about: "{s} of about {about}", waits_start: "Waits for its next start: {keys}",
    waits_daemon: "Waits for a restart of the daemon (llm-watchdog handover): {keys}",
    gateway: "Gateway:", in_flight: "in flight {n}", prompt_tokens: "prompts about {n} tokens", of: "{n} of {most}", in_line: "waiting {n}",
    long_ones: "long ones {n}", quarantined: "quarantined prompts {n}", connections: "clients' connections {n}", throttled: "throttled", breaker_open: "breaker open", breaker_half_open: "breaker: one request tries",
    gateway_silent: "no word from it",
  },
  zh: {
    skip: "跳到引擎", lowered: "已限制为同时 {n} 个请求", engines: "引擎", memory: "显存", load: "负载", history: "事件", alerts: "告警通道", machine: "主机与守护进程",
    journal: "实时日志", snapshot: "取证快照", theme: "主题", pause: "暂停", resume: "恢复", restart: "重启", failover: "切换到备用",
    failback: "切回主用", did_failover: "已切换", did_failback: "已切回", warning: "警告", critical: "严重", page: "需要人工处理", healthy: "正常", degraded: "降级", down: "中断", unknown: "失去联系", live: "实时", q_serving: "在服务吗？",
    q_last: "发生了什么", q_doing: "正在做什么", q_next: "余量", serves: "{engine} 正在服务", on_port: "端口 {port}，自 {since}",
    nobody: "{service} 无人服务", all_serve: "{n} 个服务全部正常", of_served: "{m} 个服务中 {n} 个可用",
    nothing_ever: "至今无故障", gap: "中断 {s}", gap_open: "尚无人服务", ago: "{s}前", nothing_to_do: "无需操作",
    watching: "监视中", paused: "自动操作已暂停", waits_human: "等待人工处理：{who}", type_restart: "排除原因后执行：{command}", type_read: "查看处理方法：{command}", deeds: "已采取的动作", working: "{engine}：{phase}", next_try: "{s}后重试",
    no_gpu: "没有 GPU 读数", headroom: "距阈值 {left} GiB", over: "超出阈值 {left} GiB", none_near: "没有触及任何阈值",
    phase_stopped: "已停止", phase_releasing: "等待显存", phase_starting: "启动中", phase_loading: "加载中", phase_serving: "服务中",
    phase_suspect: "无响应", phase_dozing: "进入睡眠", phase_asleep: "睡眠", phase_waking: "唤醒中", phase_dumping: "取证中",
    phase_stopping: "停止中", phase_killing: "清理进程", phase_wedged: "卡死", phase_settling: "读取末尾日志", phase_backoff: "等待重启",
    phase_held: "已搁置", standby: "{engine} 的备用", generation: "第 {n} 代", up: "运行 {s}", since: "已 {s}", rss: "RSS",
    kv: "KV 缓存", running: "运行", waiting: "排队", waits: "启动等待：", tokens: "token/秒", cpu: "CPU 核",
    used_of: "{used} / {total} GiB（{share}）", warn: "预警", degrade: "降级", others: "其他",
    opened: "{when} 发生", lasted: "持续 {s}", still: "未结束", no_history: "暂无。",
    no_channels: "未配置。", delivered: "{s}前送达", never: "尚未送达任何告警", n_waiting: "{n} 条待发", memory_free: "可用内存",
    disk_free: "日志盘可用", load_avg: "负载", kernel: "内核日志", read: "可读", version: "版本", lag: "循环延迟", up_since: "守护进程已运行",
    restarts: "24 小时重启", gone: "已 {s}联系不上守护进程。显示的是 {when} 的状态；引擎不受影响。", loading_page: "正在询问守护进程…",
    cause: "原因", advice: "建议", timeline: "时间线", proof: "日志证据", evidence: "证据", show_files: "显示文件", close: "关闭",
    no_files: "文件已不存在。", ask_restart: "停止并重新启动 {engine}？进行中的请求会被中断，失败记录清零。",
    ask_failover: "让 {engine} 的备用引擎服务？", ask_failback: "让 {engine} 重新服务？", ask_pause: "停止自动操作？仍会监视，但不重启。",
    ask_resume: "恢复自动操作？", ask_snapshot: "现在写入一份证据？", ask_files: "证据仅对操作员可见。",
    token: "令牌（daemon.token，关闭标签页后清除）", reason: "原因（可选）", go: "执行", cancel: "取消",
    not_operable: "设置 daemon.token 后可在此操作；目前请用：llm-watchdog {verb}", done: "完成", failed: "被拒绝",
    of_about: "{s}，约需 {about}", waits_start: "下次启动时生效：{keys}", waits_daemon: "守护进程重启后生效（llm-watchdog handover）：{keys}",
    gateway: "网关：", in_flight: "处理中 {n}", prompt_tokens: "提示词约 {n} token", of: "{n} / {most}", in_line: "排队 {n}", long_ones: "其中长请求 {n}",
    quarantined: "已隔离提示词 {n}", connections: "客户端连接 {n}", throttled: "已限流", breaker_open: "已熔断", breaker_half_open: "熔断：正在试探", gateway_silent: "没有消息",
  },
};
let language = localStorage.getItem("language") || (navigator.language.startsWith("zh") ? "zh" : "en");
const t = (key, values = {}) =>
  (WORDS[language][key] ?? WORDS.en[key] ?? key).replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");

function span(seconds) {
  const s = Math.max(0, seconds), word = language === "zh" ? ["秒", "分", "小时", "天"] : ["s", "min", "h", "d"];
  if (s < 1) return `${s.toFixed(2)} ${word[0]}`;
  if (s < 10) return `${s.toFixed(1)} ${word[0]}`;
  if (s < 120) return `${Math.round(s)} ${word[0]}`;
  if (s < 7200) return `${Math.round(s / 60)} ${word[1]}`;
  return s < 172800 ? `${Math.round(s / 3600)} ${word[2]}` : `${Math.round(s / 86400)} ${word[3]}`;
}
const clock = (at, date = false) => new Date(at * 1000).toLocaleString(language === "zh" ? "zh-CN" : "en-GB", {
  ...(date ? { month: "short", day: "2-digit" } : {}), hour: "2-digit", minute: "2-digit", second: "2-digit" });
const GIB = 2 ** 30;
const gib = (bytes) => (bytes / GIB).toFixed(1);
const size = (bytes) => (bytes < GIB ? `${Math.round(bytes / 2 ** 20)} MiB` : `${gib(bytes)} GiB`);
const percent = (share) => `${Math.round(share * 100)} %`;

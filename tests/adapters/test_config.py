"""The settings: what is read, what is refused and in which words, what becomes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from vllm_watchdog import cards, config_sections
from vllm_watchdog.config import Settings
from vllm_watchdog.config_levels import SLEEPER as SLEEPER_SHARE
from vllm_watchdog.config_levels import card_shares, levels, share_of
from vllm_watchdog.config_load import load, load_to_ask, misspelt
from vllm_watchdog.config_problems import ConfigError, keys_at
from vllm_watchdog.config_sections import Alerts, Channel, Engine, Templates
from vllm_watchdog.config_sources import from_credentials
from vllm_watchdog.core import plan as plan_module
from vllm_watchdog.core.codec import Codec, encode
from vllm_watchdog.core.plan import EnginePlan, FailoverPlan, Limits, Plan, Standby, Thresholds
from vllm_watchdog.gateway_rules import Rule, WhenDown, key_of
from vllm_watchdog.launch import Launch, command_line, environment, holds_password, masked, masked_env, unknown_flags

ROOT = Path(__file__).parents[2]
PYTHON = json.dumps(sys.executable)
PRIMARY = f"""
[engines.primary]
command = [{PYTHON}, "-m", "vllm_watchdog.sim"]
model = "m"
port = 8100
"""
BACKUP = """
[engines.backup]
backup_for = "primary"
port = 8101
"""
OTHER = "[engines.b]\ncommand = ['/bin/true']\n"
SPARE = "[engines.b]\nbackup_for = 'primary'\nport = 8102\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str, **environ: str) -> Settings:
    Path("config.toml").write_text(text)
    return load(Path("config.toml"), environ)


def problems(text: str, **environ: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read(text, **environ)
    return caught.value.problems


def flags(args: str) -> list[str]:
    """What a table of args becomes behind --port."""
    argv = list(read(f"{PRIMARY}\n[engines.primary.args]\n{args}").launches()["primary"].argv)
    return argv[argv.index("--port") + 2:]


# -- defaults

def test_every_default_that_the_core_knows_is_the_cores() -> None:
    plan = read(PRIMARY).plan(seed=7)
    assert plan == Plan(engines=(EnginePlan("primary", 8100),), seed=7)
    assert plan.engines[0].limits == Limits()
    assert (plan.thresholds, plan.failover) == (Thresholds(), FailoverPlan())


def test_every_number_of_the_file_reaches_the_plan() -> None:
    plan = read(PRIMARY + """
load_timeout_s = 1
load_idle_s = 2
stop_timeout_s = 3
[daemon]
sample_s = 4
[hang]
still_s = 5
probe_s = 6
patience_s = 7
patience_blind_s = 8
dead_s = 9
[restart]
backoff_s = 10
backoff_max_s = 11
budget = 12
window_s = 13
planned = "when-idle"
[failover]
after_failures = 14
failback = "manual"
stable_s = 15
[evidence]
deadline_s = 16
min_interval_s = 17
[thresholds]
degrade_after_s = 18
vram_growth = 0.19
warm_up_s = 20
kv_cache = 0.21
kv_cache_after_s = 22
rss_gib = 23
rss_slope_mib_per_min = 24
disk_free_gib = 25
leak_within_s = 0
preemptions_per_min = 26
engine_down_s = 27
oom_rate = 28
crash_loop = 29
""").plan(seed=0)
    assert plan.engines[0].limits == Limits(
        load_s=1, load_idle_s=2, stop_s=3, still_s=5, probe_s=6, suspect_s=7, suspect_blind_s=8, dead_s=9,
        backoff_s=10, backoff_max_s=11, budget=12, window_s=13, dump_s=16,
    )
    assert plan.failover == FailoverPlan(14, plan_module.Failback.MANUAL, 15)
    assert (plan.sample_s, plan.bundle_interval_s) == (4, 17)
    assert plan.thresholds == Thresholds(
        degrade_after_s=18, vram_growth=0.19, warm_up_s=20, kv_cache=0.21, kv_cache_after_s=22,
        rss_bytes=23 << 30, rss_slope_mib_per_min=24, disk_free_bytes=25 << 30,
        leak_within_s=0, preemptions_per_min=26, engine_down_s=27, oom_rate=28, crash_loop=29,
    )
    assert plan.planned is plan_module.Planned.WHEN_IDLE


def test_a_plan_can_be_written_down_and_read_again() -> None:
    plan = read(PRIMARY + "gpus = [0]" + BACKUP).plan(seed=1)
    assert Codec(plan_module).decode(json.loads(json.dumps(encode(plan)))) == plan


def test_settings_cannot_be_changed() -> None:
    settings = read(PRIMARY)
    with pytest.raises(ValidationError):
        settings.daemon.sample_s = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        settings.launches()["primary"].port = 1  # type: ignore[misc]


def test_relative_folders_follow_the_current_directory(here: Path) -> None:
    daemon = read(PRIMARY + '[daemon]\nlog_dir = "elsewhere"').daemon
    assert (daemon.state_dir, daemon.log_dir) == (here / "logs/state", here / "elsewhere")
    assert daemon.socket == here / "logs/state/control.sock"


def test_a_socket_with_a_full_path_stays_there() -> None:
    assert read(PRIMARY + '[daemon]\nsocket = "/run/x.sock"').daemon.socket == Path("/run/x.sock")


@pytest.mark.parametrize(("listen", "host", "port"), [
    ("127.0.0.1:9178", "127.0.0.1", 9178), ("[::1]:80", "::1", 80), ("off", "", 0), ("", "", 0)])
def test_where_the_page_is(listen: str, host: str, port: int) -> None:
    daemon = read(PRIMARY + f'[daemon]\nlisten = "{listen}"').daemon
    assert (daemon.port, daemon.host if port else "") == (port, host)


def test_a_profile_tells_how_an_engine_is_set_and_nothing_secret() -> None:
    settings = read(PRIMARY + 'args = { max-num-seqs = 64, served-model-name = "hush" }' + BACKUP)
    assert settings.profile("primary") == {"model": settings.engines["primary"].model, "max-num-seqs": 64}


@pytest.mark.parametrize(("lines", "context", "limit", "tokenizer"), [
    ("", None, None, "m"),
    ("args = { max-model-len = 32768 }", 32768, None, "m"),
    ("args = { max-model-len = '32k', tokenizer = 't' }\nprompt_limit = 9", 32000, 9, "t"),
    ("args = { max-model-len = '32K' }", 32768, None, "m"),
    ("args = { max-model-len = 'auto', tokenizer-mode = 'mistral' }", None, None, ""),
    ("args = { max-model-len = -1 }", None, None, "m"),
])
def test_a_prompts_limits_come_from_the_engines_flags(
        lines: str, context: int | None, limit: int | None, tokenizer: str) -> None:
    prompt = read(PRIMARY + lines).launches()["primary"].prompt
    assert (prompt.context, prompt.limit, prompt.tokenizer) == (context, limit, tokenizer)


def test_the_engines_own_cache_and_template_are_used(here: Path) -> None:
    args = "args = { chat-template = 'own.jinja', kv-cache-dtype = 'fp8', revision = 'abc' }\nenv = { HF_HOME = '/data/hf' }"
    prompt = read(PRIMARY + args).launches()["primary"].prompt
    assert (prompt.hub, prompt.template, prompt.kv_dtype, prompt.revision) == (
        "/data/hf/hub", str(here / "own.jinja"), "fp8", "abc")


# -- the example

TABLES = {"channels", "templates", "keys", "rules"}     # of tables, each with one of its own


def uncommented(text: str) -> str:
    return "\n".join(line[1:] if line[:1] == "#" and line[1:2] not in ("", " ") else line for line in text.splitlines())


def test_the_example_loads_as_it_stands_and_with_every_key_uncommented(here: Path) -> None:
    (here / "vllm").write_text("#!/bin/sh\n")
    (here / "vllm").chmod(0o755)
    text = (ROOT / "config.example.toml").read_text()
    path = {"LLM_WATCHDOG_ENGINES__PRIMARY__ENV__PATH": str(here)}
    plain, full = read(text, **path), read(uncommented(text), **path)
    limits = {"vram_share", "max_concurrent", "max_concurrent_tokens"}
    free = {"args", "env", "api_key", "memory_max_gib"} | limits      # examples of what has no default
    assert full.thresholds.model_copy(update={"rss_gib": None, "rss_slope_mib_per_min": None}) == plain.thresholds
    for table in ("daemon", "hang", "restart", "failover", "evidence", "retention"):
        none = {"token": None} if table == "daemon" else {}     # a secret has no default
        assert getattr(full, table).model_copy(update=none) == getattr(plain, table), table
    for name in ("primary", "backup"):
        assert full.engine(name).model_dump(exclude=free) == plain.engine(name).model_dump(exclude=free)
    assert full.alerts.language == plain.alerts.language
    assert full.alerts.channels["oncall"].timeout_s == Channel(url=SecretStr("http://x")).timeout_s
    assert not plain.warnings()


def test_the_example_names_every_key() -> None:
    lines = (ROOT / "config.example.toml").read_text().splitlines()
    named = {line.lstrip("#").split(" = ")[0] for line in lines if " = " in line}
    tables = {line.lstrip("#")[1:].split("]")[0] for line in lines if line.lstrip("#").startswith("[")}
    for section in Settings.model_fields:
        assert any(table.split(".")[0] == section for table in tables), section
        named |= {"args", "env"} if section == "engines" else set()
        missing = set(keys_at(Settings, (section,))) - named - TABLES
        assert not missing, section
    for model in (Engine, Channel, Templates, Alerts, config_sections.Rule):
        assert not set(model.model_fields) - named - TABLES


# -- engines

def test_a_backup_inherits_all_but_the_port_and_lays_its_args_over() -> None:
    settings = read(PRIMARY + """
gpus = [0, 1]
host = "0.0.0.0"
api_key = "sk-1"
load_timeout_s = 99
args = { max-num-seqs = 64, max-model-len = 100, enforce-eager = true }
env = { A = "1", B = "2" }
""" + BACKUP + """
args = { max_num_seqs = 16, enforce-eager = "unset" }
env = { B = "3" }
""")
    primary, backup = settings.launches().values()
    at = primary.argv.index("--port")
    assert backup.argv == (*primary.argv[:at], "--port", "8101", "--max-num-seqs", "16", "--max-model-len", "100")
    assert dict(backup.env) == {**dict(primary.env), "B": "3"}
    assert (backup.gpus, backup.host, backup.model) == ((0, 1), "0.0.0.0", "m")
    assert backup.api_key == SecretStr("sk-1")
    plan = settings.plan(0).engine("backup")
    assert (plan.gpus, plan.backup_for, plan.limits.load_s) == ((0, 1), "primary", 99)


def test_vllm_serve_takes_the_model_as_a_word_and_every_other_command_as_a_flag() -> None:
    tail = ("--host", "h", "--port", "1")
    assert command_line(["vllm", "serve"], "m", "h", 1, {}) == ("vllm", "serve", "m", *tail)
    assert command_line(["/o/vllm", "-v", "serve"], "m", "h", 1, {}) == ("/o/vllm", "-v", "serve", "m", *tail)
    module = ("python", "-m", "vllm.entrypoints.openai.api_server")
    assert command_line(module, "m", "h", 1, {}) == (*module, "--model", "m", *tail)


@pytest.mark.parametrize(("args", "expected"), [
    ("enforce-eager = true", ["--enforce-eager"]),
    ("enable_chunked_prefill = false", ["--no-enable-chunked-prefill"]),
    ("max-num-seqs = 64", ["--max-num-seqs", "64"]),
    ("gpu-memory-utilization = 0.8", ["--gpu-memory-utilization", "0.8"]),
    ("max-model-len = -1", ["--max-model-len=-1"]),
    ('middleware = ["a", "b"]', ["--middleware", "a", "--middleware", "b"]),
    ("hf-overrides = { a = { b = 1 } }", ["--hf-overrides", '{"a": {"b": 1}}']),
    ('"hf_overrides.rope_scaling" = "x"', ["--hf-overrides.rope_scaling", "x"]),
    ('kv-cache-dtype = "fp8"\nseed = "unset"', ["--kv-cache-dtype", "fp8"]),
])
def test_args_become_vllms_own_flags(args: str, expected: list[str]) -> None:
    assert flags(args) == expected


def test_cards_are_counted_as_nvml_counts_them() -> None:
    assert dict(environment({}, (2, 3), None)) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert environment({}, (), None) == ()


def test_the_api_key_is_in_the_environment_and_never_in_a_command_line_or_a_repr() -> None:
    launch = read(PRIMARY + 'api_key = "sk-hidden"').launches()["primary"]
    assert dict(launch.env)["VLLM_API_KEY"] == "sk-hidden"
    assert "sk-hidden" not in "".join(launch.argv) + repr(launch)


@pytest.mark.parametrize(("args", "names"), [
    ("", ("m",)),
    ('args.served-model-name = "qwen"', ("qwen",)),
    ('args.served_model_name = ["a", "qwen"]', ("a", "qwen")),
])
def test_requests_use_the_served_names(args: str, names: tuple[str, ...]) -> None:
    assert read(PRIMARY + args).launches()["primary"].models == names


@pytest.mark.parametrize(("args", "most"), [
    ("", None),
    ("args.max-num-seqs = 64", 64),
    ('args.max_num_seqs = "64"', 64),
    ("args = { max-num-seqs = 64, data-parallel-size = 2 }", 128),
    ("args.data-parallel-size = 2", None),
    ("args.max-num-seqs = 0", None),
    ('args.max-num-seqs = "many"', None),
    ("args.max-num-seqs = [64]", None),
    ("args = { max-num-seqs = 64, data-parallel-size = 1.5 }", None),
    ('args.max-num-seqs = "unset"', None),
])
def test_how_many_requests_run_at_a_time_is_read_from_the_args(args: str, most: int | None) -> None:
    assert read(PRIMARY + args).plan(seed=0).engine("primary").max_seqs == most


@pytest.mark.parametrize(("host", "url"), [
    ("127.0.0.1", "http://127.0.0.1:8100"),
    ("0.0.0.0", "http://127.0.0.1:8100"),
    ("::", "http://[::1]:8100"),
    ("10.0.0.5", "http://10.0.0.5:8100"),
])
def test_an_engine_that_listens_everywhere_is_asked_on_loopback(host: str, url: str) -> None:
    assert read(PRIMARY + f'host = "{host}"').launches()["primary"].url == url


def test_a_launch_knows_its_log(here: Path) -> None:
    launch = read(PRIMARY).launches()["primary"]
    assert (launch.log_path, launch.cwd) == (here / "logs/primary.log", here)


# -- the cards' levels

@pytest.mark.parametrize(("share", "warn", "degrade"), [
    (0.8, 0.85, 0.90),
    (0.5, 0.55, 0.60),
    (0.92, 0.96, 0.98),
    (1.6, 0.98, 0.99),      # two services that do not fit: still below 1
])
def test_auto_levels_lie_above_the_engines_share(share: float, warn: float, degrade: float) -> None:
    assert levels(share, None, None) == (warn, degrade)


@given(st.floats(0.01, 2), st.none() | st.floats(0.01, 1), st.none() | st.floats(0.01, 1))
def test_a_fixed_level_is_kept_and_an_auto_one_gives_way(share: float, warn: float | None, high: float | None) -> None:
    low, degrade = levels(share, warn, high)
    assert warn is None or low == round(warn, 4)
    assert high is None or degrade == round(high, 4)
    if warn is None or high is None:
        assert 0 < low <= degrade <= 1
    if warn is None and high is None:
        assert min(share, 0.96) < low < degrade < 1


def test_a_primary_and_its_backup_take_turns_and_services_add_up() -> None:
    assert card_shares([
        EnginePlan("a", 1, (0, 1), 0.5),
        EnginePlan("b", 2, (0,), 0.6, backup_for="a"),
        EnginePlan("c", 3, (1,), 0.3),
        EnginePlan("d", 4, (2,)),
        EnginePlan("e", 5, (), 0.9),
    ]) == {0: 0.6, 1: 0.8, 2: 0.92}


@pytest.mark.parametrize(("args", "share"), [
    ({}, None),
    ({"gpu-memory-utilization": 0.8}, 0.8),
    ({"device-memory-utilization": "0.7"}, 0.7),
    ({"gpu-memory-utilization": "lots"}, None),
    ({"gpu-memory-utilization": 80}, None),
    ({"gpu-memory-utilization": 10**400}, None),
    ({"gpu-memory-utilization": 0.8, "kv-cache-memory-bytes": 1}, None),
])
def test_the_share_is_what_args_say(args: dict[str, object], share: float | None) -> None:
    assert share_of(args) == share  # type: ignore[arg-type]


def test_fixed_levels_hold_for_every_card_that_has_an_engine() -> None:
    thresholds = read(PRIMARY + "gpus = [0, 3]\n[thresholds]\nvram_warn = 0.97\nvram_degrade = 1").plan(0).thresholds
    assert thresholds.vram_warn == ((0, 0.97), (3, 0.97))
    assert thresholds.vram_degrade == ((0, 1.0), (3, 1.0))


# -- sources

def test_the_environment_wins_over_secret_files_and_they_over_the_file(here: Path) -> None:
    (here / "engines.primary.api_key").write_text("from-file\n")
    (here / "engines.primary.model").write_text("from-file")
    launch = read(
        PRIMARY + 'api_key = "from-toml"',
        CREDENTIALS_DIRECTORY=str(here),
        LLM_WATCHDOG_ENGINES__PRIMARY__MODEL="from-env",
    ).launches()["primary"]
    assert launch.api_key == SecretStr("from-file")
    assert launch.model == "from-env"


# -- a backup that stands by

SLEEPER = ("--enable-sleep-mode", ("VLLM_SERVER_DEV_MODE", "1"))


@pytest.mark.parametrize("mode", ["cold", "sleeping", "hot"])
def test_only_a_sleeping_backup_is_started_in_sleep_and_developer_mode(mode: str) -> None:
    settings = read(PRIMARY + BACKUP + f"standby = '{mode}'")
    launches, (flag, variable) = settings.launches(), SLEEPER
    assert settings.plan(seed=0).engine("backup").standby is Standby(mode)
    assert settings.plan(seed=0).engine("primary").standby is Standby.COLD
    assert (flag in launches["backup"].argv) is (variable in launches["backup"].env) is (mode == "sleeping")
    assert flag not in launches["primary"].argv and variable not in launches["primary"].env


def test_a_backup_is_cold_unless_it_says_otherwise() -> None:
    assert read(PRIMARY + BACKUP).plan(seed=0).engine("backup").standby is Standby.COLD


def test_what_a_sleeping_backup_needs_can_not_be_turned_off() -> None:
    text = PRIMARY + BACKUP + """standby = "sleeping"
args = { enable-sleep-mode = false, seed = 1 }
env = { VLLM_SERVER_DEV_MODE = "0", A = "b" }
"""
    launch = read(text).launches()["backup"]
    assert launch.argv.count("--enable-sleep-mode") == 1 and "--no-enable-sleep-mode" not in launch.argv
    assert dict(launch.env)["VLLM_SERVER_DEV_MODE"] == "1" and dict(launch.env)["A"] == "b"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org", "127.0.0.1.example.org"])
def test_a_sleeping_backup_never_listens_where_others_can_reach_it_not_even_by_inheritance(host: str) -> None:
    for text in (PRIMARY + BACKUP + f"standby = 'sleeping'\nhost = '{host}'", PRIMARY + f"host = '{host}'" + BACKUP +
                 "standby = 'sleeping'"):
        assert any("engines.backup.host: " in problem for problem in problems(text))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_sleeping_backup_listens_on_loopback(host: str) -> None:
    text = PRIMARY + "host = '0.0.0.0'" + BACKUP + f"standby = 'sleeping'\nhost = '{host}'"
    assert read(text).launches()["backup"].host == host


@pytest.mark.parametrize("mode", ["cold", "hot"])
def test_other_backups_may_listen_everywhere(mode: str) -> None:
    assert read(PRIMARY + BACKUP + f"standby = '{mode}'\nhost = '0.0.0.0'").launches()["backup"].host == "0.0.0.0"


@pytest.mark.parametrize(("mode", "share"), [
    (Standby.COLD, 0.6), (Standby.SLEEPING, 0.6 + SLEEPER_SHARE), (Standby.HOT, 1.1)])
def test_a_hot_backup_adds_to_what_is_taken_of_a_card_and_a_sleeper_its_rest(mode: Standby, share: float) -> None:
    engines = (EnginePlan("p", 1, (0,), 0.6), EnginePlan("b", 2, (0,), 0.5, "p", mode))
    assert card_shares(engines) == {0: pytest.approx(share)}


def test_a_variable_that_nearly_is_a_key_is_said_and_one_that_is_not_ours_is_not() -> None:
    environ = {
        "LLM_WATCHDOG_GATEWAY_LISTEN": "x", "LLM_WATCHDOG_DAEMONS_LOG_DIR": "x", "LLM_WATCHDOG_ALERT": "{}",
        "LLM_WATCHDOG_DAEMON__LOG_DIR": "x", "LLM_WATCHDOG_ENGINES": "{}", "LLM_WATCHDOG_MARK": "x",
        "LLM_WATCHDOG_SIM_GPU": "x", "PATH": "x",
    }
    assert misspelt(environ) == (
        "LLM_WATCHDOG_ALERT is not read, did you mean LLM_WATCHDOG_ALERTS (a whole section in JSON)?",
        "LLM_WATCHDOG_DAEMONS_LOG_DIR is not read, did you mean LLM_WATCHDOG_DAEMON__LOG_DIR?",
        "LLM_WATCHDOG_GATEWAY_LISTEN is not read, did you mean LLM_WATCHDOG_GATEWAY__LISTEN?",
    )


def test_the_core_is_told_sizing_flags_and_never_a_secret() -> None:
    args = 'args = { max-num-seqs = 64, gpu-memory-utilization = 0.8, hf-overrides = { a = 1 }, served-model-name = "x" }'
    plan = read(PRIMARY + args).plan(seed=0)
    assert dict(plan.engines[0].args) == {"max-num-seqs": "64", "gpu-memory-utilization": "0.8"}


def test_text_of_the_environment_is_read_as_what_its_field_wants() -> None:
    settings = read(
        PRIMARY,
        LLM_WATCHDOG_ENGINES__PRIMARY__PORT="8200",
        LLM_WATCHDOG_ENGINES__PRIMARY__MODEL="123",
        LLM_WATCHDOG_ENGINES__PRIMARY__GPUS="[1]",
        LLM_WATCHDOG_ENGINES__PRIMARY__ARGS__ENFORCE_EAGER="true",
        LLM_WATCHDOG_ENGINES__PRIMARY__ARGS__KV_CACHE_DTYPE="fp8",
        LLM_WATCHDOG_ENGINES__PRIMARY__ENV__HF_Home="1",
        LLM_WATCHDOG_THRESHOLDS__VRAM_WARN="0.99",
        LLM_WATCHDOG_THRESHOLDS__RSS_GIB="2",
        LLM_WATCHDOG_DAEMON__LOG_DIR="/tmp/x",
        LLM_WATCHDOG_FAILOVER__FAILBACK="auto",
    )
    launch = settings.launches()["primary"]
    assert (launch.port, launch.model, launch.gpus) == (8200, "123", (1,))
    assert launch.argv[-3:] == ("--enforce-eager", "--kv-cache-dtype", "fp8")
    assert ("HF_Home", "1") in launch.env
    assert (settings.thresholds.vram_warn, settings.thresholds.rss_gib) == (0.99, 2)
    assert settings.daemon.log_dir == Path("/tmp/x")


def test_the_environment_alone_is_enough() -> None:
    engine = json.dumps({"big-model": {"model": "m", "port": 8100, "command": [sys.executable]}})
    settings = load(None, {"LLM_WATCHDOG_ENGINES": engine, "LLM_WATCHDOG_DAEMON__SAMPLE_S": "2"})
    assert list(settings.launches()) == ["big-model"]
    assert settings.daemon.sample_s == 2


def test_an_arg_of_the_environment_replaces_the_files_however_it_is_written() -> None:
    text = PRIMARY + "args = { max-num-seqs = 64 }"
    launch = read(text, LLM_WATCHDOG_ENGINES__PRIMARY__ARGS__MAX_NUM_SEQS="8").launches()["primary"]
    assert launch.argv[-2:] == ("--max-num-seqs", "8")


def test_variables_that_are_no_settings_are_left_alone() -> None:
    assert read(PRIMARY, LLM_WATCHDOG_MARK="x:y:1", LLM_WATCHDOG_SIM_GPU="/x", OTHER__A="1")


def test_a_problem_of_the_environment_names_the_variable() -> None:
    assert problems(PRIMARY, LLM_WATCHDOG_ENGINES__PRIMARY__PORT="x", LLM_WATCHDOG_ENGINS__A__PORT="1") == (
        'environment: LLM_WATCHDOG_ENGINES__PRIMARY__PORT: is "x", expected a whole number',
        'environment: LLM_WATCHDOG_ENGINS: unknown key, expected perhaps "engines"',
    )


def test_the_usual_file_is_found() -> None:
    Path("config.toml").write_text(PRIMARY)
    assert list(load(None, {}).engines) == ["primary"]


# -- the gateway's rules

RULES = """
[[gateway.rules]]
engine = "primary"
api_key = "batch"
header = "X-Tier: b*"
[[gateway.rules]]
engine = "primary"
prompt_tokens_min = 8000
prompt_tokens_max = 9000
model = "m"
path = "/v1/*"
when_down = "spill"
[gateway.keys]
batch = "sk-1"
"""


def test_rules_are_read_in_their_order_and_keys_become_hashes() -> None:
    first, second = read(PRIMARY + RULES).rules()
    assert first == Rule("primary", header="X-Tier: b*", key=key_of(b"sk-1"), key_name="batch")
    assert second == Rule("primary", WhenDown.SPILL, 8000, 9000, "m", "/v1/*")
    assert "sk-1" not in json.dumps(first.document())


def test_rules_and_their_keys_come_from_the_environment_too() -> None:
    given = json.dumps([{"engine": "primary", "api_key": "a"}, {"engine": "nobody"}])
    assert problems(PRIMARY, LLM_WATCHDOG_GATEWAY__RULES=given, LLM_WATCHDOG_GATEWAY__KEYS__A="sk-1") == (
        'environment: LLM_WATCHDOG_GATEWAY__RULES#2.engine: no engine is called "nobody", expected one of primary',)
    (rule,) = read(PRIMARY, LLM_WATCHDOG_GATEWAY__RULES=json.dumps([{"engine": "primary", "api_key": "a"}]),
                   LLM_WATCHDOG_GATEWAY__KEYS__A="sk-1").rules()
    assert rule.key == key_of(b"sk-1")


def test_a_key_comes_from_a_secret_file(here: Path) -> None:
    (here / "credentials").mkdir()
    (here / "credentials" / "gateway.keys.batch").write_text("sk-2\n")
    text = "[gateway]\nrules = [{ engine = 'primary', api_key = 'batch' }]"
    assert read(PRIMARY + text, CREDENTIALS_DIRECTORY=str(here / "credentials")).rules()[0].key == key_of(b"sk-2")


def test_every_rule_that_is_wrong_is_told_with_its_number() -> None:
    text = "[gateway]\nrules = [{ engine = 'primary', path = 5 }, { engine = 'primary', model = '' }, { engin = 'a' }]"
    assert [line.split(": ")[1] for line in problems(PRIMARY + text)] == [
        "gateway.rules#1.path", "gateway.rules#2.model", "gateway.rules#3.engin", "gateway.rules#3.engine"]


@pytest.mark.parametrize(("rules", "doubt"), [
    ("{ engine = 'primary' }, { engine = 'primary', path = '/x' }",
     "gateway.rules#2: is never reached: whatever it could get, rule 1 takes before it"),
    ("{ engine = 'primary', prompt_tokens_min = 4096 }",
     "gateway.rules#1.prompt_tokens_min: 4096 is more than primary takes: its max-model-len is 4096"),
    ("{ engine = 'primary', model = 'n' }", 'gateway.rules#1.model: "n" is no model of primary, which serves m')])
def test_doubtful_rules_are_told(rules: str, doubt: str) -> None:
    settings = read(PRIMARY + f"args = {{ max-model-len = 4096 }}\n[gateway]\nrules = [{rules}]")
    assert settings.warnings() == (doubt,)


# -- what is refused

@pytest.mark.parametrize(("text", "problem"), [
    ("[daemon]\nsample = 1", 'daemon.sample: unknown key, expected perhaps "sample_s"'),
    (OTHER + "prot = 1\nmodel = 'm'\nport = 8102", 'engines.b.prot: unknown key, expected perhaps "port"'),
    ("[demon]\na = 1", 'demon: unknown key, expected perhaps "daemon"'),
    ("prompt_limit = 'all'",
     "engines.primary.prompt_limit: is 'all', expected \"auto\" or a number of tokens, 1 to 1073741824"),
    ("prompt_limit = 0", 'engines.primary.prompt_limit: is 0, expected "auto" or a number of tokens, 1 to 1073741824'),
    ("over_limit = 'cut'",
     "engines.primary.over_limit: is \"cut\", expected 'wait', 'refuse', 'truncate' or 'truncate-any'"),
    ("vram_share = 2", "engines.primary.vram_share: is 2, expected at most 1"),
    ("[daemon]\nsample_s = '1'", 'daemon.sample_s: is "1", expected a number'),
    ("[daemon]\nsample_s = true", "daemon.sample_s: is true, expected a number"),
    ("[daemon]\nsample_s = 0", "daemon.sample_s: is 0, expected at least 0.1"),
    ('[daemon]\nlisten = "9178"', "daemon.listen: '9178' is no address, expected host:port, such as 0.0.0.0:8000"),
    ('[daemon]\nlisten = "[::1]:8100"', "engines.primary.port: 8100 is also the port of daemon.listen, "
                                        "expected a port of its own"),
    ('[daemon]\ntoken = "guess me"', "daemon.token: is no token, expected at least 16 letters, digits and marks "
                                    "without blanks"),
    ('[daemon]\ntoken = "sixteen blanks x"', "daemon.token: is no token, expected at least 16 letters, digits and marks "
                                            "without blanks"),
    ("[daemon]\nlog_dir = 5", "daemon.log_dir: is 5, expected a path"),
    ("[restart]\nbudget = 1.5", "restart.budget: is 1.5, expected a whole number"),
    ("[restart]\nbackoff_s = -1", "restart.backoff_s: is -1, expected more than 0"),
    ("[restart]\nbackoff_s = 1e9", "restart.backoff_s: is 1000000000.0, expected at most 86400"),
    ("args = { gpu-memory-utilization = 80 }",
     "engines.primary.args.gpu-memory-utilization: is 80, expected a share of the card above 0, at most 1"),
    ("args = { gpu-memory-utilization = 0 }",
     "engines.primary.args.gpu-memory-utilization: is 0, expected a share of the card above 0, at most 1"),
    ("[hang]\nstill_s = inf", "hang.still_s: is inf, expected a finite number"),
    ("[hang]\nstill_s = nan", "hang.still_s: is nan, expected more than 0"),
    ("[restart]\nbackoff_s = 100", "restart.backoff_max_s: 60 lies below backoff_s, expected at least 100"),
    ("[thresholds]\nvram_warn = 1.5",
     'thresholds.vram_warn: is 1.5, expected "auto" or a share of the card above 0, at most 1'),
    ("[thresholds]\nvram_warn = 'high'",
     'thresholds.vram_warn: is not a number, expected "auto" or a share of the card above 0, at most 1'),
    ("[thresholds]\nkv_cache = 2", "thresholds.kv_cache: is 2, expected at most 1"),
    ("[thresholds]\nvram_warn = 0.9\nvram_degrade = 0.8",
     "thresholds.vram_degrade: 0.8 lies below vram_warn, expected at least 0.9"),
    ("[failover]\nfailback = 'now'", "failover.failback: is \"now\", expected 'when-idle', 'auto' or 'manual'"),
    ("[alerts]\nchannels = []", "alerts.channels: is a list, expected a table"),
    ("[alerts.channels.x]", "alerts.channels.x.url: missing, expected a value"),
    ("[alerts.channels.x]\ntype = 'pagerduty'\nurl = 'https://events.pagerduty.com/v2/enqueue'",
     "alerts.channels.x.secret: missing, expected PagerDuty's integration key (Events API v2)"),
    ("[alerts.channels.x]\nurl = 'example.com'",
     "alerts.channels.x.url: not an address, expected https://… or an Apprise URL, such as mailtos://…"),
    ("[alerts.channels.x]\ntype = 'slack'\nurl = 'mailto://a:b@c.de'",
     "alerts.channels.x.url: not for type slack, expected https://… or http://…"),
    ("[alerts.channels.x]\ntype = 'apprise'\nurl = 'https://c.de'",
     "alerts.channels.x.url: not for type apprise, expected an Apprise URL, such as mailtos://…"),
    ("[alerts.channels.x]\nurl = 'https://hooks.slack.com/services/a'\nsecret = 's'",
     "alerts.channels.x.secret: slack has no use for it, expected none"),
    ("[alerts.channels.x]\nurl = 'dingtalk://abc'\nheaders = { a = 'b' }",
     "alerts.channels.x.headers: dingtalk has no use for them, expected none"),
    ("[alerts.channels.x]\nurl = 'https://c.de'\nmax_per_hour = 5",
     "alerts.channels.x.max_per_hour: webhook gets every alert by itself, expected none"),
    ("[alerts.channels.x]\nurl = 'https://c.de'\ntype = 'smoke'",
     "alerts.channels.x.type: is \"smoke\", expected 'webhook', 'alertmanager', 'pagerduty', 'slack', 'dingtalk', 'feishu', "
     "'wecom' or 'apprise'"),
    ("[alerts.channels.x]\nurl = 'https://c.de'\nmin_severity = 'bad'",
     "alerts.channels.x.min_severity: is \"bad\", expected 'warning', 'critical' or 'page'"),
    ("[alerts.channels.x]\nurl = 'https://c.de'\nquiet_hours = '22-7'",
     'alerts.channels.x.quiet_hours: not a part of the day, expected such as "22:00-07:00"'),
    ("[alerts.channels.x]\nurl = 'https://c.de'\nquiet_hours = '07:00-07:00'",
     'alerts.channels.x.quiet_hours: not a part of the day, expected such as "22:00-07:00"'),
    ("[alerts]\nremind_s = -1", "alerts.remind_s: is -1, expected at least 0"),
    ("[alerts.templates]\ntitle = 'costs 5$'",
     "alerts.templates.title: holds a $ that begins no name, expected $name, ${name}, or $$ for a $"),
    ("[alerts.templates]\ntext = '$hots'",
     "alerts.templates.text: $hots is no name, expected some of $action, $cause, $class, $engine, $failures, $folder, $gap, "
     "$host, $human, $incident, $kind, $next, $opened, $resolved, $service, $state, $title, $urgency"),
    (OTHER + "model = 'm'\nport = 8102\nargs = { hf-token = 'x' }",
     "engines.b.args.hf-token: can be read by every user of the host, expected engines.b.env.HF_TOKEN"),
    (OTHER + "port = 8102", "engines.b.model: missing, expected the model's name or folder"),
    (OTHER + "model = 'm'", "engines.b.port: missing, expected the port that the engine listens on"),
    (OTHER + "model = 'm'\nport = 80", "engines.b.port: is 80, expected at least 1024"),
    (OTHER + "model = 'm'\nport = 8100",
     "engines.b.port: 8100 is also engines.primary.port, expected a port of its own"),
    ("[engines.b]\nbackup_for = 'primry'\nport = 8102",
     'engines.b.backup_for: no engine is called "primry", expected perhaps "primary"'),
    ("[engines.b]\nbackup_for = 'b'\nport = 8102",
     'engines.b.backup_for: is the engine itself, expected one of primary'),
    (SPARE + "[engines.c]\nbackup_for = 'b'\nport = 8103",
     'engines.c.backup_for: "b" is a backup itself, expected one of primary'),
    (SPARE + "[engines.c]\nbackup_for = 'primary'\nport = 8103",
     'engines.c.backup_for: "primary" has a backup, "b", expected one backup for each engine'),
    (SPARE + "standby = 'warm'",
     "engines.b.standby: is \"warm\", expected 'cold', 'sleeping' or 'hot'"),
    (SPARE + "standby = 'sleeping'\nhost = '0.0.0.0'",
     'engines.b.host: "0.0.0.0" would expose vLLM\'s developer endpoints, which sleep needs, expected 127.0.0.1'),
    (SPARE + "[engines.c]\ncommand = ['/bin/true']\nmodel = 'm'\nport = 8103\nstandby = 'hot'",
     "engines.c.standby: only a backup stands by, expected it beside backup_for"),
    ("[gateway]\nrules = [{ engine = 'primry' }]",
     'gateway.rules#1.engine: no engine is called "primry", expected perhaps "primary"'),
    ("[gateway]\nrules = [{ engine = 'primary' }, { path = '/x' }]",
     "gateway.rules#2.engine: missing, expected an engine, one of primary"),
    (SPARE + "[gateway]\nrules = [{ engine = 'b' }]",
     'gateway.rules#1.engine: is the backup of "primary", expected that: its backup comes with it'),
    ("[gateway]\nrules = [{ engine = 'primary', prompt_tokens_min = 9, prompt_tokens_max = 8 }]",
     "gateway.rules#1.prompt_tokens_max: 8 lies below prompt_tokens_min, expected at least 9"),
    ("[gateway]\nrules = [{ engine = 'primary', prompt_tokens_min = '9' }]",
     'gateway.rules#1.prompt_tokens_min: is "9", expected a whole number'),
    ("[gateway]\nrules = [{ engine = 'primary', token_min = 9 }]",
     'gateway.rules#1.token_min: unknown key, expected perhaps "prompt_tokens_min"'),
    ("[gateway]\nrules = [{ engine = 'primary', when_down = 'fly' }]",
     "gateway.rules#1.when_down: is \"fly\", expected 'wait', 'refuse' or 'spill'"),
    ("[gateway]\nrules = [{ engine = 'primary', model = 'a*b' }]",
     "gateway.rules#1.model: holds a * that is not its last character, expected a text, or the beginning of one and *"),
    ("[gateway]\nrules = [{ engine = 'primary', model = '" + "m" * 257 + "' }]",
     "gateway.rules#1.model: is text, expected at most 256 characters"),
    ("[gateway]\nrules = [{ engine = 'primary', header = 'no header' }]",
     "gateway.rules#1.header: is no header, expected its name, or Name: value"),
    ("[gateway]\nrules = [{ engine = 'primary', header = 'Authorization: Bearer sk-1' }]",
     "gateway.rules#1.header: Authorization holds a secret, expected api_key with a name of gateway.keys"),
    ("[gateway]\nrules = [{ engine = 'primary', api_key = 'bach' }]\nkeys = { batch = 'sk-1' }",
     'gateway.rules#1.api_key: no key is called "bach", expected a name of gateway.keys, perhaps "batch"'),
    ("[gateway]\nkeys = { a = 'sk-1', b = 'sk-1' }",
     "gateway.keys.b: is the same as gateway.keys.a, expected each key once"),
    ("[gateway]\nkeys = { a = 5 }", "gateway.keys.a: is a whole number, expected text"),
    ("[gateway]\nrules = 'primary'", "gateway.rules: is text, expected a list"),
    (SPARE + "gpus = [0, 0]",
     "engines.b.gpus: names a card twice, expected each once"),
    (SPARE + "gpus = [-1]", "engines.b.gpus#1: is -1, expected at least 0"),
    (SPARE + "gpus = ['one']",
     "engines.b.gpus#1: 'one' is no card, expected its index or its UUID, as nvidia-smi -L shows them"),
    (SPARE + "gpus = [0, 'GPU-0']",
     "engines.b.gpus#2: no card here has the UUID GPU-0, expected an index, since /proc/driver/nvidia/gpus lists no card"),
    (SPARE + "gpus = ['MIG-7d4f6f63']",
     "engines.b.gpus#1: is a part of a card, expected none in gpus, and env.CUDA_VISIBLE_DEVICES for a MIG instance"),
    (SPARE + "command = 'vllm serve'",
     "engines.b.command: is text, expected a list"),
    (SPARE + "command = []",
     "engines.b.command: is a list, expected at least one item"),
    (SPARE + "command = ['no-such-program']",
     'engines.b.command: "no-such-program" is not found in PATH, expected a program or its full path'),
    (SPARE + "command = ['/no/such']",
     'engines.b.command: "/no/such" does not exist, expected a program'),
    (SPARE + "command = ['/etc/passwd']",
     'engines.b.command: "/etc/passwd" is not executable, expected a program'),
    (SPARE + "args = { port = 1 }",
     "engines.b.args.port: passed by the watchdog, expected engines.b.port"),
    (SPARE + "args = { api_key = 'sk-1' }",
     "engines.b.args.api-key: can be read by every user of the host, expected engines.b.api_key"),
    (SPARE + "args = { max_num_seqs = 1, max-num-seqs = 2 }",
     "engines.b.args.max-num-seqs: written twice, with - and with _, expected once"),
    (SPARE + "args = { seed = 2020-01-01 }",
     "engines.b.args.seed: not for a flag, expected true, false, a number, text, a table, or a list of them"),
    (SPARE + "args = { '--seed' = 1 }",
     "engines.b.args.--seed: not a flag, expected its long name without the dashes in front"),
    (SPARE + "env = { A = 5 }",
     "engines.b.env.A: is a whole number, expected text"),
    (SPARE + "env = { VLLM_API_KEY = 'k' }",
     "engines.b.env.VLLM_API_KEY: the watchdog's probes need it too, expected engines.b.api_key"),
    (SPARE + "gpus = [0]\nenv = { CUDA_VISIBLE_DEVICES = '1' }",
     "engines.b.env.CUDA_VISIBLE_DEVICES: set from engines.b.gpus, expected only one of the two"),
    (SPARE + "env = { LLM_WATCHDOG_MARK = 'x' }",
     "engines.b.env.LLM_WATCHDOG_MARK: set by the watchdog, expected another name"),
    (SPARE + "env = { 'A=B' = 'x' }", "engines.b.env.A=B: not the name of a variable, expected letters, digits and _"),
    (SPARE + 'args = { seed = "a\\u0000" }', "engines.b.args.seed: holds a NUL character, expected plain text"),
    ("[daemon]\nlog_dir = 'a\\u0000'".replace("'", '"'),
     "daemon.log_dir: holds a line break or a control character, expected plain text"),
    ("[engines.gpu]\nmodel = 'm'\nport = 8102",
     'engines.gpu: a name with a meaning of its own in reports, expected another than "host" and "gpu"'),
    ("[engines.Big]\nmodel = 'm'\nport = 8102",
     "engines.Big: not a name, expected at most 32 of a-z 0-9 _ -, a letter or digit first"),
    ("[daemon]\nstate_dir = '/dev/null/x'",
     "daemon.state_dir: /dev/null is not a folder, expected a folder that can be written"),
    ("[daemon]\nlog_dir = '/etc/passwd'",
     "daemon.log_dir: /etc/passwd is not a folder, expected a folder that can be written"),
])
def test_a_problem_is_one_line_that_says_where_what_and_what_was_expected(text: str, problem: str) -> None:
    assert problems(PRIMARY + text) == (f"config.toml: {problem}",)


def test_cards_named_by_uuid_are_known_by_their_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "DRIVER", tmp_path)
    for bus, digit in (("0000:18:00.0", "1"), ("0000:9a:00.0", "2")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"GPU UUID: \t GPU-{digit * 8}-1111-1111-1111-{'1' * 12}\n")
    settings = read(PRIMARY + "gpus = ['GPU-22222222-1111-1111-1111-111111111111', 0]")
    assert settings.plan(seed=1).engines[0].gpus == (1, 0)
    env = dict(settings.launches()["primary"].env)
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("1,0", "PCI_BUS_ID"), "older vLLM knows indices only"
    assert problems(PRIMARY + "gpus = ['GPU-22222222-1111-1111-1111-111111111111', 1]") == (
        "config.toml: engines.primary.gpus: names a card twice, expected each once",)


def test_all_problems_are_told_at_once() -> None:
    told = problems(PRIMARY + """
foo = 1
gpus = "all"
[engines.Big]
port = 1
[engines.b]
backup_for = "nobody"
port = 8100
[restart]
budget = "many"
[alerts.channels.x]
tpye = 1
""")
    assert [line.split(": ")[1] for line in told] == [
        "engines.primary.gpus", "engines.primary.foo", "engines.Big", "engines.Big.port", "restart.budget",
        "alerts.channels.x.url", "alerts.channels.x.tpye", "engines.b.backup_for", "engines.b.port",
    ]


def test_no_engine_is_a_problem() -> None:
    assert problems("") == ("config.toml: engines: none, expected a table [engines.NAME] with model and port",)


def test_a_socket_path_longer_than_the_kernel_takes_is_refused() -> None:
    (told,) = problems(f"{PRIMARY}[daemon]\nstate_dir = '/tmp/{'x' * 100}'")
    assert told.startswith("config.toml: daemon.socket: ")
    assert told.endswith("bytes long, expected at most 107")


@pytest.mark.parametrize(("data", "problem"), [
    (b"a = [\n", "end of document: Invalid value, expected TOML"),
    (b"[daemon]\nsample_s 1\n", "line 2, column 10: Expected '=' after a key in a key/value pair, expected TOML"),
    (b"a = 1\na = 2\n", "line 2, column 6: Cannot overwrite a value, expected TOML"),
    (b"a = \xff", "byte 4 is not UTF-8, expected TOML"),
    (b"a = " + b"[" * 5000, "a value beyond what TOML readers take, expected a configuration"),
    (b"a = " + b"9" * 5000, "a value beyond what TOML readers take, expected a configuration"),
    (b"#" * (1 << 20) + b"#", "larger than 1 MiB, expected a configuration in TOML"),
])
def test_what_is_no_toml_is_told_with_its_place(data: bytes, problem: str) -> None:
    Path("config.toml").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load(Path("config.toml"), {})
    assert caught.value.problems == (f"config.toml: {problem}",)


def test_a_file_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^no\.toml: No such file or directory, expected a readable TOML file$"):
        load(Path("no.toml"), {})
    with pytest.raises(ConfigError, match=r"^\.: Is a directory, expected a readable TOML file$"):
        load(Path("."), {})


def test_a_key_with_a_line_break_is_told_in_one_line() -> None:
    assert len(problems(PRIMARY + '[daemon]\n"a\\nb" = 1')[0].splitlines()) == 1


@pytest.mark.parametrize("text", [
    "[engines.primary]\napi_kee = 'S3CRET'",
    "[engines.primary]\napi_key = ['S3CRET']",
    "[engines.primary]\napi_key = \"S3CRET\\n\"",
    "[engines.primary]\nenv = 'S3CRET'",
    "[engines.primary]\nenv = { HF_TOKEN = ['S3CRET'] }",
    "[engines.primary]\nargs = { hf-token = 'S3CRET', port = 'S3CRET' }",
    "[engines.primary]\nargs = { hf-token = ['S3CRET', 2020-01-01] }",
    "[alerts]\nchannels = 'S3CRET'",
    "[alerts.channels]\nx = 'S3CRET'",
    "[alerts.channels.x]\nurl = 'S3CRET'",
    "[alerts.channels.x]\nurl = 'http://x'\nheaders = { a = \"S3CRET\\r\\n\" }",
    "[alerts.channels.x]\nurl = 'http://x'\nheaders = 'S3CRET'",
    "[alerts.channels.x]\nurl = 'http://S3CRET@[/'",
    "[alerts.channels.x]\nurl = 'S3CRET://'",
    "[alerts.channels.x]\nurl = 'slack://T0/B0/S3CRET'\nsecret = 'S3CRET'",
    "[alerts.channels.x]\nurl = 'pagerduty://S3CRET'\nheaders = { a = 'S3CRET' }",
    "[alerts.channels.x]\nurl = 'https://x'\nsecret = ['S3CRET']",
])
def test_no_problem_ever_says_a_secret(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert "S3CRET" not in str(caught.value) + repr(caught.value)
    assert caught.value.__cause__ is None


def test_settings_do_not_show_their_secrets() -> None:
    channel = '[alerts.channels.x]\nurl = "http://x/S3CRET"\nheaders = { A = "S3CRET" }'
    settings = read(PRIMARY + 'api_key = "S3CRET"\n' + channel)
    assert "S3CRET" not in repr(settings) + str(settings.model_dump_json())


NOBODY = """
import os
from vllm_watchdog.config_load import load
from vllm_watchdog.config_problems import ConfigError
os.chdir("/")
os.setuid(65534)
try:
    load(None, {"LLM_WATCHDOG_ENGINES": '{"a": {"model": "m", "port": 8100, "command": ["/bin/true"]}}'})
except ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_that_may_not_be_written_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", NOBODY], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines() == [
        "config.toml: daemon.state_dir: / can't be written, expected a folder that can be written",
        "config.toml: daemon.log_dir: / can't be written, expected a folder that can be written",
    ]


def test_a_current_directory_that_is_gone_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = here / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="the current directory is gone, expected one that exists"):
        load(Path("/etc/none.toml"), {})


def test_a_usual_place_that_may_not_be_looked_at_is_told(here: Path) -> None:
    (here / "config.toml").symlink_to("config.toml")
    with pytest.raises(ConfigError, match=r"^config\.toml: Too many levels of symbolic links, expected"):
        load(None, {})


def test_secret_files_that_cannot_be_read_are_told(here: Path) -> None:
    assert problems(PRIMARY, CREDENTIALS_DIRECTORY=str(here / "none")) == (
        f"{here}/none: No such file or directory, expected a folder of readable text files",
    )
    (here / "engines.primary.api_key").write_bytes(b"\xff")
    assert problems(PRIMARY, CREDENTIALS_DIRECTORY=str(here)) == (
        f"{here}: not UTF-8, expected a folder of readable text files",
    )


def test_a_section_of_the_environment_that_is_no_table_is_told() -> None:
    assert problems(PRIMARY, LLM_WATCHDOG_DAEMON="{") == (
        "environment: LLM_WATCHDOG_DAEMON: is text, expected a table",
    )


KEYS = [
    *Settings.model_fields, *Engine.model_fields, *Channel.model_fields, *Alerts.model_fields,
    *keys_at(Settings, ("daemon",)), *keys_at(Settings, ("thresholds",)), *keys_at(Settings, ("restart",)),
    "primary", "b", "", "PATH", "port", "max-num-seqs", "gpu-memory-utilization", "a.b", "\n",
]
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(KEYS)
TREES = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=25,
)


@given(st.dictionaries(st.sampled_from(list(Settings.model_fields)), TREES, min_size=1))
def test_whatever_is_configured_is_settings_or_problems_of_one_line_and_never_a_traceback(tree: object) -> None:
    assert isinstance(tree, dict)
    environ = {f"LLM_WATCHDOG_{section.upper()}": json.dumps(value) for section, value in tree.items()}
    try:
        load(None, environ).warnings()
    except ConfigError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.isprintable()
            assert ", expected " in problem


def test_nothing_is_created(here: Path) -> None:
    read(PRIMARY)
    assert [path.name for path in here.iterdir()] == ["config.toml"]


# -- doubts

@pytest.mark.parametrize(("text", "warning"), [
    ("gpus = [0]\nargs = {gpu-memory-utilization = 0.9}\n[thresholds]\nvram_warn = 0.85",
     "thresholds.vram_warn: 0.85 of GPU 0 is crossed as long as its engines take 0.9"),
    ("[thresholds]\nvram_degrade = 0.9", "thresholds.vram_degrade: watches no card, since no engine names its gpus"),
    ("gpus = [0]\n[engines.b]\nmodel = 'm'\nport = 8102\ngpus = [0]\ncommand = ['/bin/true']",
     "engines: on GPU 0 primary 0.92 + b 0.92 = 1.84, with CUDA contexts of 0.01 each 1.86: more than the card, the last "
     "one to start will not fit"),
    ("args = { swap_space = 4 }",
     "engines.primary: --swap-space is no flag of newer vLLM versions: last in 0.16; leave it out, "
     "or use --kv-offloading-size"),
    ("prompt_limit = 9000\nargs = { max-model-len = '8k' }",
     "engines.primary.prompt_limit: 9000 is more than its max-model-len of 8000, which then counts"),
    ("vram_share = 0.5", "engines.primary.vram_share: limits nothing, since the engine names no gpus"),
    ("args = { disable-log-stats = true }",
     "engines.primary.args.disable-log-stats: without counters a busy engine and a hung one look alike for "
     "hang.patience_blind_s"),
    ("args = { shutdown-timeout = 60 }",
     "engines.primary.stop_timeout_s: 30 kills the engine before its --shutdown-timeout of 60 s is over"),
    ("max_concurrent = 16\nargs = { max-num-seqs = 8 }",
     "engines.primary.max_concurrent: 16 is over its max-num-seqs of 8: the rest waits in vLLM, first in first out"),
    ("gpus = [0]\nargs = { tensor-parallel-size = 2, gpu-memory-utilization = 0.8 }",
     "engines.primary.gpus: names 1 cards, but its args spread it over 2"),
    ("[daemon]\nlisten = '0.0.0.0:9178'",
     'daemon.listen: "0.0.0.0" lets everybody who can reach it read the page; only changes need the token'),
    ("[engines.b]\nbackup_for = 'primary'\nmodel = '/no/such/folder'\nport = 8102",
     'engines.b.model: "/no/such/folder" does not exist here: an engine that can\'t read it is held'),
    *((f"[alerts.channels.x]\nurl = 'http://127.0.0.1:9/{path}'",
       f'alerts.channels.x: gets our own JSON as a plain webhook, but its address looks like {kind}: set type = "{kind}"')
      for kind, path in (("slack", "services/T0/B0/x"), ("dingtalk", "robot/send?access_token=x"),
                         ("feishu", "open-apis/bot/v2/hook/x"), ("wecom", "cgi-bin/webhook/send?key=x"))),
    ("[alerts.channels.x]\nurl = 'http://hooks.slack.com/services/T0/B0/x'",
     "alerts.channels.x.url: slack takes https:// only"),
])
def test_what_is_doubtful_is_a_warning(text: str, warning: str) -> None:
    assert read(PRIMARY + text).warnings() == (warning,)


def test_a_channel_whose_kind_is_said_or_known_is_no_doubt(tmp_path: Path) -> None:
    said = "[alerts.channels.x]\ntype = 'slack'\nurl = 'http://127.0.0.1:9/services/T0/B0/x'\n"
    plain = "[alerts.channels.y]\nurl = 'http://127.0.0.1:9/hook'\n"
    known = "[alerts.channels.z]\nurl = 'https://hooks.slack.com/services/T0/B0/x'\n"
    assert read(PRIMARY + said + plain + known).warnings() == ()
    assert read(PRIMARY.replace('"m"', f'"{tmp_path}"')).warnings() == ()


def test_a_level_above_the_share_is_no_doubt() -> None:
    text = PRIMARY + "gpus = [0]\nargs = {gpu-memory-utilization = 0.8}\n[thresholds]\nvram_warn = 0.85"
    assert read(text).warnings() == ()


def test_flags_that_newer_versions_refuse_are_known() -> None:
    told = unknown_flags((
        "python", "-m", "vllm.entrypoints.api_server", "--disable_log_requests", "--device=cuda",
        "--max-num-seqs", "8", "--no-enable-chunked-prefill", "device",
    ))
    assert [line.split()[0] for line in told] == ["vllm.entrypoints.api_server", "--disable-log-requests", "--device"]


def test_a_shown_command_line_can_be_pasted_and_holds_no_secret() -> None:
    argv = ("vllm", "serve", "a b", "--hf-token", "S3CRET", "--hf-token=S3CRET", "--max-num-batched-tokens", "5")
    assert masked(argv) == "vllm serve 'a b' --hf-token ******** --hf-token=******** --max-num-batched-tokens 5"
    assert masked(("--x", "http://u:p@h/", "--y=http://u:p@h/")) == "--x http://********@h/ --y=http://********@h/"
    assert holds_password(("--x", "a http://u:p@h/")) and not holds_password(("--x", "http://u@h:1/ http://h:1/a@b:c"))
    env = (("HF_TOKEN", "S3CRET"), ("HTTPS_PROXY", "http://u:S3CRET@p:1"), ("TOKENIZERS_PARALLELISM", "true"))
    assert masked_env(env) == "HF_TOKEN=******** HTTPS_PROXY='http://********@p:1' TOKENIZERS_PARALLELISM=true"


def test_a_launch_is_plain_data() -> None:
    assert isinstance(read(PRIMARY).launches()["primary"], Launch)
    assert asdict(read(PRIMARY).launches()["primary"])["name"] == "primary"


def test_a_secret_of_the_wrong_type_is_not_said() -> None:
    assert "987654" not in "".join(problems(PRIMARY + "api_key = 987654"))


def test_whoever_only_asks_the_daemon_needs_neither_secrets_nor_a_valid_rest(here: Path) -> None:
    text = '[daemon]\nstate_dir = "/var/lib/x"\n[engines.primary]\nnonsense = 1\n[alerts.channels.a]\n'
    (here / "config.toml").write_text(text)
    environ = {"CREDENTIALS_DIRECTORY": "/no/such/folder", "LLM_WATCHDOG_DAEMON__SAMPLE_S": "2"}
    daemon = load_to_ask(here / "config.toml", environ).daemon
    assert (daemon.socket, daemon.sample_s) == (Path("/var/lib/x/control.sock"), 2.0)
    (here / "config.toml").write_text("[daemon]\nsample_s = -1\n")
    with pytest.raises(ConfigError) as wrong:
        load_to_ask(here / "config.toml", {})
    assert list(wrong.value.problems) == [f"{here}/config.toml: daemon.sample_s: is -1, expected at least 0.1"]


def test_a_file_of_a_folder_of_credentials_is_named_like_its_key(here: Path) -> None:
    (here / "secrets").mkdir()
    (here / "secrets" / "config_engines.primary.api_key").write_text("one\n")
    assert from_credentials(here / "secrets", ("engines",)) == {"engines": {"primary": {"api_key": "one"}}}

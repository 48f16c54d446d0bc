"""The command line of the stand-in: the flags of `vllm serve` and its own, read into the frozen `Options`.

An unknown flag, or one that 0.32 has removed, ends with argparse's usage text, the error line and exit status 2, as
vLLM's own parser does. Values are not checked beyond what the stand-in uses. It never blocks and starts nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_watchdog.sim import vllm_flags
from vllm_watchdog.sim.faults import RUNTIME_FAULTS, SIM_FIELDS, START_FAILURES, Sim

VERSION = "0.32.0"  # the release whose flags, log lines and metrics are imitated


@dataclass(frozen=True, slots=True)
class Options:
    """What the stand-in uses of its command line and environment."""

    model: str
    served_names: tuple[str, ...]
    host: str
    port: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_tokens: int
    gpu_memory_utilization: float
    tensor_parallel_size: int
    shutdown_timeout_s: float
    block_size: int
    kv_tokens: int
    api_keys: tuple[str, ...]
    log_stats: bool
    log_access: bool
    sleep_mode: bool
    dev_mode: bool
    stats_interval_s: float
    given: str  # vLLM's "non-default args" line
    sim: Sim


EPILOG = "\n".join(
    (
        f"--sim-fail-start: {', '.join(START_FAILURES)}",
        "",
        'POST /sim/fault {"name": NAME, …} from loopback:',
        *(f"  {name}: {text}" for name, text in RUNTIME_FAULTS.items()),
    )
)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="vllm serve",
        description="A stand-in for vLLM: no model, no GPU; tokens are made up at a fixed rate.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("model_tag", nargs="?")
    result.add_argument("-v", "--version", action="version", version=VERSION)
    for entry in vllm_flags.names(vllm_flags.VALUE_TABLE):
        result.add_argument(*entry)
    for entry in vllm_flags.names(vllm_flags.LIST_TABLE):
        result.add_argument(*entry, nargs="+")
    for entry in vllm_flags.names(vllm_flags.SWITCH_TABLE):
        result.add_argument(*entry, action=argparse.BooleanOptionalAction)
    group = result.add_argument_group("stand-in")
    for item in SIM_FIELDS:
        name, kind, text = f"--sim-{item.name.replace('_', '-')}", item.metadata["kind"], item.metadata["help"]
        if kind is bool:
            group.add_argument(name, action="store_true", help=text)
        else:
            group.add_argument(name, type=kind, default=item.default, help=f"{text} (default: {item.default})")
    return result


def _plain(argument: str) -> str:
    """`--max_model_len` and `--compilation-config.mode` as the flag they belong to."""
    name, mark, value = argument.partition("=")
    return name.split(".")[0].replace("_", "-") + mark + value if name.startswith("--") else argument


def human_int(text: str) -> int:
    """`4096`, `32k` (32,000) or `32K` (32,768), as vLLM reads lengths. Raises ValueError."""
    scales = {"k": 1_000, "K": 1_024, "m": 1_000_000, "M": 1_048_576}
    scale = scales.get(text[-1:], 0)
    return int(float(text[:-1]) * scale) if scale else int(text)


def _length(found: argparse.ArgumentParser, flag: str, text: str | None, default: int) -> int:
    if text in (None, "auto", "-1"):
        return default
    try:
        return human_int(str(text))
    except ValueError:
        found.error(f"argument --{flag}: invalid human_readable_int value: {text!r}")


def _given(values: Mapping[str, Any], model: str) -> str:
    named = {key: value for key, value in values.items() if value is not None and not key.startswith("sim_")}
    named.pop("model_tag", None)
    secret = {"api_key", "hf_token"}
    return str({**{key: "***" if key in secret else _typed(value) for key, value in named.items()}, "model": model})


def _typed(value: Any) -> Any:
    """Numbers as numbers, as vLLM prints them."""
    for kind in (int, float):
        try:
            return kind(value) if isinstance(value, str) else value
        except ValueError:
            continue
    return value


def parse(argv: Sequence[str]) -> Options:
    """Reads `[serve] [MODEL] --flag …`; prints usage and raises SystemExit(2) on an unknown or removed flag."""
    words = list(argv[1:] if argv[:1] == ["serve"] else argv)
    reader = parser()
    values = vars(reader.parse_args([_plain(word) for word in words]))
    sim = Sim(**{item.name: values[f"sim_{item.name}"] for item in SIM_FIELDS})
    if sim.fail_start and sim.fail_start not in START_FAILURES:
        choices = ", ".join(START_FAILURES)
        reader.error(f"argument --sim-fail-start: invalid choice: {sim.fail_start!r} (choose from {choices})")
    model = values["model"] or values["model_tag"] or "Qwen/Qwen3-0.6B"

    def number(flag: str, default: int) -> int:
        return _length(reader, flag, values[flag.replace("-", "_")], default)

    block_size = number("block-size", 16)
    blocks = number("num-gpu-blocks-override", 0)
    return Options(
        model=model,
        served_names=tuple(values["served_model_name"] or (model,)),
        host=values["host"] or "0.0.0.0",  # noqa: S104 - vLLM's own default
        port=number("port", 8000),
        max_model_len=number("max-model-len", 32_768),
        max_num_seqs=number("max-num-seqs", 256),
        max_num_batched_tokens=number("max-num-batched-tokens", 2_048),
        long_prefill_tokens=number("long-prefill-token-threshold", 0),
        gpu_memory_utilization=float(values["gpu_memory_utilization"] or 0.92),
        tensor_parallel_size=number("tensor-parallel-size", 1),
        shutdown_timeout_s=float(values["shutdown_timeout"] or 0),
        block_size=block_size,
        kv_tokens=blocks * block_size or sim.kv_tokens,
        api_keys=tuple(values["api_key"] or filter(None, [os.environ.get("VLLM_API_KEY")])),
        log_stats=not values["disable_log_stats"],
        log_access=not values["disable_uvicorn_access_log"],
        sleep_mode=bool(values["enable_sleep_mode"]),
        dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        stats_interval_s=float(os.environ.get("VLLM_LOG_STATS_INTERVAL", "10")),
        given=_given(values, model),
        sim=sim,
    )

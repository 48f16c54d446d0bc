"""The facts a failure line carries: bytes, GPU, other processes, exit codes, lengths, ports, flags.

A table of patterns; all memory is in bytes, all durations in seconds.  Pure and bounded by the line's own length.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Detail = str | int | float | tuple[tuple[int, int], ...]
Details = tuple[tuple[str, Detail], ...]

TEXT_LIMIT = 500        # characters of a line that are kept as evidence
_SECRETS = re.compile(
    r"(?P<kind>hf_|sk-)\w{4,}"
    r"|(?P<name>(?:--api-key|--hf-token|token|bearer|password)['\"]?[= :]\s?['\"]?)[^\s'\",&]{3,}", re.IGNORECASE,
)
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 2**10}
_SIZE = r"([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)"
_OTHERS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")


def size(number: str, unit: str) -> int:
    """"1.5", "GiB" -> bytes."""
    return int(float(number) * _UNITS[unit])


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


def _gib(text: str) -> int:
    return size(text, "GiB")


_PATTERNS: tuple[tuple[str, str, Callable[..., Detail]], ...] = (
    ("requested_bytes", rf"Tried to allocate {_SIZE}", size),
    ("gpu", r"\bGPU (\d+)[ ;]", int),
    ("gpu", r"on device \(?cuda:(\d+)", int),
    ("total_bytes", rf"total capacity of {_SIZE}", size),
    ("total_bytes", rf"{_SIZE} total capacity", size),
    ("total_bytes", r"on device [^/]{0,40}/([\d.]+) GiB\)", _gib),
    ("free_bytes", rf"of which {_SIZE} is free", size),
    ("free_bytes", rf"; {_SIZE} free", size),
    ("free_bytes", r"on device [^/]{0,20}\(([\d.]+)/[\d.]+ GiB\)", _gib),
    ("used_bytes", rf"this process has {_SIZE} memory in use", size),
    ("gpu_memory_utilization", r"desired GPU memory utilization \(([\d.]+),", float),
    ("wanted_bytes", r"desired GPU memory utilization \([\d.]+, ([\d.]+) GiB\)", _gib),
    ("initial_free_bytes", r"Initial free memory:? ([\d.]+) GiB", _gib),
    ("current_free_bytes", r"current free memory:? ([\d.]+) GiB", _gib),
    ("max_model_len", r"max seq len \((\d+)\)", int),
    ("kv_needed_bytes", r"\(?([\d.]+) GiB KV cache is needed", _gib),
    ("kv_available_bytes", r"available KV cache memory \(([\d.]+) GiB\)", _gib),
    ("estimated_max_model_len", r"estimated maximum model length is (\d+)", int),
    ("kv_tokens", r"stored in KV cache \((\d+)\)", int),
    ("dummy_requests", r"warming up sampler with (\d+) dummy requests", int),
    ("exit_code", r"exit code: (-?\d+)", int),
    ("worker", r"Worker proc (\S+) died", str),
    ("worker_pid", r"Worker \S+ pid (\d+) died", int),
    ("engine", r"Engine core proc(?:ess)? (\S+) died", str),
    ("engine_pid", r"Engine process \(pid (\d+)\)", int),
    ("method", r"RPC call to (\w+) timed out", str),
    ("method", r"Invocation of (\w+) method failed", str),
    ("timeout_s", r"Waited (\d+)s", int),
    ("timeout_s", r"No recovery within (\d+)s", int),
    ("timeout_s", r"ran for (\d+) milliseconds", lambda text: int(text) / 1000),
    ("stalled_s", r"block found in (\d+) second", int),
    ("dump", r"Dumped stack to (\S+) due to", str),
    ("port", r"attempting to bind on address \('[^']*', (\d+)", int),
    ("arguments", r"unrecognized arguments: (.{1,200})", str),
    ("argument", r": error: argument (\S+?):", str),
    ("problem", r": error: argument \S+?: (.{1,300})", str),
    ("value", r": error: argument \S+?: invalid [\w ]{1,40}: '([^']{0,60})'", str),
    ("module", r"No module named '?(vllm[\w.]*)", str),
    ("max_model_len", r"User-specified max_model_len \((\d+)\)", int),
    ("model_max_len", r"derived max_model_len \(max_position_embeddings=(\d+)", int),
    ("errno", r"\[Errno (13|28|30)\]", int),
    ("path", r"\[Errno \d+\] [^:]{1,60}: '([^']{1,200})'", str),
    ("architecture", r"Model architectures \[?'?([\w.]+)", str),
    ("model", r"^(?:OSError: )?(\S+) is not a local folder", str),
    ("model", r"'namespace/repo_name': '([^']{1,200})'", str),
    ("url", r"for url:? (https?://[^\s?]+)", str),
    ("preemptions", r"Preemptions: (\d+)", _whole),
)
_COMPILED = tuple((name, re.compile(pattern), convert) for name, pattern, convert in _PATTERNS)


def details_of(message: str) -> Details:
    """Name and value of every fact in the text, each name once."""
    found: dict[str, Detail] = {}
    for name, pattern, convert in _COMPILED:
        if name not in found and (match := pattern.search(message)):
            found[name] = convert(*match.groups())
    if others := tuple((int(pid), size(number, unit)) for pid, number, unit in _OTHERS.findall(message)):
        found["other_processes"] = others
    return tuple(found.items())


def clip(text: str) -> str:
    """At most `TEXT_LIMIT` characters, tokens and keys masked."""
    masked = _SECRETS.sub(lambda match: f"{match['kind'] or match['name']}***", text[: 4 * TEXT_LIMIT])
    return masked if len(masked) <= TEXT_LIMIT else f"{masked[: TEXT_LIMIT - 1]}…"

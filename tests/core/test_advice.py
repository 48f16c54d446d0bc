# ruff: noqa: E501 - a table reads best with a case a line
"""Advice against cases whose remedies are known: from vLLM's own texts, its issues, the signatures, and real logs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_watchdog.core.advice import RULES, advise
from vllm_watchdog.core.case import Case
from vllm_watchdog.core.catalog import CATALOG
from vllm_watchdog.core.levels import CardLevels, Levels
from vllm_watchdog.core.readings import GpuProcess, Holder, InFlight, Mark
from vllm_watchdog.core.verdict import classify

GIB = 1 << 30
LOGS = Path(__file__).parents[1] / "fixtures" / "logs"


def log(name: str, **more: Any) -> Case:
    """What the text of a recorded log tells, and what else is known."""
    verdict = classify((LOGS / f"{name}.log").read_text("utf-8", "replace").splitlines())
    return replace(Case(verdict.class_, verdict.details), **more)


def of(class_: str, more: dict[str, Any] | None = None, args: str = "", **known: Any) -> Case:
    """`args`: `max-num-seqs=64 kv-cache-dtype=fp8`."""
    return Case(class_, tuple((more or {}).items()), flags(args), **known)


def flags(text: str) -> tuple[tuple[str, str], ...]:
    return tuple(word.partition("=")[::2] for word in text.split())  # type: ignore[misc]


def card(used: float = 70, total: float = 80, warm: float | None = None, *others: tuple[int, str, float],
         mark: Mark | None = None, warn: float | None = None) -> CardLevels:
    rows = tuple(GpuProcess(Holder(pid, name, mark), int(gib * GIB)) for pid, name, gib in others)
    return CardLevels(0, "card", int(used * GIB), int(total * GIB), warm=None if warm is None else int(warm * GIB), warn=warn,
                      others=rows)


def levels(*cards: CardLevels, rss: float | None = None, rss_warm: float | None = None) -> Levels:
    return Levels(0.0, cards, rss=None if rss is None else int(rss * GIB),
                  rss_warm=None if rss_warm is None else int(rss_warm * GIB))


def prompt(tokens: int, verdict: str = "held") -> InFlight:
    return InFlight(1, tokens * 4, 1.0, False, "0123456789abcdef", tokens, verdict)


OOM = {"requested_bytes": int(10.78 * GIB), "free_bytes": 6 * GIB, "total_bytes": 80 * GIB, "gpu": 0}
KV = {"max_model_len": 131072, "kv_needed_bytes": 16 * GIB, "kv_available_bytes": 14 * GIB, "estimated_max_model_len": 114688}

# What is known -> what must be advised (each a regular expression), and what must not.
CASES: dict[str, tuple[Case, tuple[str, ...], tuple[str, ...]]] = {
    # GPU memory while serving
    "batch halved": (of("oom_runtime", OOM, "max-num-batched-tokens=8192 max-num-seqs=64"),
                     ("--max-num-batched-tokens 4096 .it is 8192", "--max-num-seqs 32 .it is 64"), ()),
    "share from bytes asked and free": (of("oom_runtime", OOM, "gpu-memory-utilization=0.92"),
                                        ("--gpu-memory-utilization 0.84 .it is 0.92.: 10.8 GiB .* 6.0 GiB",), ()),
    "share not set": (of("oom_runtime", OOM), ("--gpu-memory-utilization 0.84 .not set: vLLM takes 0.92",), ()),
    "batch not set on an 80 GiB card": (of("oom_runtime", OOM), ("--max-num-batched-tokens 4096: it is not set.*8192", "--max-num-seqs 64: it is not set"), ()),
    "batch not set on a 180 GiB card": (of("oom_runtime", OOM | {"total_bytes": 180 * GIB}),
                                        ("--max-num-batched-tokens 8192: it is not set.*16384",), ()),
    "batch is small already": (of("oom_runtime", OOM, "max-num-batched-tokens=2048 max-num-seqs=8"),
                               ("--max-num-seqs 4 ",), ("max-num-batched-tokens",)),
    "batch and seqs at their least": (of("oom_runtime", None, "max-num-batched-tokens=1024 max-num-seqs=1"),
                                      ("Lower --max-num-batched-tokens",), ()),
    "small card, nothing set": (of("oom_runtime", OOM | {"total_bytes": 22 * GIB, "requested_bytes": GIB, "free_bytes": GIB // 2}),
                                ("Lower --max-num-batched-tokens", "--gpu-memory-utilization 0.85"), ()),
    "chunked prefill is off": (of("oom_runtime", OOM, "enable-chunked-prefill=False max-num-batched-tokens=131072"),
                               ("Take out --no-enable-chunked-prefill", "--max-num-batched-tokens 65536"), ()),
    "no share makes that room": (of("oom_runtime", OOM | {"requested_bytes": 70 * GIB}, "gpu-memory-utilization=0.9"),
                                 ("Lower --gpu-memory-utilization by 0.05",), ()),
    "only the share is known": (of("vram_degrade", None, "gpu-memory-utilization=0.9"),
                                ("--gpu-memory-utilization 0.85 .it is 0.9",), ()),
    "a share that is no number": (of("vram_degrade", None, "gpu-memory-utilization=most"), ("by 0.05",), ()),
    "recorded: a neighbour on the H200": (log("real__cuda_oom_0.24_h200", args=flags("gpu-memory-utilization=0.3")),
                                          ("100.3 GiB of GPU memory: PID 1733",), ("0.29",)),
    "recorded: 0.20 with two cards": (log("oom_runtime__v1_020_tp2_worker"), ("0.90 .not set", "4096"), ()),
    "recorded: 0.8.5": (log("oom_runtime__v1_085_uniproc", args=flags("max-num-seqs=256")), ("--max-num-seqs 128",), ()),
    "recorded: 0.6.6 MQ": (log("oom_runtime__v0_mq_engine"), ("--gpu-memory-utilization",), ()),
    "a neighbour by name": (of("oom_runtime", OOM, levels=levels(card(79, 80, None, (4711, "python3", 38.0)))),
                            (r"38.0 GiB of GPU memory: PID 4711 \(python3\)",), ("nvidia-smi",)),
    "another vLLM's engine core": (of("startup_kv_insufficient", None, levels=levels(card(79, 80, None, (5, "VLLM::EngineCor", 39)))),
                                   ("another vLLM holds 39.0 GiB.*PID 5.*orphan",), ()),
    "nobody else on the card": (of("oom_runtime", OOM, levels=levels(card(79, 80))), (), ("nvidia-smi", "PID")),
    "our own other engine is no neighbour": (
        of("oom_runtime", OOM, levels=levels(card(79, 80, None, (9, "VLLM::EngineCor", 20), mark=Mark("backup", 1)))),
        (), ("PID 9",)),
    "nor is it where torch names it": (
        of("oom_runtime", OOM | {"other_processes": ((9, 20 * GIB), (8, 30 * GIB))},
           levels=levels(card(79, 80, None, (9, "VLLM::EngineCor", 20), mark=Mark("backup", 1)))), ("PID 8",), ("PID 9",)),
    "another kind of failure on a card that is over its limit": (
        of("engine_proc_died", None, levels=levels(card(70, 80, None, (4711, "python3", 38.0), warn=0.85))),
        (r"38.0 GiB of GPU memory: PID 4711 \(python3\)",), ("max-num-seqs",)),
    "another kind of failure on a card that is not": (
        of("engine_proc_died", None, levels=levels(card(67, 80, None, (4711, "python3", 38.0), warn=0.85))), (), ("4711",)),
    "a CUDA context is no neighbour": (of("vram_high", None, levels=levels(card(79, 80, None, (6, "Xorg", 0.1)))), (), ("PID",)),
    "a prompt of 38,000 tokens": (of("oom_runtime", OOM, longest=prompt(38_000)), ("about 38000 tokens was in flight",), ()),
    "the prompt is quarantined": (of("oom_runtime", OOM, longest=prompt(38_000, "suspect")), ("content 0123456789ab",), ()),
    "a short prompt explains nothing": (of("oom_runtime", OOM, longest=prompt(500)), (), ("in flight",)),
    "a long prompt and a full disk": (of("disk_low", None, longest=prompt(38_000)), ("Free space",), ("in flight",)),
    # leaks
    "VRAM flat, RSS rising": (of("rss_leak", None, levels=levels(card(70, 80, 70), rss=40, rss_warm=20)),
                              ("host memory grew by 20.0 GiB while GPU memory stayed flat: objects of the host side",), ()),
    "both rising": (of("vram_growth", None, levels=levels(card(76, 80, 70), rss=40, rss_warm=20)),
                    ("GPU memory by 6.0 GiB: the KV cache or the allocator",), ()),
    "VRAM rising alone": (of("vram_growth", None, levels=levels(card(76, 80, 70), rss=20, rss_warm=20)),
                          ("grew by 6.0 GiB while host memory stayed flat",), ()),
    "neither rising": (of("oom_runtime", OOM, levels=levels(card(70, 80, 70), rss=20, rss_warm=20)), ("peak of one step",), ()),
    "no card, RSS rising": (of("rss_high", None, levels=levels(rss=40, rss_warm=20)), ("objects of the host side",), ()),
    "no card, nothing rising": (of("rss_high", None, levels=levels(rss=20, rss_warm=20)), (), ("peak",)),
    "too early to tell": (of("oom_runtime", OOM, levels=levels(card(70, 80, None), rss=40)), (), ("warm-up", "peak")),
    # start
    "vLLM's own estimate": (log("startup_kv__max_seq_len_033"), ("--max-model-len 32032: .*131072",), ()),
    "0.8.3's estimate": (log("adv__startup_kv_insufficient__hit_an_exception_083"), ("--max-model-len 28176",), ()),
    "V0's number of tokens": (of("startup_kv_insufficient", {"kv_tokens": 7056, "max_model_len": 32768}), ("--max-model-len 7056",), ()),
    "a share that fits": (of("startup_kv_insufficient", KV | {"total_bytes": 80 * GIB}, "gpu-memory-utilization=0.8"),
                          ("--gpu-memory-utilization 0.83 .it is 0.8", "fp8: it halves the KV cache to 8.0 GiB, which fits into 14.0"), ()),
    "no share fits": (of("startup_kv_insufficient", KV | {"kv_available_bytes": GIB, "total_bytes": 24 * GIB},
                         "gpu-memory-utilization=0.9"), ("fp8 halves .* more than the 1.0 GiB",), ("utilization 1",)),
    "fp8 may lack a block": (of("startup_kv_insufficient", KV | {"kv_available_bytes": 8 * GIB, "total_bytes": 24 * GIB},
                              "gpu-memory-utilization=0.5"), ("utilization 0.84",), ("fp8",)),
    "fp8 is used already": (of("startup_kv_insufficient", KV, "kv-cache-dtype=fp8"), ("--max-model-len 114688",), ("fp8 halves", "Or set")),
    "not one block": (log("startup_kv__no_available_blocks_0112", args=flags("gpu-memory-utilization=0.8")),
                      ("--gpu-memory-utilization 0.86", "quantized model"), ("max-model-len",)),
    "not one block at 0.95": (of("startup_kv_insufficient", None, "gpu-memory-utilization=0.95"), ("quantized model",), ("0.96",)),
    "two that load at once": (log("real__two_load_at_once_0.24_h200"), ("Raise --gpu-memory-utilization",), ()),
    "a length was asked for": (of("startup_kv_insufficient", None, "max-model-len=32768"), ("estimated maximum length",), ()),
    "busy card": (log("startup_vram_busy__free_memory_less"), ("nvidia-smi",), ("If nobody",)),
    "busy card, nothing said": (of("startup_vram_busy"), ("If nobody holds it",), ()),
    "half of the card is free": (of("startup_vram_busy", {"free_bytes": 50 * GIB, "total_bytes": 80 * GIB, "gpu_memory_utilization": 0.85}),
                                 ("--gpu-memory-utilization 0.61 .it is 0.85.: 50.0 GiB of 80.0",), ()),
    "warm-up of 1024 requests": (log("startup_oom__sampler_warmup"), ("--max-num-seqs 512: the warm-up ran 1024",), ()),
    "removed flags": (log("bad_args__removed_flags_033"),
                      ("--swap-space out of args: last in 0.16", "--disable-log-requests .* --enable-log-requests",
                       "--num-scheduler-steps"), ()),
    "recorded: a removed flag": (log("real__bad_flag_0.32_cpu"), ("--swap-space out of args",), ()),
    "a typo": (of("bad_args", {"arguments": "--max_num_seq 4"}), ("did you mean --max-num-seqs",), ()),
    "an unknown flag": (of("bad_args", {"arguments": "--frobnicate=1"}), ("Take --frobnicate out of args, or correct it",), ()),
    "a bad value": (of("bad_args", {"argument": "--dtype", "problem": "expected one argument"}),
                    ("Set --dtype otherwise: expected one argument",), ()),
    "a value out of range": (of("bad_args", {"field": "gpu_memory_utilization", "value": "80.0",
                                             "problem": "Input should be less than or equal to 1"}),
                             (r"Set gpu-memory-utilization otherwise: Input should be .* 1 \(it is 80.0\)",), ("doctor",)),
    "two values out of range": (of("bad_args", {"field": "a", "problem": "B", "also": "c: D"}),
                                ("Set a otherwise: B.", "Also wrong: c: D."), ()),
    "settings that do not go together": (of("bad_args", {"problem": "A needs B."}), ("says what it lacks: A needs B.",), ()),
    "a removed module": (log("bad_args__module_removed_033"), ("vllm.entrypoints.api_server is gone from vLLM: .*vllm serve",), ()),
    "longer than the model": (log("real__max_model_len_over_config_0.32_cpu"), ("--max-model-len 131072 or less.*300000",), ()),
    "the port is taken": (log("real__port_taken_0.32_cpu", port=8100), ("sport = :8100",), ()),
    "the port is taken, offline": (log("port_in_use__bind_errno98"), ("ss -ltnp",), ()),
    "no such repository": (log("model_not_found__hf_404"), ("example-org/no-such-model is neither a folder",), ()),
    "no such folder": (log("real__missing_model_folder_0.32_cpu"), ("/nonexistent/model is neither",), ()),
    "no such model, unnamed": (of("model_not_found"), ("Correct the model's path",), ()),
    "gated": (log("hf_auth__gated_repo"), ("HF_TOKEN",), ()),
    "gated, named": (of("hf_auth", {"model": "org/gated"}), ("terms of org/gated",), ()),
    "the disk is full": (log("fs_error__no_space_left"), ("The disk is full",), ()),
    "no permission": (of("fs_error", {"errno": 13, "path": "/root/.cache"}), ("may not use /root/.cache",), ()),
    "a file system, unnamed": (of("fs_error"), ("Free disk space or correct",), ()),
    "not ready in vLLM's time": (log("startup_timeout__engine_ready"), ("READY_TIMEOUT_S=1800",), ()),
    # how it ended
    "a worker was killed": (log("worker_died__v0_exit_code"), ("signal 9.*kernel.txt",), ()),
    "a worker on an old CPU": (log("real__worker_sigill_0.32_cpu"), ("VllmWorker-0 met an instruction",), ()),
    "a segmentation fault": (of("unexpected_exit", exit_code=-11), ("vLLM ended in a segmentation fault",), ()),
    "aborted": (of("unexpected_exit", exit_code=-6), ("aborted",), ()),
    "a bus error": (of("unexpected_exit", exit_code=-7), ("/dev/shm is too small",), ()),
    "a code of its own": (of("unexpected_exit", exit_code=127, files=True), ("left by itself, with code 127",),
                          ("person", "kernel")),
    "exit code 0 proves nothing": (of("unexpected_exit", exit_code=0), ("kernel log",), ("signal",)),
    "the OOM killer, with CPU offload": (log("adv__host_oom_kill__only_killed_line", args=flags("cpu-offload-gb=32 api-server-count=4")),
                                         ("VLLM::EngineCor, which held 116.3 GiB", "--cpu-offload-gb 16", "--api-server-count 1",
                                          "MemoryMax"), ()),
    "the OOM killer's old format": (log("adv__host_oom_kill__old_kernel_format"), ("Lower --api-server-count",), ()),
    "killed from outside, beside its folder": (of("engine_proc_died", files=True, longest=prompt(20_000)),
                                               ("kernel.txt beside this page", "if it ends like this again"), ("chunked",)),
    "killed, and by which signal": (of("engine_proc_died", {"exit_code": -9}, files=True), ("signal 9",), ("beside this page",)),
    "a hang": (of("engine_hang", files=True), ("stacks.txt", "try --enforce-eager or"), ()),
    "a hang in eager mode": (of("engine_hang", None, "enforce-eager=True"), ("another --attention-backend",), ("try --enforce-eager",)),
    "vLLM's own stack dump": (log("engine_stall_dump__watchdog_033"), ("VLLM_STACK_DUMP_for_engine_0_377.log",), ()),
    "a dead engine, beside its folder": (of("engine_dead_v1", files=True), ("log-tail.txt",), ()),
    # the card
    "Xid 79": (of("xid_node", {"xid": 79, "pci": "0000:3b:00"}), ("Xid 79 on 0000:3b:00: the card has fallen off the bus", "reboot it"), ()),
    "off the bus, without a number": (log("xid_bus__no_xid_number"), ("reboot it",), ("Xid",)),
    "uncontained ECC": (log("xid_reset__95_uncontained_ecc", levels=levels(card())), ("double-bit ECC", "--gpu-reset -i 0"), ()),
    "a page fault": (log("xid_app__31_mmu_fault"), ("Xid 31 .*page fault", "program's own fault"), ()),
    "an Xid nobody knows": (of("xid_other", {"xid": 999}), ("Xid 999 on the card: see NVIDIA",), ()),
    "a CUDA fault under a long prompt": (of("cuda_fault", longest=prompt(60_000)), ("60000 tokens",), ("same request",)),
    "a CUDA fault": (of("cuda_fault"), ("same request",), ()),
    "hardware": (of("cuda_hw"), ("reset the GPU or reboot",), ()),
    # pressure
    "preemptions": (log("preemption__v1_stats_line", args=flags("max-num-seqs=64")), ("--max-num-seqs 32", "fp8"), ()),
    "preemptions with fp8": (of("kv_pressure", None, "max-num-seqs=64 kv-cache-dtype=fp8"), ("--max-num-seqs 32",), ("doubles",)),
    "preemptions, nothing known": (of("kv_pressure"), ("Lower --max-num-seqs",), ()),
    # nothing
    "nothing wrong": (of("none"), (), (".",)),
    "an unknown class": (of("no_such_class"), (), (".",)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_remedy_of_a_known_case_is_advised(name: str) -> None:
    case, wanted, unwanted = CASES[name]
    lines = [line.en for line in advise(case)]
    for pattern in wanted:
        assert any(re.search(pattern, line) for line in lines), (pattern, lines)
    for pattern in unwanted:
        assert not any(re.search(pattern, line) for line in lines), (pattern, lines)


@pytest.mark.parametrize("name", CASES)
def test_advice_is_said_in_chinese_with_the_same_flags_and_figures(name: str) -> None:
    for line in advise(CASES[name][0]):
        assert re.search("[\u4e00-\u9fff]", line.zh), line
        assert set(re.findall(r"--[a-z-]{4,}(?: [\d.]+)?\b", line.zh)) <= set(re.findall(r"--[a-z-]{4,}(?: [\d.]+)?\b", line.en)), line
        assert "{" not in line.en + line.zh, "a blank that nobody filled"


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 40


def test_every_rule_makes_a_line_of_the_catalogue_concrete() -> None:
    lines = {text for entry in CATALOG.values() for text in entry.advice}
    assert set(RULES) <= lines


@pytest.mark.parametrize("class_", sorted(set(CATALOG) - {"none", "snapshot"}))
def test_a_case_of_which_nothing_is_known_gets_the_general_advice(class_: str) -> None:
    assert advise(Case(class_))

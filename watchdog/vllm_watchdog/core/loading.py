"""How far an engine has loaded, by what vLLM's log says it does next.  Shown, and nothing is decided by it.

Source of the lines: the logs of 15 releases, 0.5 to 0.33; a release that words one otherwise costs only that stage.
"""

from __future__ import annotations

from enum import StrEnum

from vllm_watchdog.core.records import Kind, parse


class Stage(StrEnum):
    IMPORTING = "starting"
    WEIGHTS = "loading weights"
    COMPILING = "compiling"
    PROFILING = "measuring memory"
    KV_CACHE = "KV cache"
    GRAPHS = "CUDA graphs"
    SERVER = "API server"


# What a line begins, in the order of a start.
LINES: tuple[tuple[str, Stage], ...] = (
    ("Initializing a V1 LLM engine", Stage.IMPORTING),
    ("Initializing an LLM engine", Stage.IMPORTING),
    ("Starting to load model", Stage.WEIGHTS),
    ("Loading model from scratch", Stage.WEIGHTS),
    ("Loading safetensors checkpoint", Stage.WEIGHTS),
    ("Model loading took", Stage.PROFILING),
    ("Loading model weights took", Stage.PROFILING),
    ("Using cache directory", Stage.COMPILING),
    ("Start compiling function", Stage.COMPILING),
    ("Dynamo bytecode transform", Stage.COMPILING),
    ("Available KV cache memory", Stage.KV_CACHE),
    ("GPU KV cache size", Stage.KV_CACHE),
    ("Capturing CUDA graph", Stage.GRAPHS),
    ("Capturing cudagraph", Stage.GRAPHS),
    ("Graph capturing finished", Stage.SERVER),
    ("init engine (profile", Stage.SERVER),
)
NEEDLES = tuple(text for text, _ in LINES)


def stage_of(line: str) -> Stage | None:
    """The stage that a line begins; None: it says nothing of it.  A client's own words can't begin one."""
    found = next((stage for text, stage in LINES if text in line), None)
    if found is None or any(record.kind is Kind.ACCESS for record in parse(line)):
        return None
    return found

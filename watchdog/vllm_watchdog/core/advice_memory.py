"""Advice on memory: of the card, of the KV cache, of the host; each rule makes one general line of the catalogue concrete.

A rule answers with sentences for this case; with none where the line does not concern it; with None where too little is
known.  Pure.
"""

from __future__ import annotations

from math import floor

from vllm_watchdog.core import catalog as c
from vllm_watchdog.core import remedies as r
from vllm_watchdog.core.case import Case, Lines
from vllm_watchdog.core.phrases import filled
from vllm_watchdog.core.units import GIB, gib

ROOM = GIB                      # that much is left free over what was asked for: torch's blocks are up to 1 GiB apart
LEAST_UTIL, MOST_UTIL = 0.30, 0.95
DEFAULT_UTIL = 0.92             # vLLM since 0.20; 0.90 before
LEAST_TOKENS = 2048             # below this long prompts only get slower
DEFAULT_TOKENS = ((160, 16384), (70, 8192), (0, 2048))      # GiB of the card, the server's max-num-batched-tokens
HOLDS = 256 << 20               # a process with less than this is no neighbour: every CUDA context has some
GREW_CARD, GREW_RSS = 0.01, GIB             # of the card; bytes: less than this is flat
OF_MEMORY = frozenset({"oom_runtime", "host_oom_kill", "vram_high", "vram_growth", "vram_degrade", "rss_high", "rss_leak"})


def less_batch(case: Case) -> Lines | None:
    tokens, seqs, total = case.whole("max-num-batched-tokens"), case.whole("max-num-seqs"), case.total
    lines = []
    if dict(case.args).get("enable-chunked-prefill") == "False":
        lines.append(r.CHUNKED)
    if tokens is not None:
        if tokens > LEAST_TOKENS:
            lines.append(filled(r.FEWER_TOKENS, new=max(tokens // 2, LEAST_TOKENS), now=tokens))
    elif total is not None:
        default = next(size for least, size in DEFAULT_TOKENS if total >= least * GIB)
        if default > LEAST_TOKENS:
            lines.append(filled(r.DEFAULT_TOKENS, new=default // 2, now=default))
    if seqs is not None and seqs > 1:
        lines.append(filled(r.FEWER_SEQS, new=seqs // 2, now=seqs))
    elif seqs is None and lines:
        lines.append(r.DEFAULT_SEQS)
    return tuple(lines) or None


def less_util(case: Case) -> Lines | None:
    """So much less that what was asked for fits; by one step of 0.05 where nobody said how much was asked for."""
    util, asked, free, total = case.util, case.fact("requested_bytes"), case.fact("free_bytes"), case.total
    if asked is None or free is None or not total:
        known = util is not None and util - 0.05 >= LEAST_UTIL
        return (filled(r.UTIL_LESS, new=f"{util - 0.05:.2f}", now=f"{util:g}"),) if util and known else None
    now = DEFAULT_UTIL if util is None else util
    new = floor(round((now - max((asked - free + ROOM) / total, 0.02)) * 100, 6)) / 100
    if new < LEAST_UTIL:
        return None         # no share of the card makes room for that: the batch must shrink
    text = r.UTIL_TO if util is not None else r.UTIL_UNSET
    return (filled(text, new=f"{new:.2f}", now=f"{now:g}", asked=gib(asked), free=gib(free), gib=gib((now - new) * total)),)


def neighbour(case: Case) -> Lines | None:
    names: dict[int, str] = {}
    sizes: dict[int, int] = {}
    rows = [row for card in (case.levels.cards if case.levels else ()) for row in card.others]
    for row in (row for row in rows if row.holder.mark is None):
        names[row.holder.pid] = row.holder.name
        sizes[row.holder.pid] = sizes.get(row.holder.pid, 0) + (row.used_bytes or 0)
    sizes |= dict(case.fact("other_processes") or ())
    foreign = sizes.keys() - {row.holder.pid for row in rows if row.holder.mark is not None} - {0}  # torch names ours too
    held = sorted(((sizes[pid], pid) for pid in foreign if sizes[pid] >= HOLDS), reverse=True)[:3]
    if not held and not (case.levels and case.levels.cards):
        return None
    return tuple(
        filled(r.ORPHAN if names.get(pid, "").startswith("VLLM::") else r.HOLDER, gib=gib(size), pid=pid,
               name=f" ({names[pid]})" if names.get(pid) else "")
        for size, pid in held
    )


def crowded(case: Case) -> bool:
    """Is a card over its limit, whatever it was that failed?"""
    cards = case.levels.cards if case.levels else ()
    return any(card.warn is not None and card.used >= card.warn * card.total for card in cards)


def warm_up(case: Case) -> Lines | None:
    dummies = case.fact("dummy_requests") or case.whole("max-num-seqs")
    return (filled(r.WARM_UP_SEQS, new=max(dummies // 2, 1), now=dummies),) if dummies else None


def free_share(case: Case) -> Lines | None:
    free, total, util = case.fact("free_bytes"), case.total, case.util
    if free is None or not total or util is None:
        return None
    new = floor(free / total * 100 - 1) / 100
    if new < LEAST_UTIL:
        return ()           # somebody holds it: see the neighbours
    return (filled(r.UTIL_FREE, new=f"{new:.2f}", now=f"{util:g}", free=gib(free), total=gib(total)),)


# -- the KV cache

def shorter(case: Case) -> Lines | None:
    fits = case.fact("estimated_max_model_len") or case.fact("kv_tokens")
    asked = case.fact("max_model_len") or case.whole("max-model-len")
    if fits:
        return (filled(r.FIT_LEN, new=fits, now=asked or "?"),)
    return None if asked else ()    # without a length in the text not even one block was left: no length would fit


def more_util(case: Case) -> Lines | None:
    need, have, total, util = (case.fact("kv_needed_bytes"), case.fact("kv_available_bytes"), case.total, case.util)
    if need is None or have is None:
        return _some_util(util)
    lines = []
    if util is not None and total and (new := _up(util + (need - have) / total)) <= MOST_UTIL:
        lines.append(filled(r.UTIL_MORE, new=f"{new:.2f}", now=f"{util:g}", need=gib(need), have=gib(have)))
    fp8 = dict(case.args).get("kv-cache-dtype", "").startswith("fp8")
    if not fp8 and need / 2 != have:        # vLLM rounds both: just as much may be a block too much (seen on 0.32)
        text = r.FP8_FITS if need / 2 < have else r.FP8_HALVES
        lines.append(filled(text, half=gib(need / 2), have=gib(have)))
    return tuple(lines) or None


def _some_util(util: float | None) -> Lines | None:
    if util is None:
        return None
    if (new := _up(util + 0.05)) <= MOST_UTIL:
        return filled(r.UTIL_UP, new=f"{new:.2f}", now=f"{util:g}"), r.SMALLER_MODEL
    return (r.SMALLER_MODEL,)


def _up(util: float) -> float:
    """To the next hundredth, and one more for what is not counted."""
    return (floor(round(util * 100, 6)) + 1) / 100


def pressed(case: Case) -> Lines | None:
    seqs = case.whole("max-num-seqs")
    fp8 = dict(case.args).get("kv-cache-dtype", "").startswith("fp8")
    lines = (filled(r.PRESSED, new=seqs // 2, now=seqs),) if seqs and seqs > 1 else ()
    return lines + (() if fp8 else (r.PRESSED_FP8,)) if lines else None


# -- host memory

def host_memory(case: Case) -> Lines | None:
    name, rss = case.fact("name"), case.fact("rss_bytes")
    lines = [filled(r.VICTIM, name=name, gib=gib(rss))] if name and rss and case.class_ == "host_oom_kill" else []
    for flag in ("cpu-offload-gb", "swap-space"):
        if (now := case.whole(flag)) is not None and now > 0:
            lines.append(filled(r.LESS_OFFLOAD, flag=flag, new=now // 2, now=now))
    if (servers := case.whole("api-server-count") or 1) > 1:
        lines.append(filled(r.ONE_API, now=servers))
    return (*lines, c.MEMORY_MAX) if lines else None


def trend(case: Case) -> Lines:
    """VRAM flat and RSS rising: objects of the host side.  Both rising: the KV cache or the allocator."""
    levels = case.levels
    card = next((card for card in levels.cards if card.warm is not None), None) if levels else None
    if case.class_ not in OF_MEMORY or levels is None or levels.rss is None or levels.rss_warm is None:
        return ()
    rss = levels.rss - levels.rss_warm
    vram = card.used - (card.warm or 0) if card else 0
    up = rss >= max(GREW_RSS, levels.rss_warm // 10), card is not None and vram >= card.total * GREW_CARD
    text = {(True, False): r.LEAK_HOST, (True, True): r.LEAK_BOTH, (False, True): r.LEAK_CARD, (False, False): r.NO_LEAK}[up]
    return () if card is None and text is r.NO_LEAK else (filled(text, rss=gib(rss), vram=gib(vram)),)

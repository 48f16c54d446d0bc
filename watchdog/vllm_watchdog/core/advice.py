"""What to change, computed from a case: the catalogue's general advice with figures, flags, PIDs and names put in.

Each general line of the catalogue may have a rule, here or in `advice_memory`.  It answers with sentences for this case;
with none where the line does not concern it; with None where too little is known, and then the general line stands.
Pure: `classify`, the incident's page and the alerts all ask `advise`.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from vllm_watchdog.core import advice_memory as memory
from vllm_watchdog.core import catalog as c
from vllm_watchdog.core import remedies as r
from vllm_watchdog.core.case import Case, Lines
from vllm_watchdog.core.catalog import CATALOG, Text
from vllm_watchdog.core.phrases import filled

LONG_TOKENS = 8000              # what the gateway suspects, by default
SIGNALS = {9: r.KILLED, 11: r.SEGFAULT, 6: r.ABORTED, 4: r.ILLEGAL, 7: r.BUS}
PLAIN_CODES = range(1, 128)     # a program's own; above, a shell tells of a signal, and 0 a SIGTERM may have caused
# Failures that a long prompt explains, and those that it may explain where nothing else does.
BY_A_PROMPT = frozenset({"oom_runtime", "engine_dead_v1", "cuda_fault", "xid_app", "step_timeout", "engine_hang",
                         "scheduler_deadlock"})
MAYBE_BY_A_PROMPT = frozenset({"engine_proc_died", "worker_died", "unexpected_exit"})


def advise(case: Case) -> Lines:
    """Sentences, the most certain first; () for a class that is unknown, or nothing wrong."""
    entry = CATALOG.get(case.class_)
    prompt = _long_prompt(case)
    first = case.class_ in BY_A_PROMPT
    lines: list[Text] = [*_xid(case), *_ended(case), *(prompt if first else ())]
    of_memory = entry is not None and c.NEIGHBOUR in entry.advice
    held = memory.neighbour(case) or () if of_memory or memory.crowded(case) else ()
    lines += held if of_memory else ()      # whoever holds the memory is looked at before anything is turned down
    for general in entry.advice if entry else ():
        made = RULES[general](case) if general in RULES else None
        lines += (general,) if made is None else made
    lines += () if first else prompt
    lines += memory.trend(case)
    lines += held           # no cause of a failure of another kind, and still on a card that is over its limit
    return tuple(dict.fromkeys(lines))


# -- what was running, and how it ended

def _long_prompt(case: Case) -> Lines:
    longest = case.longest
    if longest is None or longest.tokens_estimated < LONG_TOKENS or case.class_ not in BY_A_PROMPT | MAYBE_BY_A_PROMPT:
        return ()
    kept = longest.verdict in ("suspect", "refused")
    told = (filled(r.QUARANTINED, hash=longest.hash[:12]),) if kept else ()
    text = r.LONG_PROMPT if case.class_ in BY_A_PROMPT else r.MAYBE_PROMPT
    return (filled(text, tokens=longest.tokens_estimated), *told)


def _ended(case: Case) -> Lines:
    """Signals have meanings; other exit codes of vLLM have none (0 is a dead engine, too)."""
    code = case.fact("exit_code")
    code, who = (code, case.fact("worker") or "worker") if code is not None else (case.exit_code, "vLLM")
    if code is None or code >= 0 or -code not in SIGNALS:
        return ()
    return (filled(SIGNALS[-code], who=who),)


def _stacks(case: Case) -> Lines | None:
    dump = case.fact("dump")
    lines = (filled(r.DUMPED_STACK, path=dump),) if dump else ()
    return lines + ((r.READ_STACKS,) if case.files else ()) or None


def _hang(case: Case) -> Lines | None:
    return (r.OTHER_BACKEND,) if dict(case.args).get("enforce-eager") == "True" else None


def _kernel(case: Case) -> Lines | None:
    """The signal was told already, with the same file."""
    if _ended(case):
        return ()
    if case.class_ == "unexpected_exit" and case.exit_code in PLAIN_CODES:
        return (filled(r.READ_END, code=case.exit_code),)
    return (r.READ_KERNEL,) if case.files else None


def _first_line(case: Case) -> Lines | None:
    return (r.READ_LOG,) if case.files else None


def _poison(case: Case) -> Lines | None:
    """Where it is known that no long prompt was there, the general line stands; where one was, it was told above."""
    return () if _long_prompt(case) else None


def _xid(case: Case) -> Lines:
    xid = case.fact("xid")
    if xid is None:
        return ()
    where = case.fact("pci") or "the card"
    told = filled(r.XID, xid=xid, where=where, meaning=r.XIDS.get(xid, r.XID_UNKNOWN))
    return (told, r.OWN_XID) if case.class_ == "xid_app" else (told,)


def _replace(case: Case) -> Lines | None:
    if case.class_ == "xid_node":
        return (r.REBOOT,)
    gpus = case.levels.cards if case.levels else ()
    if case.class_ == "xid_reset":
        return (filled(r.RESET, gpu=gpus[0].gpu if len(gpus) == 1 else case.fact("gpu") or case.fact("pci") or "N"),)
    return None


# -- start

def _flags(case: Case) -> Lines | None:
    lines: list[Text] = []
    for word in str(case.fact("arguments") or "").split():
        if word.startswith("--"):
            lines.append(_flag(word.removeprefix("--").partition("=")[0].replace("_", "-")))
    lines += _value(case)
    if module := case.fact("module"):
        lines.append(filled(r.DROP_MODULE, module=module))
    if own := case.fact("model_max_len"):
        lines.append(filled(r.MODEL_LEN, new=own, now=case.fact("max_model_len")))
    return tuple(lines) or None


def _value(case: Case) -> Lines:
    """vLLM's own word on a value, by the flag's name where it gives one."""
    problem, value = str(case.fact("problem") or "").rstrip("."), case.fact("value")
    flag = case.fact("argument") or str(case.fact("field") or "").replace("_", "-")
    if not problem:
        return ()
    if not flag:
        return () if case.fact("model_max_len") else (filled(r.WRONG_SETTINGS, problem=problem),)
    too = (filled(r.WRONG_TOO, also=also),) if (also := case.fact("also")) else ()
    return (filled(r.WRONG_VALUE if value else r.WRONG, flag=flag, problem=problem, value=value), *too)


def _flag(flag: str) -> Text:
    if hint := r.REMOVED_FLAGS.get(flag.removeprefix("no-")):
        return filled(r.DROP_FLAG, flag=flag, hint=hint)
    near = get_close_matches(flag, r.KNOWN_FLAGS, n=1, cutoff=0.8)
    return filled(r.TYPO, flag=flag, near=near[0]) if near else filled(r.UNKNOWN_FLAG, flag=flag)


def _port(case: Case) -> Lines | None:
    port = case.fact("port") or case.port
    return (filled(r.FREE_PORT, port=port),) if port else None


def _model(case: Case) -> Lines | None:
    model = case.fact("model")
    return (filled(r.MISSING_MODEL, model=model),) if model else None


def _terms(case: Case) -> Lines | None:
    model = case.fact("model")
    return (filled(r.ACCEPT_TERMS, model=model),) if model else None


def _disk(case: Case) -> Lines | None:
    errno, path = case.fact("errno"), case.fact("path")
    if errno == 28:
        return (filled(r.FULL_DISK, where=f" ({path})" if path else ""),)
    return (filled(r.NO_PERMISSION, path=path),) if path else None


def _ready(case: Case) -> Lines | None:
    waited = case.fact("timeout_s")
    return (filled(r.MORE_READY, new=int(waited) * 3, now=int(waited)),) if waited else None


RULES: dict[Text, Callable[[Case], Lines | None]] = {
    c.LESS_BATCH: memory.less_batch,
    c.LESS_UTIL: memory.less_util,
    c.NEIGHBOUR: memory.neighbour,
    c.WARM_UP: memory.warm_up,
    c.FREE_SHARE: memory.free_share,
    c.SHORTER: memory.shorter,
    c.MORE_UTIL: memory.more_util,
    c.PRESSED: memory.pressed,
    c.HOST_MEM: memory.host_memory,
    c.KERNEL: _kernel,
    c.STACKS: _stacks,
    c.HANG: _hang,
    c.FIRST_LINE: _first_line,
    c.POISON: _poison,
    c.REPLACE: _replace,
    c.FLAGS: _flags,
    c.PORT: _port,
    c.MODEL: _model,
    c.TERMS: _terms,
    c.DISK: _disk,
    c.READY: _ready,
}

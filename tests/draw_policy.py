"""Draws docs/policy.md from the table itself: `python tests/draw_policy.py` writes it, a test compares."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_watchdog.core.plan import Limits
from vllm_watchdog.core.policy import ALIVE, AT_REST, HAS_CHILD, TABLE, Do, Phase, Sign, State, patience

PAGE = Path(__file__).parents[1] / "docs" / "policy.md"

PHASES = {
    Phase.STOPPED: "Nobody wants it.",
    Phase.RELEASING: "Wanted. Waits until its GPUs have room and no rival and no orphan is left there.",
    Phase.STARTING: "Told to start.",
    Phase.LOADING: "A process, not serving yet. Ready when `/health` says 200 and the port belongs to our generation.",
    Phase.SERVING: "Serves.",
    Phase.SUSPECT: "No token comes out. It keeps the route: it may be busy.",
    Phase.DOZING: "A standby, told to sleep (vLLM's level 1: weights to host memory, the KV cache dropped).",
    Phase.ASLEEP: "Sleeps: hardly any VRAM, and no rival on its cards. `/health` is watched on.",
    Phase.WAKING: "Told to wake, and to prove by one token that it did.",
    Phase.DUMPING: "Condemned. Evidence is taken before the kill, for at most `evidence.deadline_s`; a vLLM whose core has "
                   "died gets 1 s to leave by itself.",
    Phase.STOPPING: f"Sent SIGTERM. One that failed has {Limits().condemned_s:.0f} s: it has no answer to finish.",
    Phase.KILLING: "Sent SIGKILL, with every orphan that carries our mark, until nothing is left.",
    Phase.WEDGED: "Survived SIGKILL. A human is paged; no second engine is started on its GPUs.",
    Phase.SETTLING: "Gone. The rest of its log is read, so that the decision knows the cause.",
    Phase.BACKOFF: "Dead; the next start is on the clock. None after the first failure, then doubling.",
    Phase.HELD: "Not tried again without a human: another try would fail alike, or the budget is spent.",
}
DOES = {
    Do.LOOK: "sample the GPUs", Do.SPAWN: "start it", Do.DUMP: "evidence, with stacks", Do.SNAP: "evidence",
    Do.TERM: "SIGTERM", Do.KILL: "SIGKILL", Do.SLEEP: "`/sleep`", Do.WAKE: "`/wake_up`, one token",
    Do.DRAIN: "read the rest of its log", Do.PAGE: "page a human",
}
SIGNS = {
    Sign.WANT: "failover or boot wants it", Sign.START: "a human wants it", Sign.UNWANT: "not wanted any more",
    Sign.FORGIVE: "a human lets it try again, when it is wanted next",
    Sign.AGAIN: "a human wants it restarted", Sign.CLEAR: "its GPUs have room", Sign.SPAWNED: "it was started",
    Sign.WELL: "ready, or tokens flow", Sign.ILL: "counters stand still and a one-token request is not answered",
    Sign.RENEW: "it leaks, and nobody uses it now (`[restart] planned`)",
    Sign.REST: "it is the backup's turn to sleep", Sign.SLEPT: "it sleeps",
    Sign.ROUSE: "it is needed, and its GPUs have room", Sign.WOKE: "a token came",
    Sign.FAULT: "a failure that waiting does not mend, the end of a core or worker among them",
    Sign.DUMPED: "the evidence is written",
    Sign.EXIT: "its leader exited", Sign.EMPTY: "no process of it is left", Sign.GONE: "log read; nobody wants it",
    Sign.DIED: "log read; another try is due", Sign.GAVE_OUT: "log read; the budget is spent",
    Sign.DOOMED: "log read; another try would fail alike", Sign.TIMEOUT: "the phase lasted too long",
}


def page() -> str:
    lines = ["# One engine's life", "",
             "Drawn from `core/policy.py` by `tests/draw_policy.py`; a test compares. A pair that is not listed changes "
             "nothing.",
             "", "```mermaid", "stateDiagram-v2", "    [*] --> stopped"]
    lines += [f"    {was} --> {row[0]}: {sign}" for (was, sign), row in TABLE.items() if was is not row[0]]
    lines += ["```", "", "| phase | meaning | lasts at most | has a process |", "| --- | --- | --- | --- |"]
    for phase in Phase:
        lasts = patience(phase, State(failures=(0.0, 0.0)), Limits())
        limit = "no limit" if lasts == float("inf") else f"{lasts:.0f} s"
        lines.append(f"| {phase} | {PHASES[phase]} | {limit} | {'yes' if phase in HAS_CHILD else 'no'} |")
    lines += ["", "| in | when | becomes | and we |", "| --- | --- | --- | --- |"]
    order = list(Phase)
    for (was, sign), (becomes, *does) in sorted(TABLE.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        meaning = SIGNS[Sign.AGAIN] if sign is Sign.AGAIN and was is not Phase.SETTLING else SIGNS[sign]
        if (was, sign) == (Phase.SETTLING, Sign.AGAIN):
            meaning = "log read; it was stopped only to be started again"
        lines.append(f"| {was} | {sign}: {meaning} | {becomes} | {', '.join(DOES[each] for each in does) or '-'} |")
    rest, alive = ", ".join(sorted(AT_REST)), ", ".join(sorted(ALIVE))
    lines += ["", f"At rest: {rest}. A failure is charged in: {alive}; once a generation.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"{PAGE}\n")

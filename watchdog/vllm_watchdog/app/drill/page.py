"""The report of drills: one HTML file that needs no other, with a table of every promise and a plot of each drill.

Pure: results in, text out.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor

from vllm_watchdog.app.drill.perform import Result
from vllm_watchdog.core.drill_verdict import Check, Observed
from vllm_watchdog.core.drills import FAULTS
from vllm_watchdog.tell.plot import Line, Moment, Pane, figure

STEP_S = 0.25           # answers are counted in steps of this
BEFORE_S = 2.0          # shown before the injection

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #8885}
td.n{text-align:right;font-variant-numeric:tabular-nums}.kept{color:#3a8a4b}.broken{color:#d64545;font-weight:600}
.skipped{opacity:.65}svg{max-width:100%;height:auto}.wide{overflow-x:auto}
"""
HEAD = ("drill", "verdict", "detected", "evidence", "client gap", "lost", "orphans", "VRAM left", "alerts", "incident")


def page(results: Sequence[Result], where: str, when: str) -> str:
    """`where` names the service, `when` the day and time."""
    does = {fault.name: fault.does for fault in FAULTS}
    done = [result for result in results if not result.skipped]
    kept = sum(result.kept for result in done)
    rows = "\n".join(_row(result) for result in results)
    parts = "\n".join(_part(result, does[result.fault]) for result in done)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Drills</title><style>{STYLE}</style></head><body>
<h1>Drills: {kept} of {len(done)} kept every promise</h1>
<p>On {escape(where)}, {escape(when)}. Seconds count from the injection. The client gap is the longest time without any
answer for a few clients that ask through the gateway all the time; lost are requests that were not answered with 200.</p>
<div class="wide"><table><thead><tr>{"".join(f"<th>{name}</th>" for name in HEAD)}</tr></thead>
<tbody>
{rows}
</tbody></table></div>
{parts}
</body></html>
"""


def _row(result: Result) -> str:
    name = escape(result.fault)
    if (seen := result.observed) is None:
        why = f'<td colspan="{len(HEAD) - 1}">not tried: {escape(result.skipped)}</td>'
        return f'<tr class="skipped"><td>{name}</td>{why}</tr>'
    cells = "".join(f'<td class="n">{escape(text)}</td>' for text in _figures(seen))
    return f'<tr><td><a href="#{name}">{name}</a></td><td>{_verdict(result.kept)}</td>{cells}</tr>'


def _figures(seen: Observed) -> tuple[str, ...]:
    left = "–" if seen.vram_left_bytes is None else f"{seen.vram_left_bytes / 2**30:.1f} GiB"
    return (_seconds(seen.detected_s), _seconds(seen.evidence_s), _seconds(seen.gap_s), f"{seen.lost} of {seen.asked}",
            str(seen.orphans), left, seen.alerts or "–", ", ".join(seen.incidents) or "–")


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _verdict(kept: bool) -> str:
    return '<span class="kept">kept</span>' if kept else '<span class="broken">BROKEN</span>'


def _part(result: Result, does: str) -> str:
    rows = "\n".join(_check(check) for check in result.checks)
    return f"""<h2 id="{escape(result.fault)}">{escape(result.fault)}</h2><p>{escape(does)}.</p>
{_plot(result.answers)}
<table><thead><tr><th>promise</th><th>promised</th><th>seen</th><th></th></tr></thead><tbody>
{rows}
</tbody></table>"""


def _check(check: Check) -> str:
    return (f"<tr><td>{escape(check.what)}</td><td>{escape(check.promised)}</td><td>{escape(check.seen)}</td>"
            f"<td>{_verdict(check.kept)}</td></tr>")


def _plot(answers: Sequence[tuple[float, bool]]) -> str:
    """Answers a step over time, and those that failed; empty where there are none."""
    shown = [(at, ok) for at, ok in answers if at >= -BEFORE_S]
    if not shown:
        return ""
    last = max(at for at, _ in shown) + STEP_S
    steps = range(floor(-BEFORE_S / STEP_S), floor(last / STEP_S) + 1)
    good, bad = dict.fromkeys(steps, 0), dict.fromkeys(steps, 0)
    for at, ok in shown:
        (good if ok else bad)[floor(at / STEP_S)] += 1
    lines = tuple(Line(name, tuple((step * STEP_S, float(count)) for step, count in counts.items()))
                  for name, counts in (("answers", good), ("errors", bad)))
    top = max(*good.values(), *bad.values(), 1) * 1.1
    pane = Pane(f"answers in {STEP_S} s", top, lines)
    return figure((pane,), (-BEFORE_S, max(last, 1.0)), Moment(0.0, "the injection"), "answers to the clients",
                  lambda at: f"{at:.1f} s")

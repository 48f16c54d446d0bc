"""What failed and what to change, in words: each generation's failure with its proof, each class's advice, the log lines.

Of several failures none hides another: the cause comes first, then the latest.  Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_watchdog.core import phrases as p
from vllm_watchdog.core.advice import advise
from vllm_watchdog.core.case import Case
from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.failures import Failure
from vllm_watchdog.core.incidents import Incident
from vllm_watchdog.core.phrases import filled, joined, listed
from vllm_watchdog.core.readings import InFlight
from vllm_watchdog.core.story import clipped, clock, how, paged, title_of

NO_RESTART = frozenset({"wedged", "vram_held"})     # the watchdog waits for what a human must do elsewhere


# -- its failures

def failures(incident: Incident) -> tuple[Text, ...]:
    """Each generation's failure, with proof, end and evidence; () where there was one: the page is about that."""
    return tuple(_whole(incident, each) for each in incident.failures) if len(incident.failures) > 1 else ()


def _whole(incident: Incident, failure: Failure) -> Text:
    told = [_brief(incident, failure), filled(p.PROVED, text=_clipped(failure.words))]
    told += [filled(p.ENDS, how=how(failure.ended, failure.class_ == "bad_args"))] if failure.ended else []
    if failure.folder:
        inner = _inner(incident, failure)
        told.append(filled(p.FILED, folder=inner) if inner else p.HERE)
    return Text("".join(each.en for each in told), "".join(each.zh for each in told))


def _clipped(text: Text) -> Text:
    return Text(clipped(text.en), clipped(text.zh))


def _brief(incident: Incident, failure: Failure) -> Text:
    return filled(p.FAILURE, time=clock(incident, failure.at), mark=failure.mark, title=title_of(failure.class_),
                  class_=failure.class_)


def _inner(incident: Incident, failure: Failure) -> str:
    """The folder in the incident's own that holds a failure's evidence; empty: it is the incident's own."""
    name = failure.folder.rstrip("/").rpartition("/")[2]
    return "" if name == incident.id else name


def counted(incident: Incident, newest: bool = False) -> Text | None:
    """All failures in one line, or the newest one; None where there was only one."""
    if len(incident.failures) < 2:
        return None
    last = incident.failures[-1]
    texts = (_numbered(last, _whole(incident, last)),) if newest else (
        _numbered(each, _brief(incident, each)) for each in incident.failures)
    return filled(p.FAILURES, n=last.number, list=joined(texts))


def _numbered(failure: Failure, text: Text) -> Text:
    return Text(f"{failure.number}. {text.en}", f"{failure.number}. {text.zh}")


# -- what to change

@dataclass(frozen=True, slots=True)
class Lesson:
    """What one class of failure teaches; `head` says which, and where the files lie that `lines` name."""

    head: Text
    lines: tuple[Text, ...]


def lessons(incident: Incident, first: str = "") -> tuple[Lesson, ...]:
    """One a class that failed: `first` or the cause, then the latest; and how held engines are let go.

    No line is told twice.
    """
    ranked = (first or incident.class_, incident.class_, *(each.class_ for each in reversed(incident.failures)))
    told: list[Lesson] = []
    for class_ in dict.fromkeys(ranked):
        said = {line for lesson in told for line in lesson.lines}
        if lines := tuple(line for line in advise(case_of(incident, class_)) if line not in said):
            told.append(Lesson(_lesson(incident, class_), lines))
    if held := [need.engine for need in incident.needs if need.class_ not in NO_RESTART]:
        places, commands = (listed(filled(each, engine=name) for name in held) for each in (p.PLACE, p.LET_GO))
        then = filled(p.THEN, places=places, commands=commands)
        told.append(Lesson(paged(incident), (then,)))
    return tuple(told)


def advice(incident: Incident, first: str = "") -> tuple[Text, ...]:
    """What to change, computed from all that the incident knows."""
    return tuple(line for lesson in lessons(incident, first) for line in lesson.lines)


def _lesson(incident: Incident, class_: str) -> Text:
    failure = _latest(incident, class_)
    folder = _inner(incident, failure) if failure else ""
    return filled(p.LESSON_FILED if folder else p.LESSON, title=title_of(class_), class_=class_, folder=folder)


def _latest(incident: Incident, class_: str) -> Failure | None:
    return next((each for each in reversed(incident.failures) if each.class_ == class_), None)


def case_of(incident: Incident, class_: str = "") -> Case:
    """Of the cause, or of another class that failed: its own lines' facts count most, its requests and its end alone."""
    class_ = class_ or incident.class_
    facts: dict[str, object] = {}
    for finding in sorted(incident.findings, key=lambda each: each.class_ == class_):
        facts |= dict(finding.details)
    marks = {each.mark for each in incident.failures if each.class_ == class_}
    requests = [request for flight in incident.flights if not marks or flight.mark in marks for request in flight.largest]
    failure = _latest(incident, class_) or next(reversed(incident.failures), None)
    end = failure.ended if failure else None
    return Case(
        class_, tuple(facts.items()), incident.args,  # type: ignore[arg-type]  # merged Details
        incident.levels if class_ == incident.class_ else None,      # taken when the cause was seen
        longest=_prime(requests), exit_code=end.code if end and not end.ours else None, port=incident.port, files=True,
    )


def _prime(requests: list[InFlight]) -> InFlight | None:
    """The one to suspect: whom the gateway kept back, else the longest."""
    return max(requests, key=lambda each: (each.verdict in ("suspect", "refused"), each.tokens_estimated), default=None)


def proof(incident: Incident, language: str = "en") -> tuple[str, ...]:
    """The sentence of the cause, those of the failures, and the log lines, each once and on one line."""
    sentences = (incident.words, *(failure.words for failure in incident.failures))
    told = (*(text.of(language) for text in sentences), *(finding.text for finding in incident.findings))
    lines = (" ".join(text.split()) for text in told)
    return tuple(dict.fromkeys(line for line in lines if line))

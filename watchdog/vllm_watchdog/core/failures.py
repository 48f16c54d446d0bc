"""What each generation of an incident failed of: when, of which class, what proves it, how it ended, where its evidence is.

Bounded: of many, the first and the newest stay, and of each class the newest.  Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.changed import replace

FAILURES_KEPT = 12


@dataclass(frozen=True, slots=True)
class Ended:
    """How a generation ended.  `code` as in subprocess, None where it was not our child; `ours`: we had told it to go."""

    mark: str
    code: int | None
    ours: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """`number` counts the failures of one incident, from 1; `folder`: its evidence, empty until that is written."""

    at: float
    mark: str
    class_: str
    text: str
    ended: Ended | None = None
    folder: str = ""
    number: int = 1
    zh: str = ""            # `text` in Chinese; empty: the same

    @property
    def words(self) -> Text:
        return Text(self.text, self.zh or self.text)


def added(failures: tuple[Failure, ...], new: Failure) -> tuple[Failure, ...]:
    """A generation fails once: what is known better by now takes the place of what was said of it before."""
    known = next((each for each in failures if each.mark == new.mark), None)
    if known:
        now = replace(new, at=known.at, number=known.number, folder=known.folder, ended=new.ended or known.ended)
        return tuple(now if each is known else each for each in failures)
    kept = (*failures, replace(new, number=failures[-1].number + 1 if failures else 1))
    return kept if len(kept) <= FAILURES_KEPT else tuple(each for each in kept if each is not _least(kept))


def _least(failures: tuple[Failure, ...]) -> Failure:
    """The oldest, but the first, whose class is told by a later one too."""
    repeated = (each for each in failures[1:-1]
                if any(later.class_ == each.class_ for later in failures if later.number > each.number))
    return next(repeated, failures[1])


def filed(failures: tuple[Failure, ...], mark: str, folder: str) -> tuple[Failure, ...]:
    """With the folder of a generation's evidence: the first one is the failure's."""
    return tuple(replace(each, folder=folder) if each.mark == mark and not each.folder else each for each in failures)

"""One incident as the page and its API tell it: in words, in both languages.  Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm_watchdog.core import lessons, story
from vllm_watchdog.core.catalog import CATALOG, Text
from vllm_watchdog.core.incidents import Incident
from vllm_watchdog.core.schema import CODEC

Doc = dict[str, Any]


def classes() -> Doc:
    """The title of every class, and its general advice."""
    return {class_: asdict(entry.title) | {"advice": [asdict(each) for each in entry.advice]}
            for class_, entry in CATALOG.items()}


def told(row: Doc) -> Doc:
    """A row of the history with its title, cause, how it stands, what to change, what was done, the service's gap, and the
    timeline.

    One that another version wrote, and this one can't read, has the catalogue's general words.
    """
    try:
        incident = CODEC.decode(row.get("incident"))
    except ValueError:
        incident = None
    if not isinstance(incident, Incident):
        entry = CATALOG.get(row["class"])
        return row | {"title": _both(entry.title if entry else None), "cause": None, "state": None, "gap": None,
                      "actions": [], "timeline": [],
                      "advice": [_both(each) for each in entry.advice] if entry else []}
    return row | {
        "title": _both(story.title(incident)),
        "cause": _both(story.cause(incident)),
        "state": _both(story.state(incident)),
        "gap": _both(story.gap(incident)),
        "advice": [_both(each) for each in lessons.advice(incident)],
        "actions": [{"at": story.wall(incident, step.at)} | asdict(step.text) for step in story.actions(incident)],
        "timeline": [{"at": story.wall(incident, at), "what": asdict(what)} | asdict(text)
                     for at, what, text in story.told(incident)],
    }


def _both(text: Text | None) -> Doc | None:
    return None if text is None else asdict(text)

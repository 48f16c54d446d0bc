"""What one event makes, as it comes together: the next world, the commands, and each service's open incident.

It decides nothing: `turn` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_watchdog.core import incidents, policy, story
from vllm_watchdog.core.catalog import Text, Words, both
from vllm_watchdog.core.changed import changed, replace
from vllm_watchdog.core.commands import Alert, Command, Record, Say
from vllm_watchdog.core.incidents import HOST, Flight, Incident, Urgency
from vllm_watchdog.core.levels import levels_of
from vllm_watchdog.core.verdict import Finding
from vllm_watchdog.core.world import Engine, World


class Draft:
    def __init__(self, world: World, at: float) -> None:
        self._before = world
        self.at = at
        self.world = replace(world, at=at)
        self.commands: list[Command] = []
        self.taken_over: tuple[Incident, ...] = ()      # as an earlier daemon left them

    @property
    def wall(self) -> float:
        return self.at + self.world.wall_offset

    def do(self, command: Command) -> None:
        self.commands.append(command)

    def say(self, name: str, **fields: Any) -> None:
        """A Text is said in English, and beside it (`x_zh`) in Chinese."""
        texts = {key: value for key, value in fields.items() if isinstance(value, Text)}
        fields |= {key: text.en for key, text in texts.items()} | {
            f"{key}_zh": text.own_zh for key, text in texts.items()}
        self.do(Say(name, tuple((key, str(value)) for key, value in fields.items() if value not in ("", None))))

    def change(self, name: str, **facts: Any) -> Engine:
        engine = changed(self.world.engine(name), **facts)
        self.world = self.world.with_engine(engine)
        return engine

    def explain(self, name: str, class_: str, words: Words) -> Engine:
        """Of what this generation failed, and the sentence that proves it."""
        text = both(words)
        return self.change(name, cause=class_, why=text.en, why_zh=text.own_zh)

    # -- incidents

    def service_of(self, name: str) -> str:
        return HOST if name == HOST else self.world.plan.service_of(name)

    def symptom(self, name: str, class_: str, urgency: Urgency, text: Words, findings: tuple[Finding, ...] = ()) -> Incident:
        """A symptom of an engine, or of the host, joins or opens the incident of its service."""
        service = self.service_of(name)
        engine = None if name == HOST else self.world.engine(name)
        known = self.world.incident(service)
        if known is None:
            incident = incidents.opened(service, name, engine.generation if engine else 0, class_, urgency, text,
                                        self.at, self.wall)
            incident = replace(incident, unserved=engine is not None and not self.world.service(name).served)
        else:
            incident = incidents.joined(known, class_, urgency, text, self.at)
        if known is None or (incident.class_ != known.class_ and engine and engine.phase in policy.ALIVE):
            incident = self.measured(incident, engine)
        incident = incidents.proved(incident, findings)
        self.world = self.world.with_incident(incident)
        return incident

    def measured(self, incident: Incident, engine: Engine | None) -> Incident:
        """With the memory of this moment: of a dead engine the samples would show what it has given back."""
        incident = replace(incident, levels=levels_of(self.world, engine))
        return replace(incident, args=engine.plan.args, port=engine.plan.port) if engine else incident

    def amend(self, name: str, change: Callable[[Incident], Incident]) -> None:
        """The service's incident as `change` makes it, if one is open."""
        incident = self.world.incident(self.service_of(name))
        if incident is not None:
            self.world = self.world.with_incident(change(incident))

    def note(self, name: str, what: str, text: Words, **facts: str) -> None:
        """A line in the timeline of the service's incident, if one is open."""
        self.amend(name, lambda incident: incidents.noted(incident, self.at, what, text, **facts))

    def flown(self, name: str, flight: Flight) -> None:
        """The requests of a death, into the open incident."""
        self.note(name, "in flight", story.flight_of(flight))
        self.amend(name, lambda incident: incidents.flown(incident, flight))

    def cleared(self, name: str, text: Words) -> None:
        """A symptom has ended: its incident is calm from now on."""
        self.note(name, "cleared", text)
        self.amend(name, lambda incident: replace(incident, touched_at=self.at))

    def flush(self) -> tuple[Command, ...]:
        """The commands of this turn, with the records and alerts that changed incidents owe."""
        before = {incident.id: incident for incident in (*self._before.incidents, *self.taken_over)}
        for incident in self.world.incidents:
            was = before.get(incident.id)
            if was in self.taken_over:
                self.do(Alert("opened", incident, again=True))
            elif was and incident == replace(was, touched_at=incident.touched_at):
                continue
            self.do(Record(incident))
            for kind in incidents.owed(was, incident):
                self.do(Alert(kind, incident))
        still_open = tuple(incident for incident in self.world.incidents if incident.wall_resolved is None)
        self.world = changed(self.world, incidents=still_open)
        return tuple(self.commands)

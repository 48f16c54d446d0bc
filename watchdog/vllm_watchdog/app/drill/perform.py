"""One drill: inject, look, take back, wait until all is as it was, and judge.

Every wait has an end (`Pace.limit_s`), and whatever happens the fault is taken back.  Figures come from the journal's and
the clients' own instants, so that looking late changes none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_watchdog.app.drill.load import Load
from vllm_watchdog.app.drill.said import Said
from vllm_watchdog.app.drill.site import NotHereError, Site
from vllm_watchdog.core.drill_verdict import Check, Observed, Pace, judge, pace, unfit
from vllm_watchdog.core.drills import Ends, Fault, Part
from vllm_watchdog.proc import alive, marked
from vllm_watchdog.procfs import identify
from vllm_watchdog.tell.client import Unreachable

LOOK_S = 0.05
CALM_S = 0.25           # between two questions to the daemon
CALM_LOOKS = 2          # in a row: what was asked for may be under way still
WARM_S = 20.0           # the clients' first answers
ASK_AGAIN_S = 5.0
NOTE_S = 0.2            # journal lines of what has just happened are on disk by then

Undo = Callable[[], None]
Inject = Callable[[Any], Undo]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one fault.  `skipped`: why it was not tried.  `answers`: seconds from the injection, was it a 200."""

    fault: str
    skipped: str = ""
    observed: Observed | None = None
    checks: tuple[Check, ...] = ()
    answers: tuple[tuple[float, bool], ...] = field(default=(), repr=False)

    @property
    def kept(self) -> bool:
        return all(check.kept for check in self.checks)


def perform(site: Site, fault: Fault, inject: Inject, tell: Tell) -> Result:
    """Raises Unreachable where no daemon answers to begin with."""
    drill = Drill(site, fault, tell)
    try:
        return drill.run(inject)
    except NotHereError as error:
        return Result(fault.name, skipped=f"not possible here: {error}")


class Drill:
    def __init__(self, site: Site, fault: Fault, tell: Tell) -> None:
        self.site, self.fault, self.tell = site, fault, tell
        doc = site.status()
        self.channels = len(doc["alerts"])
        self.amiss = frozenset(unfit(doc, site.service))        # nothing, but under --force
        self.said = Said(site.journal)
        self.pace: Pace = pace(site.plan, site.service, self.said.loads())
        self.load = self._load()
        # From `since` on incidents are ours; `began` is the blow, from which seconds count; with `ended` the load ends.
        self.since, self.began, self.ended = float("inf"), 0.0, 0.0
        self._named: set[str] = set()       # incidents that are known to be a drill

    def _load(self) -> Load | None:
        """None: there is no gateway."""
        plan = self.site.settings.gateway_plan()
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(plan.host, plan.host)     # noqa: S104 - asked, not bound
        try:
            self.site.victim(Part.GATEWAY)
        except NotHereError as error:
            self.tell(f"  {error}: what clients see is not measured")
            return None
        launch = self.site.launches[self.site.service]
        key = launch.api_key.get_secret_value() if launch.api_key else None
        return Load(f"http://{host}:{plan.port}", launch.model, key, plan.hold_s)

    # -- one run

    def run(self, inject: Inject) -> Result:
        limit = self.pace.limit_s(self.fault)
        started = time.monotonic()
        with ExitStack() as stack:
            if self.load:
                stack.enter_context(self.load)
                self._warm(self.load)
            self.since = time.monotonic()
            undo = inject(self.site)
            self.began = max(self.since, self.site.struck_at)
            self.tell(f"  injected; waiting for at most {limit:.0f} s")
            try:
                self._until_it_ends(limit)
            finally:
                undo()
            undone = time.monotonic()
            self._served(undone, limit)
        self.ended = time.monotonic()
        back = self._settled(limit)
        return self._result(self._observed(back, started))

    def _until_it_ends(self, limit: float) -> None:
        """Until the fault has lasted as long as it should."""
        if self.fault.ends is Ends.LATER:
            self._until(lambda: False, self.fault.lasts_s)
            return
        if self.fault.signs:
            noticed = self._until(lambda: self._sign() is not None, limit)
            self.tell("  noticed" if noticed else "  not noticed in time")
        if self.fault.ends is Ends.SERVED:
            self._served(self.began, limit)

    def _served(self, since: float, limit: float) -> None:
        load = self.load
        if load is not None and not self._until(lambda: load.answered(since), limit):
            self.tell("  clients are not answered again in time")

    def _sign(self) -> Any:
        self.said.read()
        return self.said.first(self.fault.signs, self.began)

    def _warm(self, load: Load) -> None:
        if not self._until(lambda: load.answered(0.0), WARM_S):
            lacks = "; engines.*.api_key is not where this user can read it" if load.last == "HTTP 401" else ""
            raise NotHereError(f"the clients got no answer within {WARM_S:.0f} s, the last was {load.last}{lacks}")

    def _until(self, true: Callable[[], bool], limit: float) -> bool:
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if true():
                return True
            self._own_up()
            time.sleep(LOOK_S)
        return False

    # -- afterwards

    def _settled(self, limit: float) -> bool:
        """Waits until every engine is as it was; asks for what an operator would ask for, where all was well before."""
        asked, asked_at, end, looks = "", 0.0, time.monotonic() + limit, 0
        while time.monotonic() < end:
            doc = self.site.report()
            self._own_up()
            amiss = set(unfit(doc, self.site.service) if doc else ("the daemon does not answer",)) - self.amiss
            looks = 0 if amiss or not self._told() or not self._saved() else looks + 1
            if looks == CALM_LOOKS:
                return True
            verb = self._remedy(doc) if doc and not self.amiss else ""
            if verb and (verb != asked or time.monotonic() - asked_at > ASK_AGAIN_S):
                asked, asked_at = verb, time.monotonic()
                self._ask(verb)
            time.sleep(CALM_S)
        for reason in sorted(amiss):
            self.tell(f"  still not as it was: {reason}")
        return False

    def _own_up(self) -> None:
        """Tells the daemon of each incident that it is a drill's, while it is open."""
        for incident in self._incidents():
            if incident not in self._named:
                self._named.add(incident)
                self.site.drilled(incident, self.fault.name)

    def _ask(self, verb: str) -> None:
        try:
            self.tell(f"  {verb} {self.site.service}: {self.site.ask(verb, engine=self.site.service)['text']}")
        except Unreachable as error:
            self.tell(f"  {error}")

    def _remedy(self, doc: dict[str, Any]) -> str:
        """A primary that is held is let go; one that the backup serves for comes back when the incident is over."""
        phase = next(engine["phase"] for engine in doc["engines"] if engine["name"] == self.site.service)
        side = next(each["side"] for each in doc["services"] if each["name"] == self.site.service)
        if phase == "held":
            return "restart"
        return "failback" if side == "backup" and not doc["incidents"] and phase in ("stopped", "serving") else ""

    def _told(self) -> bool:
        """Every alert of ours has arrived."""
        ids = self._incidents()
        return not self.channels or all("resolved" in self._delivered(each) for each in ids)

    def _saved(self) -> bool:
        """The evidence is written, or it is late."""
        late = time.monotonic() - self.began > self.pace.saved_s(self.fault)
        return late or not (self.fault.incident and self.fault.evidence) or self._evidence_at() is not None

    def _evidence_at(self) -> float | None:
        ids = self._incidents()
        return next((line["at"] for line in self.said.all("evidence.done", self.since) if line["incident"] in ids), None)

    def _incidents(self) -> list[str]:
        self.said.read()
        return [line["incident"] for line in self.said.all("incident.opened", self.since)]

    def _delivered(self, incident: str) -> list[str]:
        return [line["kind"] for line in self.said.all("alert.delivered", self.since) if line["incident"] == incident]

    def _observed(self, back: bool, started: float) -> Observed:
        time.sleep(NOTE_S)
        incidents, load, began = self._incidents(), self.load, self.began
        evidence = self._evidence_at()
        sign, asked = self.said.first(self.fault.signs, began), []
        if load:
            asked = [answer for answer in load.answers if answer.ended > began]
        orphans, left = self._left_over()
        kinds = [kind for each in incidents for kind in self._delivered(each)]
        return Observed(
            detected_s=sign["at"] - began if sign else None,
            evidence_s=max(evidence - began, 0.0) if evidence is not None else None,
            gap_s=load.gap_s(began, self.ended) if load else None,
            slowest_s=load.slowest_s(began) if load else 0.0,
            asked=len(asked), lost=sum(not answer.ok for answer in asked), orphans=orphans, vram_left_bytes=left,
            incidents=tuple(self.site.incident_class(each) for each in incidents),
            alerts=", ".join(dict.fromkeys(kinds)), channels=self.channels, back=back, took_s=time.monotonic() - started,
        )

    def _left_over(self) -> tuple[int, int | None]:
        """Processes, and bytes on cards, that belong to a generation which does not live."""
        doc = self.site.report() or {"engines": [], "gpus": {}}
        live = {f"{engine['name']}#{engine['generation']}" for engine in doc["engines"] if engine["pid"]}
        orphans = sum(len(members) for mark, members in marked(self.site.instance).items() if str(mark) not in live)
        if not isinstance(doc["gpus"], list):
            return orphans, None
        rows = [row for gpu in doc["gpus"] for row in gpu["processes"] if row["engine"] not in (None, *live)]
        held = (row["used_bytes"] or 0 for row in rows if (who := identify(row["pid"])) and alive(who))
        return orphans, sum(held)

    def _result(self, observed: Observed) -> Result:
        result = Result(self.fault.name, observed=observed, checks=judge(self.fault, observed, self.pace))
        if not self.load:
            return result
        return replace(result, answers=tuple((round(a.ended - self.began, 3), a.ok) for a in self.load.answers))

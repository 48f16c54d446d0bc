"""Everything the watchdog knows, as one frozen value.  `advance.advance` makes the next one; nothing else changes it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from math import inf

from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.failover import Service
from vllm_watchdog.core.failures import Ended
from vllm_watchdog.core.incidents import Flight, Incident, remind_at
from vllm_watchdog.core.leaks import Growth, Trends
from vllm_watchdog.core.liveness import Pulse
from vllm_watchdog.core.lowering import Lowering
from vllm_watchdog.core.memory import EngineMemory, Memory, ServiceMemory
from vllm_watchdog.core.plan import EnginePlan, Plan
from vllm_watchdog.core.policy import AT_REST, NAPPING, ONLY_WHEN_ACTIVE, Phase, State
from vllm_watchdog.core.readings import Gpu, Health, Host, Mark, Metrics, Tree, Unknown
from vllm_watchdog.core.symptoms import Counter, Watch

NOT_YET = Unknown(0.0, "not sampled yet")
RESTARTS_KEPT = 500     # by the state file; a day of one engine that is held and started again each time its budget is spent
ROUTED = frozenset({Phase.SERVING, Phase.SUSPECT})      # whose life is judged: a suspect may be busy, and keeps the route


@dataclass(frozen=True)
class Engine:
    """One engine and its newest generation.  Instants are monotonic seconds; inf: not so now."""

    plan: EnginePlan
    life: State = State()
    generation: int = 0
    pid: int = 0
    since: float = 0.0                  # of this phase
    spawned_at: float = inf
    ready_at: float = inf
    active_at: float = 0.0              # last CPU, disk or log activity while loading
    ill_since: float = inf              # /health refused or 5xx
    lost_at: float = -inf               # a process that it can't live without ended under its leader
    health: Health | None = None
    pulse: Pulse = Pulse()
    metrics: Metrics | Unknown = NOT_YET
    tree: Tree | None = None
    trends: Trends = ()
    growths: tuple[Growth, ...] = ()            # what the trends say, as judged last
    preempted: Counter = Counter()
    warm: tuple[tuple[int, int], ...] = ()      # (card, bytes) in use after warm-up
    warm_rss: int | None = None         # bytes resident after warm-up
    cause: str = ""                     # class of this generation's failure, the most specific seen
    why: str = ""                       # the sentence that proves it
    why_zh: str = ""                    # in Chinese; empty: the same
    last_words: tuple[str, ...] = ()    # the end of its log, once it is dead
    dumped: bool = False                # this generation's evidence is taken
    bundles: int = 0                    # asked for of this generation, and not finished
    unlogged: bool = False              # this generation's output is lost: it was started on a full disk
    adopted: bool = False               # an earlier daemon started this generation
    exit_code: int | None = None
    ended: Ended | None = None          # how this generation ended
    in_flight: Flight | None = None     # what the gateway said of its requests, until an incident takes it
    ooms: tuple[float, ...] = ()        # one a generation
    oomed: bool = False                 # this generation is among them
    renewed_at: float = -inf            # last planned restart

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def mark(self) -> Mark:
        return Mark(self.plan.name, self.generation)

    @property
    def phase(self) -> Phase:
        return self.life.phase

    @property
    def words(self) -> Text:
        """Why."""
        return Text(self.why, self.why_zh or self.why)

    @property
    def blame(self) -> str:
        """The class to name for this generation's failure: an exit that nothing explains is a failure too."""
        return self.cause or "unexpected_exit"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An operator's question that is answered when its bundles are over: `waiting` for these, `told` of the others; `ok`:
    so far something was written of each."""

    ref: int
    waiting: tuple[str, ...]
    told: tuple[str, ...] = ()
    ok: bool = True


@dataclass(frozen=True)
class World:
    plan: Plan = Plan()
    boot_id: str = ""
    at: float = 0.0
    wall_offset: float = 0.0
    engines: tuple[Engine, ...] = ()
    services: tuple[Service, ...] = ()
    strays: tuple[Mark, ...] = ()       # generations of before that must be empty before anything starts
    gpus: tuple[Gpu, ...] | Unknown = NOT_YET
    gpus_at: float = -inf
    look_at: float = inf                # sample the GPUs at this instant: somebody waits for their memory
    host: Host | Unknown = NOT_YET
    kernel: Unknown | None = None
    watches: tuple[Watch, ...] = ()
    incidents: tuple[Incident, ...] = ()        # open ones
    bundled: tuple[tuple[str, float], ...] = ()  # (class/subject, when its last bundle was taken)
    snapshots: tuple[Snapshot, ...] = ()        # operators who wait for theirs
    paused: bool = False
    stopping: bool = False
    asked: Plan | None = None           # a newer plan, part of which waits for an engine's next start
    supervised: bool = True             # systemd starts the next daemon
    strays_until: float = inf           # a stop waits this long for strays that do not go
    restarts: tuple[float, ...] = field(default=())     # of the last day
    failed: tuple[tuple[Mark, float, str], ...] = ()    # generations that failed within the last day, when, of which class
    _engines: dict[str, Engine] = field(init=False, repr=False, compare=False)      # the same by name: each turn asks often
    _services: dict[str, Service] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.changed(frozenset(("engines", "services")))

    def changed(self, facts: Set[str]) -> None:
        """By `replace`, whose new world has the old one's tables."""
        if "engines" in facts:
            self.__dict__["_engines"] = {engine.plan.name: engine for engine in self.engines}
        if "services" in facts:
            self.__dict__["_services"] = {service.name: service for service in self.services}

    def engine(self, name: str) -> Engine:
        """Raises KeyError for a name that is not configured."""
        return self._engines[name]

    def service(self, name: str) -> Service:
        """The service that an engine belongs to.  Raises KeyError."""
        return self._services.get(name) or self._services[self.plan.service_of(name)]

    def incident(self, service: str) -> Incident | None:
        return next((incident for incident in self.incidents if incident.service == service), None)

    def engine_on(self, gpu: int) -> Engine | None:
        """The engine to name for a card: the one that is meant to serve there."""
        placed = [engine for engine in self.engines if gpu in engine.plan.gpus]
        wanted = [engine for engine in placed if engine.life.wanted]
        return next(iter(wanted or placed), None)

    def with_engine(self, engine: Engine) -> World:
        if self._engines[engine.name] is engine:
            return self
        return replace(self, engines=tuple(engine if e.name == engine.name else e for e in self.engines))

    def with_service(self, service: Service) -> World:
        if self._services[service.name] is service:
            return self
        return replace(self, services=tuple(service if s.name == service.name else s for s in self.services))

    def with_incident(self, incident: Incident) -> World:
        """Replaces the open incident of its service, or adds it."""
        others = tuple(i for i in self.incidents if i.service != incident.service)
        return replace(self, incidents=(*others, incident))

    @property
    def all_at_rest(self) -> bool:
        gone = not self.strays or self.at >= self.strays_until
        return gone and all(engine.phase in AT_REST | {Phase.WEDGED} for engine in self.engines)


def routed(engine: Engine) -> bool:
    """Can the route lead to it?"""
    return engine.phase in ROUTED


def due_at(world: World, engine: Engine) -> float:
    """When an engine's phase times out; never while `pause` suspends it."""
    suspended = world.paused and engine.phase in ONLY_WHEN_ACTIVE
    return inf if suspended else engine.life.deadline


def next_deadline(world: World) -> float:
    """The instant at which a Tick is due at the latest."""
    strays_until = world.strays_until if world.strays and world.at < world.strays_until else inf
    remind = (remind_at(incident, world.plan.remind_s) for incident in world.incidents)
    return min((world.look_at, strays_until, *remind, *(due_at(world, engine) for engine in world.engines)))


def _untold(world: World, engine: Engine) -> bool:
    """It has failed, and its incident is not open yet: its cause is still being read."""
    failed = engine.life.charged and engine.phase not in AT_REST
    return failed and world.incident(world.plan.service_of(engine.name)) is None


def remembered(world: World) -> Memory:
    """What the next daemon must know.  A human who stops this one forgives what failed: the next start tries again."""
    forgiven = world.stopping
    return Memory(
        boot_id=world.boot_id,
        engines=tuple(
            EngineMemory(
                name=engine.name,
                generation=engine.generation,
                wanted=engine.life.wanted,
                failures=() if forgiven else engine.life.failures,
                held=(engine.life.doom or engine.blame) if engine.phase is Phase.HELD and not forgiven else "",
                why=engine.why if engine.phase is Phase.HELD and not forgiven else "",
                why_zh=engine.why_zh if engine.phase is Phase.HELD and not forgiven else "",
                asleep=engine.phase in NAPPING,
                served=routed(engine) or _untold(world, engine),
                renewed_at=engine.renewed_at,
                unlogged=engine.unlogged,
                since=engine.since if routed(engine) else inf,
                ready_at=engine.ready_at,
            )
            for engine in world.engines
        ),
        services=tuple(
            ServiceMemory(
                name=service.name,
                on_backup=service.wanted != service.name,
                turned_at=service.turned_at,
                patience=service.patience,
                lowering=Lowering() if forgiven else replace(service.lowering, calm_since=inf),
            )
            for service in world.services
        ),
        incidents=world.incidents,
        paused=world.paused,
        restarts=tuple(round(at + world.wall_offset, 3) for at in world.restarts[-RESTARTS_KEPT:]),
    )

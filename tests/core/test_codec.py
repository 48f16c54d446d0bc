from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum, auto
from math import inf, isnan, nan
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.scenes import GIB, WALL, finding, gpu, host, mark, metrics, plan, tree

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core import incidents
from vllm_watchdog.core.catalog import CATALOG
from vllm_watchdog.core.codec import Codec, encode
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.lowering import Lowering
from vllm_watchdog.core.memory import EngineMemory, Memory, ServiceMemory
from vllm_watchdog.core.readings import Health, Holder, Unknown, Wait
from vllm_watchdog.core.schema import CODEC


class Colour(StrEnum):
    RED = auto()
    BLUE = auto()


@dataclass(frozen=True, slots=True)
class Inner:
    number: int = 0


@dataclass(frozen=True, slots=True)
class Other:
    number: int = 0


@dataclass(frozen=True, slots=True)
class Outer:
    """One field of each kind that the core uses."""

    needed: str
    inner: Inner = Inner()
    maybe: Inner | None = None
    either: int | Inner = 0
    ratio: float = 0.0
    colour: Colour = Colour.RED
    flag: bool = False
    many: tuple[Inner, ...] = ()
    pair: tuple[str, float] = ("", 0.0)
    text_or_number: str | int | float | tuple[tuple[int, int], ...] = ""


def _module(*classes: type) -> ModuleType:
    module = ModuleType(__name__)
    vars(module).update({kind.__name__: kind for kind in classes})
    return module


SMALL = Codec(_module(Inner, Other, Outer))


def again(value: Any) -> Any:
    return SMALL.decode(json.loads(json.dumps(encode(value))))


@pytest.mark.parametrize("value", [
    Outer("x"),
    Outer("x", Inner(3), Inner(4), Inner(5), 2.5, Colour.BLUE, True, (Inner(1), Inner(2)), ("a", 1.5), 7),
    Outer("x", ratio=inf), Outer("x", ratio=-inf), Outer("x", text_or_number=2.5), Outer("x", text_or_number=((1, 2),)),
    Outer("x", text_or_number="inf"),
])
def test_what_is_written_down_is_read_again(value: Outer) -> None:
    assert again(value) == value


def test_a_value_that_is_no_number_is_read_again() -> None:
    assert isnan(again(Outer("x", ratio=nan)).ratio)


def test_whole_numbers_may_stand_for_ratios_but_stay_whole_where_meant() -> None:
    assert type(SMALL.decode({"_": "Outer", "needed": "", "ratio": 3}).ratio) is float
    assert type(again(Outer("x", either=3)).either) is int


@pytest.mark.parametrize(("record", "why"), [
    (None, "not a known record: None"),
    (["Outer"], "not a known record"),
    ({}, "not a known record"),
    ({"_": "Never"}, "not a known record"),
    ({"_": ["Outer"]}, "not a known record"),
    ({"_": {"_": "Outer"}}, "not a known record"),
    ({"_": "Outer"}, "Outer: .*needed"),
    ({"_": "Outer", "needed": "x", "nonsense": 1, "also": 2}, "Outer: unknown field also, nonsense"),
    ({"_": "Outer", "needed": 1}, "cannot decode 1 as <class 'str'>"),
    ({"_": "Outer", "needed": None}, "cannot decode None"),
    ({"_": "Outer", "needed": "x", "colour": "green"}, "green"),
    ({"_": "Outer", "needed": "x", "colour": ["red"]}, "red"),
    ({"_": "Outer", "needed": "x", "ratio": True}, "cannot decode True as <class 'float'>"),
    ({"_": "Outer", "needed": "x", "ratio": "1.5"}, "cannot decode 1.5"),
    ({"_": "Outer", "needed": "x", "flag": 1}, "cannot decode 1 as <class 'bool'>"),
    ({"_": "Outer", "needed": "x", "either": True}, "cannot decode True"),
    ({"_": "Outer", "needed": "x", "pair": ["a"]}, r"cannot decode \['a'\]"),
    ({"_": "Outer", "needed": "x", "pair": "ab"}, "cannot decode ab"),
    ({"_": "Outer", "needed": "x", "many": [1]}, "cannot decode 1"),
    ({"_": "Outer", "needed": "x", "maybe": "y"}, "cannot decode y"),
    ({"_": "Outer", "needed": "x", "inner": {"_": "Other"}}, "cannot decode"),
    ({"_": "Outer", "needed": "x", "maybe": {"_": "Other"}}, "cannot decode"),
    ({"_": "Outer", "needed": {"_": "Inner"}}, "cannot decode"),
])
def test_what_does_not_fit_is_refused_in_one_sentence(record: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SMALL.decode(record)


def test_classes_that_a_module_only_imports_are_not_its_records() -> None:
    """Two modules may each define a Record; only the one that was meant is read."""
    foreign = ModuleType("elsewhere")
    vars(foreign)["Inner"] = Inner
    with pytest.raises(ValueError, match="not a known record"):
        Codec(foreign).decode({"_": "Inner"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["Outer", "Inner", "inf"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["_", "needed", "inner", "maybe", "either", "ratio", "colour", "many", "pair", "number"]),
        inner, max_size=5),
    max_leaves=12,
)


@given(JSON)
@settings(max_examples=150, deadline=None)
def test_nothing_but_a_value_error_comes_of_a_damaged_file(data: Any) -> None:
    try:
        value = SMALL.decode(data)
    except ValueError:
        return
    assert isinstance(value, Inner | Other | Outer)


# -- the core's own records

INCIDENT = incidents.proved(
    incidents.opened("primary", "primary", 2, "oom_runtime", Urgency.CRITICAL, "CUDA out of memory", 10.0, WALL),
    (finding("oom_runtime", gpu=0, requested_bytes=2 * GIB, other_processes=((12, 3 * GIB),), free_share=0.5),),
)
MEMORY = Memory("b", (EngineMemory("primary", 3, True, (1.5, 2.0), "bad_args", "why"),),
                (ServiceMemory("primary", True, -inf, 2.0, Lowering(16, 5.0, "why")),), (INCIDENT,), True)
M = mark("primary#3")
EVENTS = (
    e.Booted(1.0, plan(gpus=(0,), share=0.8, seed=3), WALL, "b", MEMORY, (e.Survivor(M, 12, True, 5.5),)),
    e.ClockSet(1.0, WALL), e.Tick(2.0), e.StopAsked(3.0, "SIGTERM"), e.Spawned(4.0, M, 12),
    e.SpawnFailed(5.0, M, "port_stranger", "port 8100 is held by PID 7 (nginx)"),
    e.Exited(6.0, M, None), e.Exited(6.0, M, -9, 2), e.MemberDied(6.0, M, 12, "VLLM::EngineCore"),
    e.Reloaded(6.0, plan(gpus=(0, 1))),
    e.Emptied(7.0, M, (Holder(3, "core", M), Holder(0, ""))),
    e.Dumped(8.0, M, "id", "folder", ("ps",)), e.Dumped(8.0, None, "id", "f"),
    e.Probed(9.0, M, Health.OK, (Holder(3, "vllm", M),)),
    e.Answered(9.0, M, True, 0.1), e.Answered(9.0, M, Unknown(8.0, "404"), 1.0),
    e.Slept(9.5, M, "", 0.3), e.Woke(9.5, M, "/wake_up answered 500", 0.1),
    e.Scraped(10.0, M, metrics(4.0)), e.Scraped(10.0, M, metrics(None)), e.Scraped(10.0, M, Unknown(9.0, "refused")),
    e.GpusSampled(11.0, (gpu(40, (3, "core", M, 39), (4, "x", None, None)),)),
    e.GpusSampled(11.0, Unknown(1.0, "no driver")),
    e.HostSampled(12.0, host(), (tree(M), tree(M, cpu=None, io=None))), e.HostSampled(12.0, Unknown(1.0, "no /proc")),
    e.LogRead(13.0, M, INCIDENT.findings, True),
    e.KernelRead(14.0, INCIDENT.findings), e.KernelRead(14.0, Unknown(1.0, "EPERM")),
    e.Casualties(14.5, M, 3, (e.InFlight(1, 100_000, 2.5, True, "abc", 38_000, "cut"),)),
    e.Drilled(14.7, "id", "engine-core-kill"),
    e.Waited(14.6, "primary", Wait(3, 48.2, 47.0, 1, 2)),
    e.Asked(15.0, 3, "restart", "primary", "because"), e.Asked(15.0, 3, "pause"),
)
COMMANDS = (
    c.Spawn(M), c.Adopt(M, 12), c.Term(M), c.Kill(M), c.Drain(M), c.Ask(M, 10.0), c.SampleGpus(),
    c.Sleep(M, 120.0), c.Wake(M, 30.0),
    c.Dump("id", M, "oom_runtime", True, 10.0), c.Dump("id", None, "disk_low", False, 10.0), c.Record(INCIDENT),
    c.Alert("opened", INCIDENT), c.Answer(3, True, "done"), c.Say("engine.phase", (("engine", "primary#3"),)), c.Quit(),
)


@pytest.mark.parametrize("record", [*EVENTS, *COMMANDS, MEMORY, INCIDENT], ids=lambda record: type(record).__name__)
def test_every_record_of_the_core_is_read_again_as_it_was_written(record: Any) -> None:
    assert CODEC.decode(json.loads(json.dumps(encode(record)))) == record


def test_every_event_and_every_command_is_tried_here() -> None:
    events = {kind for kind in vars(e).values() if isinstance(kind, type) and issubclass(kind, e.Event)} - {e.Event}
    assert {type(event) for event in EVENTS} == events
    assert {type(command) for command in COMMANDS} == set(c.Command.__args__)


@pytest.mark.parametrize("class_", CATALOG)
def test_a_finding_of_every_class_is_read_again(class_: str) -> None:
    record = finding(class_, pid=3, text_="x")
    assert CODEC.decode(json.loads(json.dumps(encode(record)))) == record

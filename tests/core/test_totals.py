from __future__ import annotations

import json

import pytest
from tests.core.scenes import WALL, Scene, finding, gpu, host, mark, plan

from vllm_watchdog.core import events as e
from vllm_watchdog.core.advance import advance
from vllm_watchdog.core.plan import FailoverPlan
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.readings import Health
from vllm_watchdog.core.totals import PLANNED, Spread, Totals, count, told


class Counted(Scene):
    """A scene whose turns are counted."""

    totals = Totals()

    def feed(self, event: e.Event):  # type: ignore[no-untyped-def]
        self.now = event.at
        before = self.world
        self.world, self.latest = advance(self.world, event)
        self.totals = count(self.totals, before, event, self.world, self.latest)
        self.told += self.latest
        return self.latest


M = mark("primary#1")


def test_a_first_start_is_no_restart_and_no_gap() -> None:
    scene = Counted(plan()).serve()
    assert (scene.totals.restarts, scene.totals.gaps, scene.totals.down_since) == ({}, {}, {})


@pytest.mark.parametrize(("found", "cause"), [((), "unexpected_exit"), ((finding("oom_runtime"),), "oom_runtime")])
def test_a_restart_is_counted_by_its_cause_also_where_the_log_tells_it_last(found: tuple[object, ...], cause: str) -> None:
    scene = Counted(plan(backup=False)).serve()
    scene.crash("primary", 5.0, *found)     # type: ignore[arg-type]
    assert scene.engine().generation == 2 and scene.totals.restarts == {("primary", cause): 1}


def test_a_restart_whose_cause_is_known_before_it_is_dead() -> None:
    scene = Counted(plan(backup=False)).serve()
    scene.feed(e.LogRead(4.0, M, (finding("cuda_hw"),)))
    scene.feed(e.Exited(4.1, M, 0))
    scene.bury()
    assert set(scene.totals.restarts) <= {("primary", "cuda_hw")}


def test_a_restart_that_an_operator_asks_for_is_planned() -> None:
    scene = Counted(plan(backup=False)).serve()
    scene.ask("restart", "primary")
    scene.crash()
    assert scene.totals.restarts == {("primary", PLANNED): 1}


def test_the_last_start_tells_how_long_the_next_may_take() -> None:
    scene = Counted(plan(backup=False), at=1.0)
    scene.now = 45.5
    scene.serve()
    assert scene.totals.loads == {"primary": 44.5} and told(scene.totals, WALL)["loads"] == {"primary": 44.5}


def test_an_oom_is_counted_once_a_generation() -> None:
    scene = Counted(plan(backup=False)).serve()
    scene.feed(e.LogRead(4.0, M, (finding("oom_runtime"),)))
    scene.feed(e.LogRead(4.1, M, (finding("oom_runtime", "again"),)))
    assert scene.totals.ooms == {"primary": 1}
    scene.crash("primary", 5.0)
    scene.serve()
    scene.crash("primary", 6.0, finding("oom_runtime"))
    assert scene.totals.ooms == {"primary": 2}


def test_a_gap_lasts_from_the_end_of_service_until_somebody_serves() -> None:
    scene = Counted(plan(failover=FailoverPlan(after_failures=0))).serve()
    scene.crash("primary", 5.0)
    assert scene.totals.down_since == {"primary": 5.0}
    change = scene.totals.latest["primary"]
    assert (change.kind, change.leaving, change.to, change.gap_s) == ("failover", "primary", "backup", None)
    scene.now = 47.5
    scene.serve("backup")
    assert scene.totals.gaps["primary"].sum == 42.5 and scene.totals.latest["primary"].gap_s == 42.5
    assert scene.totals.down_since == {} and sum(scene.totals.changes.values()) == 1


def test_a_restart_in_place_is_a_gap_but_no_change() -> None:
    scene = Counted(plan(backup=False)).serve()
    scene.crash("primary", 5.0)
    scene.now = 6.0
    scene.serve()
    assert scene.totals.gaps["primary"].sum == 1.0 and scene.totals.latest == {}


def test_a_route_that_changes_at_once_is_a_gap_of_nothing() -> None:
    from vllm_watchdog.core.plan import Standby

    scene = Counted(plan(gpus=(0,), backup_gpus=(1,), standby=Standby.HOT))
    scene.gpus(0.1, gpu(1), gpu(1, index=1))
    scene.serve("primary")
    if scene.phase("backup") is not Phase.SERVING:
        scene.serve("backup", pid=200)
    scene.ask("failover")
    assert scene.totals.latest["primary"].gap_s == 0.0 and scene.totals.gaps["primary"].counts[0] == 1
    scene.feed(e.Exited(9.0, scene.engine("backup").mark, 1))
    assert scene.totals.latest["primary"].to in ("primary", "backup")


def test_a_gap_that_somebody_else_ends_is_not_the_changes_gap() -> None:
    scene = Counted(plan(failover=FailoverPlan(after_failures=0))).serve()
    scene.crash("primary", 5.0)
    scene.serve("backup")
    first = scene.totals.latest["primary"]
    scene.crash("backup", 9.0)
    scene.now = 10.0
    scene.serve("backup")
    assert scene.totals.latest["primary"] == first and sum(scene.totals.gaps["primary"].counts) == 2


def test_a_stop_is_no_gap() -> None:
    scene = Counted(plan()).serve()
    scene.feed(e.StopAsked(5.0, "SIGTERM"))
    scene.crash("primary", 6.0)
    assert scene.totals.down_since == {} and scene.totals.detection == {}


def test_a_death_is_noticed_so_long_after_the_last_look() -> None:
    scene = Counted(plan(backup=False)).serve()
    scene.ok(at=4.0)
    scene.crash("primary", 4.25)
    assert scene.totals.detection["primary"].sum == 0.25


def test_a_hang_is_noticed_so_long_after_the_last_token() -> None:
    scene = Counted(plan(backup=False)).serve()
    scene.scrape(1, at=1.0)
    scene.scrape(2, at=2.0)
    scene.at(12.0)
    scene.feed(e.Answered(22.0, M, False, 10.0))
    scene.ok(at=80.0)                   # /health lies
    scene.at(83.0)
    assert scene.totals.detection["primary"].sum == 81.0


def test_an_engine_that_never_served_was_not_noticed_late() -> None:
    scene = Counted(plan(backup=False))
    scene.feed(e.Spawned(0.0, M, 100))
    scene.crash("primary", 3.0)
    assert scene.totals.detection == {}


def test_sensors_tell_when_they_last_saw_and_how_long_a_token_took() -> None:
    scene = Counted(plan()).serve()
    scene.gpus(1.0, gpu(1))
    scene.feed(e.HostSampled(2.0, host()))
    scene.scrape(1, at=3.0)
    scene.feed(e.Probed(4.0, M, Health.SILENT))
    scene.feed(e.Answered(5.0, M, True, 0.2))
    assert scene.totals.sampled == {"gpu": 1.0, "host": 2.0, "scrape-primary": 3.0, "health-primary": 4.0}
    assert scene.totals.well_at == {"primary": 0.0} and scene.totals.probes["primary"].sum == 0.2


def test_a_spread_counts_each_value_in_the_first_bound_that_holds_it() -> None:
    spread = Spread((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 99.0):
        spread = spread.with_value(value)
    assert (spread.counts, spread.sum) == ((2, 1, 1), 102.0)


def test_the_document_is_plain_json_with_epoch_seconds() -> None:
    scene = Counted(plan(failover=FailoverPlan(after_failures=0))).serve()
    scene.crash("primary", 5.0, finding("oom_runtime"))
    document = told(scene.totals, WALL)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["down_since"] == {"primary": WALL + 5} and document["ooms"] == {"primary": 1}
    assert document["latest"]["primary"]["gap_s"] is None
    scene.now = 7.0
    scene.serve("backup")
    assert told(scene.totals, WALL)["latest"]["primary"] == {
        "at": WALL + 5, "kind": "failover", "leaving": "primary", "to": "backup", "because": "failures", "gap_s": 2.0}
    assert told(scene.totals, WALL)["changes"] == [
        {"service": "primary", "kind": "failover", "because": "failures", "count": 1}]

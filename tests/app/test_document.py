from __future__ import annotations

from tests.core.scenes import Scene, mark, plan, tree

from vllm_watchdog.app.document import context, document
from vllm_watchdog.core import events as e
from vllm_watchdog.core.totals import Totals


def test_each_engine_has_its_profile_and_a_loading_one_its_stage() -> None:
    scene = Scene(plan())
    scene.feed(e.Spawned(1.0, mark("primary#1"), 100))
    totals = Totals(loads={"primary": 44.0})
    profiles = {"primary": {"model": "m"}, "backup": {}}
    shown = document(scene.world, totals, profiles.__getitem__, lambda name: f"weights of {name}")
    primary, backup = shown["engines"]
    assert (primary["profile"], primary["loading"]) == ({"model": "m"}, {"stage": "weights of primary", "about_s": 44.0})
    assert (backup["profile"], "loading" in backup) == ({}, False)
    assert "restarts" in shown["totals"]


def test_a_bundle_is_of_the_generation_that_it_is_about() -> None:
    scene = Scene(plan()).serve()
    scene.feed(e.HostSampled(2.0, scene.world.host, (tree(mark("primary#1"), pid=4711),)))
    told = context(scene.world, mark("primary#1"), lambda: ("head", "row"))
    assert told.pids == (4711,)
    assert told.samples() == ("head", "row")
    assert told.report()["engines"][0]["name"] == "primary"
    assert context(scene.world, mark("primary#2"), tuple).pids == ()
    assert context(scene.world, None, tuple).pids == ()

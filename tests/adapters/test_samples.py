from __future__ import annotations

import random
import sqlite3
import sys
import threading
import time
from dataclasses import replace

import pytest
from tests.core.scenes import GIB, WALL, Scene, gpu, mark, metrics, plan, tree
from tests.fakes.tell import Clock, Said

from vllm_watchdog.app.samples import KEPT_ROWS, SLOT_S, Sampler
from vllm_watchdog.app.samples import KEPT_S as KEPT_FOR_PLOTS_S
from vllm_watchdog.core import events as e
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.tell.history import History, Reader
from vllm_watchdog.tell.page import AFTER_S, BEFORE_S
from vllm_watchdog.tell.samples import KEPT_S, Sample, Samples, columns, prune, schema

M = mark("primary#1")


@pytest.fixture
def book(tmp_path):
    made = History(tmp_path / "history.db", Clock(), lambda: WALL, Said())
    made.start()
    yield made
    made.stop(5)


def test_a_slot_keeps_the_peak_of_a_level_and_the_mean_of_a_rate(book):
    samples = Samples(book.do)
    for second in range(30):
        samples.take([Sample("gpu/0", WALL + second, {"used_bytes": 100 if second == 13 else second}),
                      Sample("engine/primary", WALL + second, {"tokens_per_s": second % 10})])
    samples.stop()
    assert book.flush(5)
    reader = Reader(book.path)
    ten = reader.samples("6h", WALL + 30)
    assert ten["step_s"] == 10 and ten["range"] == "6h"
    assert ten["series"]["gpu/0"] == {"t": [WALL, WALL + 10, WALL + 20], "used_bytes": [9, 100, 29]}
    assert ten["series"]["engine/primary"]["tokens_per_s"] == [4.5, 4.5, 4.5]
    assert reader.samples("6h", WALL + 30, WALL)["series"]["gpu/0"]["t"] == [WALL + 10, WALL + 20]
    week = reader.samples("7d", WALL + 30)["series"]["gpu/0"]
    assert max(week["used_bytes"]) == 100 and len(week["t"]) <= 2


def test_every_second_of_the_last_ten_minutes_is_in_memory():
    samples = Samples(lambda _: None)
    for second in range(700):
        samples.take([Sample("gpu/0", WALL + second, {"used_bytes": second})])
    recent = samples.recent(WALL + 699)["series"]["gpu/0"]
    assert samples.recent(WALL + 699, WALL + 697)["series"]["gpu/0"]["used_bytes"] == [698, 699]
    assert len(recent["t"]) == KEPT_S and recent["used_bytes"][-1] == 699


def test_of_a_slow_sample_no_more_than_ten_minutes_are_told():
    """The limit of rows alone would keep twenty at one a second."""
    samples = Samples(lambda _: None)
    for second in range(3_000):
        samples.take([Sample("gpu/0", WALL + second, {"used_bytes": second})])
    assert len(samples.recent(WALL + 2_999)["series"]["gpu/0"]["t"]) == KEPT_S


def test_a_range_that_is_not_kept_is_refused(book):
    with pytest.raises(KeyError):
        Reader(book.path).samples("1y", WALL)


def test_what_is_too_old_goes(book):
    book.do(lambda db: [db.execute("INSERT INTO samples VALUES (?, 'x', ?, '{}')", (tier, slot)) for tier, slot in (
        ("6h", int((WALL - 21_700) // 10)), ("6h", int(WALL // 10)), ("7d", int((WALL - 605_000) // 120)))])
    book.do(lambda db: prune(db, WALL))
    assert book.flush(5)
    with sqlite3.connect(book.path) as db:
        assert db.execute("SELECT tier, slot FROM samples").fetchall() == [("6h", int(WALL // 10))]
    db.close()


def test_a_figure_that_was_not_known_is_null():
    rows = [("gpu/0", 1.0, {"a": 1}), ("gpu/0", 2.0, {"b": 2}), ("gpu/0", 3.0, {"a": 3})]
    assert columns("10m", 1, rows)["series"]["gpu/0"] == {
        "t": [1.0, 2.0, 3.0], "a": [1, None, 3], "b": [None, 2, None]}


def test_a_week_of_eight_cards_is_read_in_a_second(tmp_path):
    """600,000 seconds are 5,000 rows a card: it is thinned when it is written."""
    path, some = tmp_path / "history.db", random.Random(1)
    with sqlite3.connect(path) as db:
        db.executescript(schema)
        figures = '{"used_bytes": %d, "total_bytes": 150754820096, "held:primary": %d, "held:others": 12}'
        db.executemany("INSERT INTO samples VALUES ('7d', ?, ?, ?)", (
            (f"gpu/{card}", int(WALL // 120) - back, figures % (some.randrange(10**11), some.randrange(10**11)))
            for back in range(5_000) for card in range(8)))
    db.close()
    began = time.process_time()
    week = Reader(path).samples("7d", WALL)
    assert time.process_time() - began < 1.0
    assert len(week["series"]) == 8 and len(week["series"]["gpu/7"]["t"]) == 5_000


# -- what is sampled

def test_engines_and_cards_are_sampled_and_what_is_not_known_is_left_out():
    scene, sampler = Scene(plan(gpus=(0,))), Sampler()
    scene.gpus(0.5, gpu(1))
    scene.serve()
    assert [sample.subject for sample in sampler.take(scene.world)] == ["gpu/0", "engine/primary"]
    scene.gpus(1.0, gpu(60, (7, "x", None, 20), (8, "y", None, 1), (9, "core", M, 39)))
    scene.feed(e.HostSampled(1.0, scene.world.host, (tree(M, 2),)))
    scene.feed(e.Scraped(1.0, M, metrics(10, running=3, kv=0.5)))
    card, engine = sampler.take(scene.world)
    assert card.figures == {"used_bytes": 60 * GIB, "total_bytes": 100 * GIB, "utilization": 1, "temperature_c": 40,
                            "held:others": 21 * GIB, "held:primary": 39 * GIB}
    assert engine.figures == {"rss_bytes": 2 * GIB, "cpu": 1.0, "vram_bytes": 39 * GIB, "kv_usage": 0.5, "running": 3,
                              "waiting": 0.0}
    scene.feed(e.Scraped(3.0, M, metrics(50)))
    assert sampler.take(scene.world)[1].figures["tokens_per_s"] == 20.0
    scene.feed(e.Scraped(4.0, M, metrics(5)))
    assert "tokens_per_s" not in sampler.take(scene.world)[1].figures      # the counter began anew
    assert list(sampler.rows())[1].split(",")[1:] == ["primary", "1", "serving", "", "", "0", "", "", ""]


def test_figures_are_kept_for_a_plot_and_no_longer():
    scene, sampler = Scene(plan()).serve(), Sampler()
    for second in range(1, 3_000):
        sampler.take(replace(scene.world, at=float(second)))
    points = sampler.points("primary")
    assert len(list(sampler.rows())) - 1 == KEPT_FOR_PLOTS_S == BEFORE_S + AFTER_S
    assert points[-1].wall - points[0].wall == pytest.approx(KEPT_FOR_PLOTS_S, abs=SLOT_S)
    assert len(points) == pytest.approx(KEPT_FOR_PLOTS_S / SLOT_S, abs=1)


def test_a_plot_shows_the_peaks():
    scene, sampler = Scene(plan(gpus=(0,))), Sampler()
    scene.gpus(0.5, gpu(1))
    scene.serve()
    for tenth, used in enumerate((10, 90, 20, 30)):
        at = 60.0 + tenth / 10
        scene.gpus(at, gpu(used))
        scene.feed(e.Scraped(at, M, metrics(50, kv=used / 100)))
        sampler.take(scene.world)
    (point,) = sampler.points("primary")
    assert point.wall == pytest.approx(scene.world.wall_offset + 60.0)     # an incident after it has a plot
    assert (point.cards, point.kv) == (((0, 90 * GIB),), 0.9)
    assert [line.split(",")[-3] for line in list(sampler.rows())[1:]] == ["0.1", "0.9", "0.2", "0.3"]


def test_of_an_engine_that_is_held_nothing_older_is_kept():
    scene, sampler = Scene(plan()).serve(), Sampler()
    sampler.take(replace(scene.world, at=1_000.0))
    nothing_runs = replace(scene.world, engines=tuple(
        replace(engine, life=replace(engine.life, phase=Phase.HELD)) for engine in scene.world.engines))
    sampler.take(replace(nothing_runs, at=1_000.0 + KEPT_FOR_PLOTS_S / 2))
    assert len(sampler.points("primary")) == 1
    sampler.take(replace(nothing_runs, at=1_000.0 + KEPT_FOR_PLOTS_S))
    assert sampler.points("primary") == () and len(list(sampler.rows())) == 1


def test_of_fast_samples_no_more_rows_are_kept():
    scene, sampler = Scene(plan()).serve(), Sampler()
    for _ in range(KEPT_ROWS + 10):
        sampler.take(scene.world)
    assert len(list(sampler.rows())) - 1 == KEPT_ROWS


def test_figures_are_read_while_they_are_taken():
    scene, sampler, over = Scene(plan()).serve(), Sampler(), threading.Event()

    def take():
        while not over.is_set():
            sampler.take(scene.world)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=take)
    thread.start()
    try:
        for _ in range(20):
            assert all(point.wall for point in sampler.points("primary"))
            assert len(list(sampler.rows())) >= 1
    finally:
        over.set()
        thread.join(10)
        sys.setswitchinterval(usual)


def test_without_a_driver_no_card_is_sampled():
    scene, sampler = Scene(plan()).serve(), Sampler()
    scene.scrape(None)
    (sample,) = sampler.take(scene.world)
    assert sample.figures == {"kv_usage": 0.0, "running": 0.0, "waiting": 0.0}

"""What a restart can't cure is tried once on a real vLLM, then held with its reason: four services of one daemon."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator

import pytest
from tests.real.conftest import Figures
from tests.real.rig import CONTEXT, START_S, RealWatchdog, Vllm

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

TOO_LONG = 4 * CONTEXT      # tokens: 2 GiB of KV cache, and an engine has 1


@pytest.fixture(scope="module")
def stranger() -> Iterator[int]:
    """A port that this process, which is nobody the watchdog knows, listens on."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield held.getsockname()[1]


@pytest.fixture(scope="module")
def host(vllm: Vllm, stranger: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealWatchdog]:
    engines = {
        "flag": vllm.engine(args={"swap-space": 4}),
        "model": vllm.engine(model="/nonexistent/model"),
        "cache": vllm.engine(args={
            "max-model-len": TOO_LONG, "hf-overrides": json.dumps({"max_position_embeddings": TOO_LONG}),
        }),
        "port": vllm.engine(port=stranger),
    }
    made = RealWatchdog(tmp_path_factory.mktemp("refused"), engines)
    made.start()
    yield made
    made.clear()


def held(host: RealWatchdog, name: str, class_: str) -> str:
    """The sentence that an engine is held with, after one try."""
    engine = host.engine_when(name, lambda doc: doc["phase"] == "held", "not held", START_S)
    assert (engine["cause"], engine["generation"]) == (class_, 1)
    row = host.incident(name)
    assert row and (row["class"], row["urgency"]) == (class_, "page")
    return str(engine["why"])


def test_a_stranger_on_the_port_is_named_and_left_alone(host: RealWatchdog, stranger: int, figures: Figures) -> None:
    why = held(host, "port", "port_stranger")
    assert f"port {stranger} is held by PID {os.getpid()} (" in why
    with socket.create_connection(("127.0.0.1", stranger), timeout=5):
        figures("a stranger on the port", detected_s=age_of(host, "engine.spawn_failed", "port#1"), note=why)


def test_a_bad_flag_is_held_after_one_try_with_the_reason(host: RealWatchdog, figures: Figures) -> None:
    why = held(host, "flag", "bad_args")
    assert "unrecognized arguments: --swap-space" in why
    figures("a flag this vLLM does not know", detected_s=age_of(host, "log.finding", "flag#1"), note=f"held: {why}")


def test_a_missing_model_is_held_after_one_try_with_the_reason(host: RealWatchdog, figures: Figures) -> None:
    why = held(host, "model", "model_not_found")
    assert "/nonexistent/model" in why
    figures("a model that is not there", detected_s=age_of(host, "log.finding", "model#1"), note=f"held: {why[:60]}…")


def test_a_kv_cache_that_can_never_fit_is_held_after_one_try_and_the_page_says_what_does(
    host: RealWatchdog, figures: Figures
) -> None:
    why = held(host, "cache", "startup_kv_insufficient")
    row = host.incident("cache")
    assert row
    page = host.bundle(row) / "README.md"
    fits = host.until(lambda: re.search(r"Set --max-model-len (\d+)", page.read_text()), "the page says none that fits")
    assert 0 < int(fits[1]) < TOO_LONG
    figures("a KV cache that can never fit", detected_s=age_of(host, "log.finding", "cache#1"),
            note=f"held; the page says that {int(fits[1]):,} tokens fit: {why[:60]}…")


def test_held_engines_are_left_alone_and_the_daemon_stops_cleanly(host: RealWatchdog) -> None:
    time.sleep(3)
    code, doc = host.words("status")
    assert (code, doc["health"]) == (3, "down")
    assert [engine["generation"] for engine in doc["engines"]] == [1] * 4
    host.engines.pop("port")    # its port is ours
    host.finish()


def age_of(host: RealWatchdog, name: str, mark: str) -> float:
    """Seconds from the daemon's start to what is said of this generation."""
    return host.since(0.0, name, engine=mark) - host.since(0.0, "daemon.started")

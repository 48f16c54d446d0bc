from __future__ import annotations

from pathlib import Path

import pytest

from vllm_watchdog.core.catalog import CATALOG
from vllm_watchdog.core.places import STARTING, Phase, Place
from vllm_watchdog.core.records import parse
from vllm_watchdog.core.signatures import ROWS, STARTUP_CLASSES, best_row


def test_every_class_has_a_meaning() -> None:
    assert {each.class_ for each in ROWS} - {"oom"} <= set(CATALOG)


def test_every_needle_is_plain_ascii_long_enough_to_be_rare() -> None:
    for each in ROWS:
        for needle in each.needles:
            assert needle.isascii() and '"' not in needle and "\\" not in needle
            assert len(needle) >= 9, needle


def test_causes_outrank_consequences() -> None:
    rank = {each.class_: each.rank for each in reversed(ROWS)}
    order = [
        "cuda_hw",
        "oom",
        "nccl_timeout",
        "nccl_error",
        "step_timeout",
        "worker_died",
        "engine_proc_died",
        "engine_dead_v0",
        "startup_failed",
        "shm_stall",
        "kv_pressure",
    ]
    assert [rank[each] for each in order] == sorted((rank[each] for each in order), reverse=True)


@pytest.mark.parametrize(
    ("line", "class_"),
    [
        ("ERROR 05-06 02:29:07 [core.py:398] EngineCore encountered a fatal error.", "engine_dead_v1"),
        ("vllm serve: error: unrecognized arguments: --swap-space 8", "bad_args"),
        ("vllm serve: error: argument --dtype: invalid choice: 'x'", "bad_args"),
        ("/usr/bin/python3: No module named vllm.entrypoints.api_server", "bad_args"),
        ("/usr/bin/python3: No module named vllmx", None),
        ("grep: error: unrecognised", None),
        ("ERROR 05-06 02:29:07 [core.py:398] TimeoutError: RPC call to update_weights timed out.", None),
    ],
)
def test_a_line_finds_its_row(line: str, class_: str | None) -> None:
    found = best_row(parse(line)[0], Phase.UNKNOWN)
    assert (found.class_ if found else None) == class_


def test_start_up_rows_are_deaf_while_serving() -> None:
    record = parse("PermissionError: [Errno 13] Permission denied: '/x'")[0]
    found = best_row(record, Phase.STARTUP)
    assert found and found.class_ == "fs_error"
    assert best_row(record, Phase.SERVING) is None


def test_start_up_classes_follow_from_the_table() -> None:
    assert {"hf_auth", "startup_oom", "bad_args"} <= STARTUP_CLASSES
    assert "oom" not in STARTUP_CLASSES
    assert all(each.class_ in STARTUP_CLASSES for each in ROWS if each.phases == STARTING and each.place is Place.LINE)


FIXTURES = Path(__file__).parents[1] / "fixtures"
GOLDEN: dict[str, list[tuple[int, str]]] = {}      # class -> the rank and text of each line of it
for _row in (FIXTURES / "signatures.tsv").read_text().splitlines():
    _class, _rank, _line = _row.split("\t")
    GOLDEN.setdefault(_class, []).append((int(_rank), _line))
ONLY_AT_START = {"bad_args", "fs_error", "hf_auth", "hf_network", "model_not_found"}


@pytest.mark.parametrize("class_", GOLDEN)
def test_every_text_of_the_catalogue_is_known_in_every_place(class_: str) -> None:
    for rank, line in GOLDEN[class_]:
        record = parse(line)[0]
        found = best_row(record, Phase.UNKNOWN)
        assert found and (found.class_, found.rank) == (class_, rank), line
        assert any(needle in line for needle in found.needles), line
        serving = best_row(record, Phase.SERVING)
        if class_ != "port_in_use":
            assert (serving is None) == (class_ in ONLY_AT_START), line


@pytest.mark.parametrize("class_", GOLDEN)
def test_the_same_text_quoted_is_nothing(class_: str) -> None:
    for _, line in GOLDEN[class_]:
        text = parse(line)[0].message
        for quote in (
            f"INFO 05-06 02:29:07 [logger.py:39] {text}",
            f"ERROR 05-06 02:29:07 [serving.py:1272] {text}",
            f"It says: {text}",
            f"ERROR 05-06 02:29:07 [core.py:398] KeyError: '{text}'",
            f'INFO:     1.2.3.4:5 - "GET /{text} HTTP/1.1" 200 OK',
        ):
            assert best_row(parse(quote)[0], Phase.UNKNOWN) is None, quote


def test_only_an_oom_may_be_survived() -> None:
    assert {each.class_ for each in ROWS if each.recoverable} == {"oom", "startup_oom"}

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_watchdog.core.records import JSON_LINES_LIMIT, LINE_LIMIT, Kind, Record, Stream, is_probe, parse, stream_of


def one(line: str) -> Record:
    (record,) = parse(line)
    return record


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "ERROR 06-02 09:14:13 async_llm_engine.py:43] msg",
            Record(Kind.RECORD, "msg", "", 0, "ERROR", "async_llm_engine.py", 43),
        ),
        (
            "(VllmWorkerProcess pid=9) INFO 06-02 09:14:13 worker.py:1] msg",
            Record(Kind.RECORD, "msg", "VllmWorkerProcess", 9, "INFO", "worker.py", 1),
        ),
        ("ERROR 05-06 02:29:07 [core.py:398] msg\r\n", Record(Kind.RECORD, "msg", "", 0, "ERROR", "core.py", 398)),
        (
            "(VllmWorker rank=1 pid=9) ERROR 05-06 02:29:07 [core.py:398] msg",
            Record(Kind.RECORD, "msg", "VllmWorker", 9, "ERROR", "core.py", 398),
        ),
        (
            "(EngineCore_DP0 pid=9) ERROR 10-26 21:05:17 [v1/engine/core.py:844] msg",
            Record(Kind.RECORD, "msg", "EngineCore_DP0", 9, "ERROR", "core.py", 844),
        ),
        (
            "DEBUG 10-26 21:05:17 [model_executor/.../utils/fp8_utils.py:4] msg",
            Record(Kind.RECORD, "msg", "", 0, "DEBUG", "fp8_utils.py", 4),
        ),
        (
            "\x1b[0;36m(EngineCore pid=9)\x1b[0;0m \x1b[31mERROR\x1b[0m \x1b[90m10-26 21:05:17\x1b[0m \x1b[90m[core.py:8]\x1b[0m msg",  # noqa: E501
            Record(Kind.RECORD, "msg", "EngineCore", 9, "ERROR", "core.py", 8),
        ),
        (
            "[node-3] (EngineCore pid=9) ERROR 10-26 21:05:17 [core.py:8] msg",
            Record(Kind.RECORD, "msg", "EngineCore", 9, "ERROR", "core.py", 8),
        ),
        (
            "(EngineCore pid=9) node-3: ERROR 10-26 21:05:17 [core.py:8] msg",
            Record(Kind.RECORD, "msg", "EngineCore", 9, "ERROR", "core.py", 8),
        ),
        (
            "(RayWorkerWrapper pid=7, ip=10.0.0.1) ERROR 10-26 21:05:17 [core.py:8] msg",
            Record(Kind.RECORD, "msg", "RayWorkerWrapper", 7, "ERROR", "core.py", 8),
        ),
        ("vllm-1  | ERROR 10-26 21:05:17 [core.py:8] msg", Record(Kind.RECORD, "msg", "", 0, "ERROR", "core.py", 8)),
        (
            "Nov 29 14:41:57 host vllm[539]: ERROR 10-26 21:05:17 [core.py:8] msg",
            Record(Kind.RECORD, "msg", "", 0, "ERROR", "core.py", 8),
        ),
        (
            "2026-11-29T14:41:57.1Z stdout F ERROR 10-26 21:05:17 [core.py:8] msg",
            Record(Kind.RECORD, "msg", "", 0, "ERROR", "core.py", 8),
        ),
        (
            "\rLoading: 100% 1/1 [00:00<00:00,  2.6it/s]ERROR 10-26 21:05:17 [core.py:8] msg",
            Record(Kind.RECORD, "msg", "", 0, "ERROR", "core.py", 8),
        ),
        ("a bar\rERROR 10-26 21:05:17 [core.py:8] msg", Record(Kind.RECORD, "msg", "", 0, "ERROR", "core.py", 8)),
        (
            "(EngineCore pid=9) \rLoading shards:   0% Completed",
            Record(Kind.RAW, "Loading shards:   0% Completed", "EngineCore", 9),
        ),
        ("\0\0INFO:     Shutting down", Record(Kind.SERVER, "Shutting down", level="INFO")),
        ("(APIServer pid=1) INFO:     Shutting down", Record(Kind.SERVER, "Shutting down", "APIServer", 1, "INFO")),
        (
            'INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 200 OK',
            Record(Kind.ACCESS, '127.0.0.1:5 - "GET /health HTTP/1.1" 200 OK', level="INFO"),
        ),
        ("(APIServer pid=71) OSError: x", Record(Kind.RAW, "OSError: x", "APIServer", 71)),
        ("[ 9021.77] NVRM: Xid", Record(Kind.KERNEL, "NVRM: Xid")),
        ("kern  :err   : [ 9021.77] NVRM: Xid", Record(Kind.KERNEL, "NVRM: Xid")),
        ("[Sat Nov 29 14:41:57 2026] NVRM: Xid", Record(Kind.KERNEL, "NVRM: Xid")),
        ("4,12,9021770000,-,caller=T1;NVRM: Xid", Record(Kind.KERNEL, "NVRM: Xid")),
        ("Nov 29 14:41:57 host kernel: [ 9021.77] NVRM: Xid", Record(Kind.KERNEL, "NVRM: Xid", "kernel")),
        ("2026-11-29T14:41:57+00:00 host kernel: NVRM: Xid", Record(Kind.KERNEL, "NVRM: Xid", "kernel")),
        ("               NVRM: fallen off the bus", Record(Kind.KERNEL, "NVRM: fallen off the bus")),
        ("<3>Nov 29 14:41:57 host kernel: [ 9021.77] NVRM: Xid", Record(Kind.KERNEL, "NVRM: Xid", "kernel")),
        (
            "2026-11-29T14:41:57+0000 host vllm[539]: (EngineCore pid=9) ERROR 10-26 21:05:17 [core.py:8] msg",
            Record(Kind.RECORD, "msg", "EngineCore", 9, "ERROR", "core.py", 8),
        ),
        (
            "<14>Nov 29 14:41:57 host docker[539]: vllm-1  | ERROR 10-26 21:05:17 [core.py:8] msg",
            Record(Kind.RECORD, "msg", "", 0, "ERROR", "core.py", 8),
        ),
        (
            "2026-11-29T14:41:57.1Z vllm serve: error: unrecognized arguments: --x",
            Record(Kind.RAW, "vllm serve: error: unrecognized arguments: --x"),
        ),
        (
            "2026-03-09 01:26:30.04 (MapWorker(MapBatches(Actor)) pid=12, ip=10.0.0.1) (EngineCore pid=9) "
            "ERROR 10-26 21:05:17 [core.py:8] msg",
            Record(Kind.RECORD, "msg", "EngineCore", 9, "ERROR", "core.py", 8),
        ),
        (
            '{"MESSAGE": "(EngineCore pid=9) ERROR 10-26 21:05:17 [core.py:8] msg", "PRIORITY": "6"}',
            Record(Kind.RECORD, "msg", "EngineCore", 9, "ERROR", "core.py", 8),
        ),
    ],
)
def test_every_format_is_taken_apart(line: str, expected: Record) -> None:
    assert one(line) == expected


def test_a_record_cannot_be_forged_inside_another() -> None:
    inner = "ERROR 05-06 02:29:07 [core.py:398] EngineCore encountered a fatal error."
    assert one(f"INFO 05-06 02:29:07 [logger.py:39] prompt: '{inner}'").file == "logger.py"
    assert one(f"INFO 05-06 02:29:07 [logger.py:39] prompt: 'a\r{inner}'").file == "logger.py"
    assert one(f"please explain this: {inner}").raw


def test_what_follows_a_terminals_interrupt_is_read_too() -> None:
    interrupt = Record(Kind.SERVER, "^C")
    assert parse("^C^CINFO:     Shutting down") == (interrupt, Record(Kind.SERVER, "Shutting down", level="INFO"))
    assert parse("^C" * 40_000)[0] == interrupt


def test_a_json_record_becomes_one_record_a_line() -> None:
    entry = {
        "levelname": "ERROR",
        "name": "vllm.v1.engine.core",
        "processName": "EngineCore",
        "process": 9,
        "message": "died",
        "exc_info": "Traceback\nKeyError: 1",
    }
    records = parse(json.dumps(entry))
    assert [each.message for each in records] == ["died", "Traceback", "KeyError: 1"]
    assert {each.site for each in records} == {("EngineCore", 9, "core.py", 0)}


def test_uvicorns_json_is_no_vllm_record() -> None:
    entry = {
        "levelname": "INFO",
        "name": "uvicorn.error",
        "processName": "MainProcess",
        "process": 9,
        "vllm_process_name": "APIServer",
    }
    access = '127.0.0.1:5 - "GET /health HTTP/1.1" 200'
    assert parse(json.dumps(entry | {"message": "Shutting down"})) == (
        Record(Kind.SERVER, "Shutting down", "APIServer", 9, "INFO"),
    )
    assert parse(json.dumps(entry | {"message": access})) == (Record(Kind.ACCESS, access, "APIServer", 9, "INFO"),)
    crash = parse(json.dumps(entry | {"message": "Exception in ASGI application", "exc_info": "Traceback\nKeyError: 1"}))
    assert [each.kind for each in crash] == [Kind.SERVER, Kind.RAW, Kind.RAW]


def test_a_json_record_is_bounded() -> None:
    assert len(parse(json.dumps({"level": "error", "message": "x\n" * 2000}))) == JSON_LINES_LIMIT


@pytest.mark.parametrize("line", ["{not json", '{"a": 1}', '{"level": "INFO"}', "{" * 60_000, "[1]"])
def test_what_is_no_json_record_is_raw(line: str) -> None:
    assert one(line).kind is Kind.RAW


def test_a_line_in_dockers_wrapping_is_unwrapped() -> None:
    line = '{"log": "\\u001b[31mERROR\\u001b[0m 05-06 02:29:07 [core.py:398] msg\\r\\n", "stream": "stdout"}'
    assert parse(line) == (Record(Kind.RECORD, "msg", "", 0, "ERROR", "core.py", 398),)


def test_odd_json_values_do_no_harm() -> None:
    (record,) = parse('{"level": "info", "message": 5, "process": "x", "filename": "core.py", "lineno": null}')
    assert record == Record(Kind.RECORD, "5", "", 0, "INFO", "core.py", 0)


def test_a_line_is_bounded() -> None:
    assert len(one("x" * (LINE_LIMIT + 5)).message) == LINE_LIMIT


@given(st.text(max_size=400))
def test_any_text_is_parsed(line: str) -> None:
    assert all("\x1b[31m" not in each.message for each in parse(line))


def test_the_stream_is_told_by_the_majority() -> None:
    engine, kernel = "INFO:     Shutting down", "[1.0] NVRM: x"
    assert stream_of([engine, engine, kernel]) is Stream.ENGINE
    assert stream_of([kernel, "x"]) is Stream.KERNEL
    assert stream_of([kernel, kernel, engine]) is None
    assert stream_of(["x", ""]) is None


@pytest.mark.parametrize(("line", "probe"), [
    ('(APIServer pid=9) INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 200 OK', True),
    ('INFO:     127.0.0.1:5 - "GET /metrics HTTP/1.1" 503', True),
    ('INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK', False),
    ('INFO:     127.0.0.1:5 - "GET /healthy HTTP/1.1" 404 Not Found', False),
])
def test_the_access_lines_of_probes_are_known(line: str, probe: bool) -> None:
    assert is_probe(line) is probe

from __future__ import annotations

import pytest

from vllm_watchdog.core.records import parse
from vllm_watchdog.core.validation import ERRORS, Complaint, begun, heard, lines_after
from vllm_watchdog.core.verdict import Reader, Stream, classify

HEAD = "pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig"
WRONG = "  Input should be less than or equal to 1 [type=less_than_equal, input_value={}, input_type=float]"


def fold(*lines: str) -> Complaint | None:
    said = begun(parse(lines[0])[0], 1)
    for number, line in enumerate(lines[1:], 2):
        said = said and heard(said, parse(line)[0], number)
    return said


def whole(*lines: str) -> tuple[str, dict[str, object]]:
    said = fold(*lines)
    assert said is not None and said.told
    return said.text, dict(said.details)


@pytest.mark.parametrize("prefix", ["", "(APIServer pid=7) ", "(EngineCore pid=9) ERROR 10-26 21:05:17 [core.py:844] "])
def test_the_field_and_what_is_wrong_with_it_complete_the_headline(prefix: str) -> None:
    text, facts = whole(*(prefix + line for line in (HEAD, "gpu_memory_utilization", WRONG.format("80.0"))))
    assert text == f"{HEAD}: gpu_memory_utilization: Input should be less than or equal to 1 (it is 80.0)"
    assert facts == {"config": "CacheConfig", "field": "gpu_memory_utilization", "value": "80.0",
                     "problem": "Input should be less than or equal to 1"}


def test_an_error_of_the_whole_names_no_field_and_no_value() -> None:
    text, facts = whole(HEAD, "  Value error, A needs B [type=value_error, input_value=Args(()), input_type=Args]")
    assert text == f"{HEAD}: Value error, A needs B"
    assert facts == {"config": "CacheConfig", "problem": "A needs B"}


@pytest.mark.parametrize(("field", "value"), [("hf_token", "'hf_abc'"), ("api_key", "'x'"), ("dtype", "x" * 61)])
def test_a_secret_or_a_long_value_is_not_told(field: str, value: str) -> None:
    text, facts = whole(HEAD, field, WRONG.format(value))
    assert value not in text and "value" not in facts


def test_lines_of_another_process_lie_between_but_not_too_many() -> None:
    other = "(Worker pid=3) something else"
    assert whole(HEAD, other, "block_size", WRONG.format("0"))[1]["field"] == "block_size"
    assert fold(HEAD, *[other] * lines_after(HEAD), "block_size") is None


@pytest.mark.parametrize("line", ["what is this, a sentence?", "second_field\nthird"])
def test_what_is_neither_field_nor_message_ends_it(line: str) -> None:
    assert fold(HEAD, line) is None
    assert fold(HEAD, "one_field", "another_field") is None


def test_several_errors_are_told_the_first_one_first() -> None:
    head, pointer = HEAD.replace("1 validation error", "2 validation errors"), "    For further information visit https://x"
    zero = WRONG.format("0")
    text, facts = whole(head, "max_num_batched_tokens", zero, pointer, "max_num_seqs", zero, pointer)
    wrong = "Input should be less than or equal to 1 (it is 0)"
    assert text == f"{head}: max_num_batched_tokens: {wrong}; max_num_seqs: {wrong}"
    assert (facts["field"], facts["value"], facts["also"]) == ("max_num_batched_tokens", "0", f"max_num_seqs: {wrong}")
    assert fold(head, "a", WRONG.format("0"), WRONG.format("0")) is None


def test_the_lines_of_a_headline_are_bounded() -> None:
    assert [lines_after(HEAD.replace("1 val", f"{n} val")) for n in (1, 2, 9999)] == [4, 7, 3 * ERRORS + 1]
    assert lines_after("nothing") == 0


def test_another_line_is_no_headline() -> None:
    assert begun(parse("ValueError: nothing of the kind")[0], 1) is None


# -- as the reader tells it

def test_the_reader_tells_the_headline_and_then_the_whole_of_it() -> None:
    reader = Reader(Stream.ENGINE)
    told = [reader.feed(line) for line in (HEAD, "gpu_memory_utilization", WRONG.format("80.0"), "    For further words")]
    assert [bool(each) for each in told] == [True, False, True, False]
    text = f"{HEAD}: gpu_memory_utilization: Input should be less than or equal to 1 (it is 80.0)"
    assert reader.verdict().evidence == ((1, text),)
    assert reader.verdict().advice == (
        "Set gpu-memory-utilization otherwise: Input should be less than or equal to 1 (it is 80.0).",)


def test_a_second_error_leaves_the_first_one_as_it_was() -> None:
    again = (HEAD.replace("Cache", "Model"), "dtype", WRONG.format("1"))
    verdict = classify((HEAD, "block_size", WRONG.format("0"), *again))
    assert dict(verdict.details)["field"] == "block_size" and len(verdict.evidence) == 1


def test_a_request_that_is_no_valid_one_while_serving_is_no_failure() -> None:
    lines = ("INFO:     Application startup complete.", HEAD, "temperature", WRONG.format("9"))
    assert classify(lines).class_ == "none"

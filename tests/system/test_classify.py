from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_watchdog.app.classify import classify

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
OOM = LOGS / "real__cuda_oom_0.24_h200.log"
FINE = LOGS / "real__startup_0.32_cpu.log"
PRESSURE = LOGS / "preemption__v1_stats_line.log"


def run(*paths: Path | str, as_json: bool = True) -> tuple[int, str]:
    out = io.StringIO()
    return classify([str(path) for path in paths], as_json, out), out.getvalue()


def test_json_is_one_object_a_file_with_the_proving_lines() -> None:
    code, text = run(OOM, FINE)
    oom, fine = map(json.loads, text.splitlines())
    assert code == 1
    assert list(oom) == ["file", "class", "severity", "action", "phase", "evidence", "details", "advice"]
    assert (oom["class"], oom["severity"], oom["action"], oom["phase"]) == ("oom_runtime", "fatal", "restart", "serving")
    lines = OOM.read_bytes().decode().split("\n")  # as an editor that knows no bare returns
    assert all(each["text"][:40] in lines[each["line"] - 1] for each in oom["evidence"])
    assert oom["details"]["requested_bytes"] == 352 * 2**20
    assert oom["details"]["other_processes"] == [{"pid": 1733, "bytes": 107674830110}]
    assert oom["advice"]
    assert (fine["class"], fine["action"], fine["evidence"], fine["advice"]) == ("none", "ignore", [], [])


def test_a_human_reads_the_verdict_the_proof_and_the_advice() -> None:
    code, text = run(OOM, as_json=False)
    assert code == 1
    assert "oom_runtime" in text and "action: restart" in text and "    207  torch.OutOfMemoryError" in text
    assert "requested_bytes=369098752" in text and "--max-num-seqs" in text
    assert run(FINE, as_json=False) == (0, f"{FINE}: none: no failure that I know\n")


def test_a_warning_is_no_failure() -> None:
    code, text = run(PRESSURE)
    assert code == 0 and json.loads(text)["severity"] == "warning"


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("missing.log", None, "No such file or directory"),
        ("empty.log", b"", "empty"),
        ("zeros.log", b"\0" * 9000, "empty"),
        ("binary.log", bytes(range(256)) * 64, "binary"),
        ("packed.log", gzip.compress(b"x", mtime=0), "zcat"),
        (".", None, "Is a directory"),
    ],
)
def test_bad_input_is_one_line_that_says_what_was_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, why: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    code, text = run(path, FINE)
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith(f"{path}: ") and why in line and "expected" in line
    assert json.loads(text)["class"] == "none"  # the other file is still judged


def test_a_hole_at_the_start_of_a_rotated_log_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "hole.log"
    path.write_bytes(b"\0" * 300_000 + OOM.read_bytes())
    assert json.loads(run(path)[1])["class"] == "oom_runtime"


def test_a_large_log_is_read_with_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.log"
    line = b'INFO:     192.0.2.7:41000 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    with path.open("wb") as file:
        for _ in range(30):
            file.write(line * 14_000)
        file.write(OOM.read_bytes())
    program = (
        "import sys; from vllm_watchdog.app.classify import classify; code = classify(sys.argv[1:], True, sys.stdout); "
        "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]); "    # ru_maxrss counts the parent, too
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=50, check=False
    )
    verdict, peak_kib = done.stdout.splitlines()
    assert done.returncode == 1 and json.loads(verdict)["class"] == "oom_runtime"
    assert int(peak_kib) < 80 * 1024


def test_standard_input_is_a_dash() -> None:
    program = "import sys; from vllm_watchdog.app.classify import classify; sys.exit(classify(['-'], True, sys.stdout))"
    done = subprocess.run(
        [sys.executable, "-c", program], input=OOM.read_bytes(), capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, json.loads(done.stdout)["file"]) == (1, "-")


def test_classify_imports_only_what_it_needs() -> None:
    program = "import sys, vllm_watchdog.app.classify; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert not {"requests", "psutil", "pydantic", "apscheduler", "pynvml", "asyncio"} & set(done.stdout.split())


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "secret.log"
    path.write_text("x")
    path.chmod(0)
    assert run(path)[0] == 2 and "Permission denied" in capsys.readouterr().err

"""`stepahead trace`: timelines of real runs are sound, and every verb reads what another wrote."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import stepahead.cli.trace as trace_module
from offline_makers import toy_flags
from stepahead.cli.main import run_command
from stepahead.cli.trace import seconds
from stepahead.config import CHOICES
from stepahead.errors import ConfigError
from timelines import complaints, ns, parsed, tracks

SIZES = ["--num-prompts", "6", "--input-len", "20", "--output-len", "12"]


def written(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    document = parsed(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert complaints(document) == []
    return document


def record(
    folder: Path, loop: str, *flags: str, name: str = "run.json.gz", executor: str = "inline"
) -> Path:
    path = folder / f"{loop}-{name}"
    engine = toy_flags(loop=loop, executor=executor)
    asked = ["trace", "record", "toy", *SIZES, *engine, "--quiet", *flags]
    assert run_command([*asked, "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("traces")
    return {loop: record(folder, loop) for loop in ("serial", "overlap")}


@pytest.mark.parametrize("executor", ["inline", "process"])
@pytest.mark.parametrize("loop", CHOICES["loop"])
def test_a_real_run_has_a_sound_timeline(tmp_path: Path, loop: str, executor: str) -> None:
    path = record(tmp_path, loop, name="run.json", executor=executor)
    document = written(path)
    lanes = tracks(document)
    # the last prompt's first token comes from its prefill; then eleven steps
    assert len(lanes["compute"]) >= 12
    assert [e["args"]["step"] for e in lanes["compute"]] == sorted(
        e["args"]["step"] for e in lanes["compute"]
    )
    assert {e["name"] for e in lanes["compute"]} <= {"prefill", "mixed", "decode"}
    assert lanes["runner"], "the runner says when it had a plan and when it had queued it"
    assert lanes["device idle"]
    about = document["stepahead"]["about"]
    assert (about["loop"], about["executor"], about["model"]) == (loop, executor, "toy")
    begun = [e for e in document["traceEvents"] if e["name"] == "request" and e["ph"] == "b"]
    assert len(begun) == 6  # without the warm-up's
    assert {e["args"]["end"] for e in begun} == {"finished"}
    base_ns = document["baseTimeNanoseconds"]
    assert abs(base_ns - path.stat().st_mtime_ns) < 300e9


def test_last_cuts_a_run(tmp_path: Path) -> None:
    whole = written(record(tmp_path, "overlap"))
    part = written(record(tmp_path, "overlap", "--last", "2ms", name="part.json.gz"))
    ends = [ns(e["ts"]) + ns(e.get("dur", 0)) for e in part["traceEvents"]]
    assert max(ends) <= 2_000_000 < max(ns(e["ts"]) for e in whole["traceEvents"])


def test_a_file_is_named_after_the_loop_and_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["trace", "record", "toy", *SIZES, *toy_flags(loop="batch-queue")]) == 0
    captured = capsys.readouterr()
    (path,) = tmp_path.iterdir()
    assert captured.out.splitlines() == [path.name]
    assert path.match("trace-batch-queue-20??????-??????.json.gz")
    assert f"`stepahead trace open {path.name}` shows them" in captured.err


# --- a running engine -----------------------------------------------------------------------------


@contextmanager
def serving(body: bytes, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """Something that answers GET on loopback; its address, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Not in a test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_running_engine_is_asked_for_its_last_seconds(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    packed = runs["overlap"].read_bytes()
    path = tmp_path / "got.json"
    for body in (packed, gzip.decompress(packed)):
        with serving(body) as (url, asked):
            command = ["trace", "record", "--url", f"{url}/", "--last", "1500ms", "-o", str(path)]
            assert run_command(command) == 0
        assert asked == ["/trace?last=1.5s"]
        assert written(path) == written(runs["overlap"])


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"not found", 404, "answers 404: is it an engine started with --observe PORT?"),
        (b'{"error": {"message": "it is stuck"}}', 503, "answers 503: it is stuck"),
        (b"<html>", 200, "is no trace: it holds no JSON"),
        (b'{"traceEvents": []}', 200, "not of stepahead"),
    ],
)
def test_what_is_no_engine_is_told_so(
    body: bytes, status: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "got.json"
    with serving(body, status) as (url, _):
        assert run_command(["trace", "record", "--url", url, "-o", str(path)]) == 2
    assert words in capsys.readouterr().err
    assert not path.exists()


def test_nobody_at_home_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(b"") as (url, _):
        pass
    assert run_command(["trace", "record", "--url", url]) == 2
    assert "can't be read" in (told := capsys.readouterr().err)
    assert "start the engine with --observe PORT" in told


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "needs a MODEL to run or the --url of a running engine, and not both"),
        (["toy", "--url", "http://127.0.0.1:1"], "and not both"),
        (["--url", "ftp://x"], "is no web address"),
        (["--url", "http://127.0.0.1:1", "--loop", "serial"], "loop can't be set on a running"),
        (["--url", "http://127.0.0.1:1", "--torch-profiler"], "torch_profiler can't be set"),
        (["toy", "--last", "soon"], "--last soon is no length of time"),
        (["toy", "-o", "x.pb"], "x.pb must end in .json or .json.gz"),
        (["toy", "--num-prompts", "0"], "num_prompts=0; give at least 1"),
        (["toy", "--torch-profiler", "--executor", "process"], "leave --executor out"),
    ],
)
def test_wrong_flags_are_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["trace", "record", *flags]) == 2
    assert words in capsys.readouterr().err


def test_lengths_of_time_are_read_as_people_write_them() -> None:
    told = {"5s": 5.0, "500ms": 0.5, "2.5": 2.5, ".5s": 0.5, "1 m": 60.0, "2MIN": 120.0}
    assert {text: seconds(text) for text in told} == told
    for text in ("", "s", "-1s", "5h", "0s", "0", "1e3", "nan", "5 s s"):
        with pytest.raises(ConfigError, match="give one like 5s or 500ms"):
            seconds(text)


# --- reading --------------------------------------------------------------------------------------


def test_a_summary_is_tables_or_one_json(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["trace", "summary", str(runs["overlap"])]) == 0
    told = capsys.readouterr().out
    for words in ("toy, overlap", "host exposed", "the device idle", "longest bubbles", "TPOT"):
        assert words in told
    assert run_command(["trace", "summary", str(runs["overlap"]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["about"]["loop"] == "overlap"
    assert found["busy_ns"] + sum(found["idle_ns"].values()) == found["wall_ns"]
    assert found["hidden_ns"] + found["exposed_ns"] + found["waiting_ns"] == found["wall_ns"]
    assert "decode" in [kind["kind"] for kind in found["kinds"]]


def test_a_diff_is_a_table_and_a_sentence_or_one_json(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [str(runs["serial"]), str(runs["overlap"])]
    assert run_command(["trace", "diff", *pair]) == 0
    told = capsys.readouterr().out
    assert "steps aligned" in told
    assert told.rstrip().splitlines()[-1].startswith("A step takes ")
    assert run_command(["trace", "diff", *pair, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["aligned"] >= 8
    assert found["verdict"].startswith("A step takes ")


@pytest.mark.parametrize("verb", [["summary"], ["diff", "{run}"]])
def test_another_tools_trace_is_not_summed_up_but_shown(
    verb: list[str],
    runs: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "theirs.json"
    slice_ = {"ph": "X", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 2}
    path.write_text(json.dumps({"traceEvents": [slice_]}))
    command = [word.format(run=runs["serial"]) for word in verb]
    assert run_command(["trace", *command, str(path)]) == 2
    assert "`stepahead trace open` shows it" in capsys.readouterr().err
    assert run_command(["trace", "open", str(path), "--html-only"]) == 0
    assert "aten::mm" in (tmp_path / "theirs.html").read_text("utf-8")


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["trace", "summary", str(tmp_path / "gone.json")]) == 1
    assert "gone.json: No such file" in capsys.readouterr().err


def test_open_hands_the_file_to_the_browser_and_ends(
    runs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import urllib.request

    got: list[bytes] = []

    def browse(url: str) -> bool:
        with urllib.request.urlopen(f"{url}trace", timeout=10) as answer:
            got.append(answer.read())
        urllib.request.urlopen(f"{url}done", data=b"", timeout=10).close()
        return True

    monkeypatch.setattr(trace_module.webbrowser, "open", browse)
    target = tmp_path / "here.html"
    assert run_command(["trace", "open", str(runs["serial"]), "-o", str(target)]) == 0
    assert got == [runs["serial"].read_bytes()]
    told = capsys.readouterr().out.splitlines()
    assert told[0] == str(target)
    assert told[1].startswith("http://127.0.0.1:")
    assert target.read_text("utf-8").startswith("<!DOCTYPE html>")


# --- torch.profiler -------------------------------------------------------------------------------


def test_torch_profiler_is_laid_beside_on_one_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "both.json.gz"
    flags = [*SIZES, *toy_flags(loop="overlap"), "--torch-profiler", "-o", str(path)]
    assert run_command(["trace", "record", "toy", *flags]) == 0
    assert "aligned by" in capsys.readouterr().err
    document = parsed(gzip.decompress(path.read_bytes()))
    steps = {
        e["id"]: e["args"]
        for e in document["traceEvents"]
        if e.get("cat") == "step" and e["ph"] == "b"
    }
    marks = {
        int(e["name"].rpartition(" ")[2]): e
        for e in document["traceEvents"]
        if e["ph"] == "X" and e["name"].startswith("stepahead step ")
    }
    both = sorted(set(steps) & set(marks))
    assert len(both) >= 10
    ops = [e for e in document["traceEvents"] if e.get("cat") == "cpu_op"]
    for step in both[2:]:
        # operators of the step lie in its mark, and the mark where the runner had the plan
        inside = [
            e for e in ops if marks[step]["ts"] <= e["ts"] <= marks[step]["ts"] + marks[step]["dur"]
        ]
        assert inside
    middle = both[len(both) // 2]
    assert abs(marks[middle]["ts"] - steps[middle]["received_us"]) < 50_000
    assert run_command(["trace", "summary", str(path)]) == 0


def test_merge_is_a_verb_too(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = next(
        e
        for e in written(runs["overlap"])["traceEvents"]
        if e.get("cat") == "step" and e["ph"] == "b" and "received_us" in e["args"]
    )
    mark = {"ph": "X", "name": f"stepahead step {begun['id']}", "cat": "user_annotation"}
    other = tmp_path / "torch.json"
    other.write_text(
        json.dumps({"traceEvents": [mark | {"pid": 9, "tid": 9, "ts": 55.0, "dur": 1.0}]})
    )
    ours = tmp_path / "ours.json.gz"
    ours.write_bytes(runs["overlap"].read_bytes())
    assert run_command(["trace", "merge", str(ours), str(other)]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(tmp_path / "ours-torch.json.gz")
    assert "aligned by 1 marks of steps" in captured.err
    found = parsed(gzip.decompress((tmp_path / "ours-torch.json.gz").read_bytes()))
    (added,) = [e for e in found["traceEvents"] if e["name"] == mark["name"]]
    assert added["ts"] == pytest.approx(begun["args"]["received_us"], abs=0.01)


def test_a_place_that_can_not_be_written_is_told_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.json").mkdir()
    for place in ("file/x.json", "folder.json"):
        assert run_command(["trace", "record", "no-such-model", "-o", str(tmp_path / place)]) == 2
        assert f"{place} can't be written" in capsys.readouterr().err

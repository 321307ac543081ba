"""`stepahead demo` on a tiny model: the line for machines, the table's figures, the picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from offline_makers import tiny_llama

FIGURES = {
    *("tokens_per_s", "tpot_ms_p50", "tpot_ms_p99", "ttft_ms_p50", "ttft_ms_p99"),
    *("host_hidden_us", "host_exposed_us", "device_idle_pct", "syncs"),
}


def test_the_demo_answers_alike_with_both_loops_and_draws_them(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", max_len=1024)
    picture = tmp_path / "out" / "demo.html"
    command = [sys.executable, "-m", "stepahead", "demo", str(model)]
    command += ["--picture", str(picture), "--max-tokens", "12", "--json"]
    command += ["--observe", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["demo"], line["prompts"], line["same_tokens"]) == (1, 32, 32)
    for loop in ("serial", "overlap"):
        assert line[loop].keys() == FIGURES
        assert line[loop]["tokens_per_s"] > 0
        assert 0 <= line[loop]["device_idle_pct"] <= 100
        assert line[loop]["host_hidden_us"] + line[loop]["host_exposed_us"] > 0
    assert line["picture"] == str(picture)
    assert {loop: told["depth"] for loop, told in line["probes"].items()} == {
        "serial": 1,
        "overlap": 2,
    }
    page = picture.read_text("utf-8")
    assert page.count("device idle") >= 4
    assert "not a model" in page  # the sleeping device says what it is
    assert "same tokens: 32 of 32" in done.stderr
    assert done.stderr.count("/metrics and /trace show this engine") == 2

"""The pictures of the documents draw what they are given; their command runs no model here."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepahead.observe.perfetto import chrome_trace
from stepahead.sim import shapes
from stepahead.sim.virtual import OVERLAP, SERIAL, LoopChoice, host_work, rig, steady
from stepahead.trace.read import Recorded, parse, recorded

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("pictures")


def run(choice: LoopChoice) -> Recorded:
    """Steady steps: 10 ms on the device, 6 ms of the host, 4 rows."""
    rigged = rig(choice, shapes.timing(10.0, handover=0.25), host_work(6.0))
    steady(rigged, 40)
    rigged.hear(40)
    snapshot = rigged.engine.observer.snapshot()
    return recorded(parse(chrome_trace(snapshot, 0.3), "x"), "x")


def fills(svg: str) -> dict[str, float]:
    """Widths of bars by colour, added up, without the legend's."""
    found: dict[str, float] = {}
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        if rect.get("stroke"):
            fill = rect.get("fill", "")
            found[fill] = found.get(fill, 0.0) + float(rect.get("width", 0))
    return found


def test_a_timeline_shows_the_gap_of_one_loop_and_none_of_the_other(pictures: ModuleType) -> None:
    charts = importlib.import_module("charts")
    window = (11_000_000, 21_000_000)
    both = {"serial": run(SERIAL), "overlap": run(OVERLAP)}
    gap = fills(pictures.timeline({"serial": both["serial"]}, window, "n"))
    none = fills(pictures.timeline({"overlap": both["overlap"]}, window, "n"))
    # 6.25 ms of idle time in every 16.25: two gaps reach into the window of 32 ms
    assert gap[charts.FILLS["idle"]] / 860 * 32 == pytest.approx(11.25, abs=1.3)
    assert charts.FILLS["idle"] not in none
    assert none[charts.FILLS["forward"]] / 860 * 32 == pytest.approx(32, abs=1.5)
    ElementTree.fromstring(pictures.timeline(both, window, "a <note> & more"))


def test_costs_and_times_between_tokens_are_those_of_the_schedule(pictures: ModuleType) -> None:
    serial, overlap = (pictures.cost([run(choice)], 4) for choice in (SERIAL, OVERLAP))
    assert (serial.step_us, overlap.step_us) == (16_250, 10_000)
    assert (serial.device_us, overlap.device_us) == (10_000, 10_000)
    assert serial.exposed_us == pytest.approx(6_000, rel=0.1)
    assert overlap.exposed_us == pytest.approx(0.0, abs=400)
    assert set(pictures.between_ms([run(SERIAL)])) == {16.25}
    costs = {"serial": [serial, serial], "overlap": [overlap, overlap]}
    ElementTree.fromstring(pictures.cost_picture(costs, "note"))


def test_scales_have_round_ends_around_their_values(pictures: ModuleType) -> None:
    @given(st.floats(0, 1e5), st.floats(1e-3, 1e5))
    def holds(low: float, span: float) -> None:
        start, end = pictures.scale(low, low + span)
        slack = 1e-9 * max(end, 1.0)
        assert start <= low + slack
        assert low + span <= end + slack
        assert end - start <= 20 * span + slack

    holds()
    assert pictures.scale(0, 32) == (0.0, 40.0)


@pytest.mark.parametrize("name", ["timeline-sleeping", "timeline-model", "tpot", "cost"])
def test_the_pictures_of_the_documents_are_small_and_whole(name: str) -> None:
    path = ROOT / "docs" / "pictures" / f"{name}.svg"
    assert path.stat().st_size < 60_000
    text = path.read_text("utf-8")
    ElementTree.fromstring(text)
    assert "cores" in text, "it says where it was measured"

"""The picture: well-formed, self-contained, to scale, and it says what the numbers say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from stepahead.observe.books import Books, Stage
from stepahead.observe.picture import Panel, render
from stepahead.observe.timeline import boundary, typical_step

US = 1_000
SVG = "{http://www.w3.org/2000/svg}"
SMALL = "small model · 32 rows"
SLEEPY = "sleeping device"


def panel(pair: str, loop: str, forward_us: int, retire_us: int, plan_us: int = 40) -> Panel:
    """A run of 12 like steps; hand-over takes 30 µs, delivery 20 µs, launch 60 µs."""
    now_ns = 0
    books = Books(lambda: now_ns)
    free_ns, flights, launched = 0, [], 0
    depth = {"serial": 1, "overlap": 2}[loop]

    def does(stage: Stage, until_ns: int) -> None:
        nonlocal now_ns
        books.enter(stage)
        now_ns = max(now_ns, until_ns)

    while launched < 12 or flights:
        if launched < 12:
            does(Stage.PLAN, now_ns + plan_us * US)
            does(Stage.LAUNCH, now_ns + 60 * US)
            begin_ns = max(free_ns + 2 * US, now_ns + 30 * US)
            free_ns = begin_ns + forward_us * US
            flights.append((launched, begin_ns, free_ns))
            launched += 1
        if len(flights) == depth or launched == 12:
            flight = flights.pop(0)
            does(Stage.WAIT, flight[2] + 30 * US)
            does(Stage.RETIRE, now_ns + retire_us * US)
            books.busy(*flight)
            does(Stage.DELIVER, now_ns + 20 * US)
    events = books.recent()
    return Panel(pair, loop, boundary(events, typical_step(events)), books.summary())


PANELS = [
    panel(SMALL, "serial", 50_000, 200),
    panel(SMALL, "overlap", 50_000, 200),
    panel(SLEEPY, "serial", 10_000, 6_000, plan_us=10),
    panel(SLEEPY, "overlap", 10_000, 6_000, plan_us=10),
]


def drawn(page: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(page).iter(f"{SVG}svg"))


def panels_of(svg: ElementTree.Element) -> list[ElementTree.Element]:
    return [group for group in svg.iter(f"{SVG}g") if group.get("class") == "panel"]


def bars(element: ElementTree.Element) -> Iterator[tuple[str, float, float, int, int]]:
    """(kind, x, width, start ns, end ns) of every bar."""
    for rect in element.iter(f"{SVG}rect"):
        if "data-start-ns" in rect.keys():  # noqa: SIM118 (an Element is no mapping)
            at = (int(rect.get("data-start-ns", "")), int(rect.get("data-end-ns", "")))
            size = (float(rect.get("x", "")), float(rect.get("width", "")))
            yield rect.get("class", ""), *size, *at


def words(element: ElementTree.Element, kind: str) -> list[str]:
    return [
        "".join(text.itertext()).replace("\N{NO-BREAK SPACE}", " ")
        for text in element.iter(f"{SVG}text")
        if kind in text.get("class", "").split()
    ]


def test_the_page_is_well_formed_and_fetches_nothing() -> None:
    page = render(PANELS, "one step", ["a note"])
    assert page.startswith("<!DOCTYPE html>")
    root = ElementTree.fromstring(page)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags.isdisjoint({"script", "img", "image", "link", "iframe", "object", "use", "a"})
    named = {value for element in root.iter() for name, value in element.items() if "href" in name}
    assert named == set()
    assert "//" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert set(re.findall(r"url\(([^)]*)\)", page)) == {"#hatch", "#fade-left", "#fade-right"}
    assert "@import" not in page


def test_foreign_text_is_escaped() -> None:
    odd = replace(PANELS[0], pair='<b> & "pair"', loop="<serial>")
    root = ElementTree.fromstring(render([odd], "a < b & c", ["<script>alert(1)</script>"]))
    text = "".join(root.itertext())
    assert "a < b & c" in text
    assert "<script>alert(1)</script>" in text
    assert '<b> & "pair"' in text
    assert words(root, "loop") == ["<serial>"]


def test_every_bar_is_as_wide_as_its_time_and_pairs_share_a_scale() -> None:
    scales = []
    for svg in drawn(render(PANELS, "t", [])):
        assert len(panels_of(svg)) == 2
        found = list(bars(svg))
        kinds = {kind for kind, *_ in found}
        assert {"stage retire", "stage launch", "stage wait", "busy", "gap"} <= kinds
        _, x0, w0, from0, to0 = max(found, key=lambda bar: bar[2])
        per_ns = w0 / (to0 - from0)
        for _, x, width, start_ns, end_ns in found:
            assert width == pytest.approx((end_ns - start_ns) * per_ns, abs=0.002)
            assert x - x0 == pytest.approx((start_ns - from0) * per_ns, abs=0.002)
        scales.append(per_ns)
    assert scales[0] > 5 * scales[1]


def test_the_lanes_are_drawn_without_holes_or_overlaps() -> None:
    for svg in drawn(render(PANELS, "t", [])):
        for group in panels_of(svg):
            found = list(bars(group))
            host = sorted(bar[3:] for bar in found if bar[0].startswith("stage"))
            device = sorted(bar[3:] for bar in found if bar[0] in ("busy", "gap"))
            for lane in (host, device):
                assert all(end == start for (_, end), (start, _) in pairwise(lane))
            assert (host[0][0], host[-1][1]) == (device[0][0], device[-1][1])


def test_one_sees_the_gap_close() -> None:
    for svg in drawn(render(PANELS, "t", [])):
        serial, overlap = (
            next(bar for bar in bars(group) if bar[0] == "gap" and bar[3] == 0)
            for group in panels_of(svg)
        )
        assert serial[2] > 0.5 * float(svg.get("viewBox", "").split()[2])
        assert overlap[2] < serial[2] / 20
        assert serial[1] == overlap[1]  # both begin at the same place


def test_the_gap_and_the_steps_are_named() -> None:
    small, sleepy = drawn(render(PANELS, "t", []))
    assert words(small, "idle-word") == ["device idle 380 µs", "device idle 2.00 µs"]
    assert words(sleepy, "idle-word") == ["device idle 6.15 ms", "device idle 2.00 µs"]
    step = PANELS[0].boundary.step
    assert f"step {step} · 50.0 ms" in words(small, "on-busy")
    assert f"step {step + 1}" in " ".join(words(small, "on-busy"))
    assert "retire 200 µs" in words(small, "on-retire")
    assert f"0: step {step} ends" in words(small, "tick")
    assert any(word.endswith(" µs") for word in words(small, "tick"))
    assert any(word.endswith(" ms") for word in words(sleepy, "tick"))


def test_what_is_too_short_to_see_has_a_pin_and_keeps_its_width() -> None:
    small, sleepy = drawn(render(PANELS, "t", []))
    pins = [
        circle.get("class", "").split()[1]
        for circle in sleepy.iter(f"{SVG}circle")
        if circle.get("class", "").endswith("pin")
    ]
    assert pins == ["deliver", "plan", "deliver", "plan"]  # 20 µs and 10 µs at 0.13 px a µs
    assert not list(small.iter(f"{SVG}circle"))
    narrow = [bar for bar in bars(sleepy) if bar[0] == "stage plan"]
    assert narrow
    assert all(0 < width < 3 for _, _, width, *_ in narrow)


def test_two_runs_without_a_gap_are_told_apart() -> None:
    host, device = PANELS[1].boundary.host, list(PANELS[1].boundary.device)
    at = next(index for index, span in enumerate(device) if span.start_ns > 0)
    device[at] = replace(device[at], start_ns=0)
    close = replace(PANELS[1].boundary, gap_ns=0, gap_idle_ns={}, host=host, device=tuple(device))
    (svg,) = drawn(render([PANELS[0], replace(PANELS[1], boundary=close)], "t", []))
    assert sum("seam" in path.get("class", "") for path in svg.iter(f"{SVG}path")) == 1
    assert words(svg, "idle-word")[1] == "device idle 0 ns"


def sentences(panels: list[Panel]) -> str:
    root = ElementTree.fromstring(render(panels, "t", []))
    said = [p.text or "" for p in root.iter("p") if p.get("class") == "says"]
    return " ".join(said).replace("\N{NO-BREAK SPACE}", " ")


def test_the_sentence_says_what_one_sees() -> None:
    assert sentences(PANELS[:2]) == (
        "Between two steps the device stands still for 380 µs under serial (plan late 260 µs, "
        "launch late 60.0 µs, copy 60.0 µs), for "
        "2.00 µs under overlap (copy 2.00 µs). 99.4 % of the gap is gone. Over the whole run "
        "overlap hides 90.8 % of the host's work behind the device, serial 0 %."
    )


def test_a_gap_that_did_not_close_is_said_to_be_open() -> None:
    serial, overlap = PANELS[:2]
    open_gap = replace(overlap, boundary=serial.boundary)
    assert "The gap has not closed." in sentences([serial, open_gap])
    assert "is gone" not in sentences([serial, open_gap])


def test_the_table_balances_in_every_row() -> None:
    root = ElementTree.fromstring(render(PANELS, "t", []))
    rows = [row for row in root.iter("tr") if len(row.findall("td")) == 8]
    assert [row.findtext("th") for row in rows] == ["serial", "overlap"] * 2
    for row in rows:
        cells = [float((td.text or "0").replace(",", "")) for td in row.findall("td")[:7]]
        steps, wall, hidden, exposed, waiting, busy, idle = cells
        assert steps == 12
        assert hidden + exposed + waiting == pytest.approx(wall, abs=2)
        assert busy + idle == pytest.approx(wall, abs=2)


def test_notes_and_title_are_on_the_page() -> None:
    root = ElementTree.fromstring(render(PANELS[:1], "a title", ["first", "second"]))
    assert root.findtext("head/title") == root.findtext("body/main/h1") == "a title"
    notes = [li.text for li in root.iter("li")]
    assert notes[-2:] == ["first", "second"]

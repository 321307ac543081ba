"""Draws step boundaries to scale: one self-contained HTML page, no script, nothing fetched.

Panels of one pair stand above each other on one time scale, with the end of a step on the device
at zero, so that the gap before the next step is compared by eye.  Every bar's width is its time
times the pair's scale, and nothing else; what is too short to see gets a pin beside the scale.
Takes boundaries and summaries as they are; measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

from stepahead.observe.books import REST, WORK, BookSummary, Stage
from stepahead.observe.timeline import Boundary


@dataclass(frozen=True)
class Panel:
    """One boundary to draw: what ran (`pair`, shared by the panels to compare), under which loop.

    `books` is of the whole run that the boundary was taken from.
    """

    pair: str
    loop: str
    boundary: Boundary
    books: BookSummary


# All lengths below are SVG user units: pixels at full size.
_WIDTH = 1120
_LEFT = 74  # lane names
_PLOT = _WIDTH - _LEFT - 8
_HEAD = 40  # loop name, then room for pins
_LANE = 34
_HOST_Y = _HEAD
_DEVICE_Y = _HOST_Y + _LANE + 8
_AXIS_Y = _DEVICE_Y + _LANE + 30  # the gap's label stands in between
_PANEL = _AXIS_Y + 32
_CHAR = 6.7  # widest average width of a letter at 12 px
_FADE = 26
_NARROW = 3.0  # a bar below this gets a pin
_MIN_SPAN_NS = 20_000
_NBSP = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class _Scale:
    """A pair's window in ns after the step's end, and where its times lie on the page."""

    from_ns: int
    to_ns: int

    @property
    def per_ns(self) -> float:
        return _PLOT / (self.to_ns - self.from_ns)

    def x(self, time_ns: float) -> float:
        return _LEFT + (time_ns - self.from_ns) * self.per_ns

    def clip(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """The part inside the window; empty (start >= end) when there is none."""
        return max(start_ns, self.from_ns), min(end_ns, self.to_ns)


def render(panels: Sequence[Panel], title: str, notes: Sequence[str]) -> str:
    """The page as text.  Panels of one pair stand together; the first of a pair is its reference.

    `title` and `notes` are plain text.  The page is well-formed XML too.
    """
    pairs = [list(group) for _, group in groupby(panels, key=lambda panel: panel.pair)]
    figures = "\n".join(_figure(pair) for pair in pairs)
    remarks = "".join(f"<li>{escape(note)}</li>" for note in (*_READING, *notes))
    return _PAGE.format(
        title=escape(title),
        style=_STYLE,
        legend=_legend(),
        figures=figures,
        table=_table(panels),
        remarks=remarks,
    )


# --- one pair ---------------------------------------------------------------------------------


def _figure(pair: Sequence[Panel]) -> str:
    scale = _scale(pair)
    drawn = "".join(
        f'<g class="panel" transform="translate(0 {row * _PANEL})">{_panel(panel, scale)}</g>'
        for row, panel in enumerate(pair)
    )
    label = escape(f"{pair[0].pair}: host and device around a step boundary", quote=True)
    return (
        f'<section><h2>{escape(pair[0].pair)}</h2><p class="says">{escape(_sentence(pair))}</p>'
        f'<div class="scroll"><svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{label}" viewBox="0 0 {_WIDTH} {len(pair) * _PANEL}">{_DEFS}{drawn}</svg>'
        "</div></section>"
    )


def _scale(pair: Sequence[Panel]) -> _Scale:
    """A window that holds, for each panel, the gap and the host's work after the step's end."""
    reach_ns = max(_reach_ns(panel.boundary) for panel in pair)
    reach_ns = max(reach_ns, _MIN_SPAN_NS)
    return _Scale(-(reach_ns * 3 // 10), reach_ns * 5 // 4)


def _reach_ns(boundary: Boundary) -> int:
    """Until when the host works on before it rests again, or until the gap ends, if later."""
    reach_ns = boundary.gap_ns
    started = False
    for span in boundary.host:
        if span.end_ns <= 0:
            continue
        started = started or span.stage in WORK
        if started and span.stage in REST:
            break
        reach_ns = max(reach_ns, span.end_ns if span.stage in WORK else 0)
    return reach_ns


def _sentence(pair: Sequence[Panel]) -> str:
    """What one sees, in words, from the numbers."""
    gaps = [f"{_time(panel.boundary.gap_ns)} under {panel.loop}{_why(panel)}" for panel in pair]
    said = f"Between two steps the device stands still for {', for '.join(gaps)}."
    for panel in pair[1:]:
        said += f" {_change(pair[0].boundary.gap_ns, panel.boundary.gap_ns)}"
        said += f" Over the whole run {panel.loop} hides {_percent(_share_hidden(panel.books))} of"
        said += f" the host's work behind the device, {pair[0].loop}"
        said += f" {_percent(_share_hidden(pair[0].books))}."
    return said


def _why(panel: Panel) -> str:
    """The causes that make up most of the gap, largest first, as ` (plan late 80 µs, …)`."""
    gap_ns = panel.boundary.gap_ns
    causes = sorted(panel.boundary.gap_idle_ns.items(), key=lambda item: -item[1])
    main = [f"{cause} {_time(ns)}" for cause, ns in causes if 20 * ns >= gap_ns > 0]
    return f" ({', '.join(main)})" if main else ""


def _change(before_ns: int, after_ns: int) -> str:
    if after_ns >= before_ns:
        return "The gap has not closed."
    return f"{_percent((before_ns - after_ns) / before_ns)} of the gap is gone."


def _share_hidden(books: BookSummary) -> float:
    work_ns = books.hidden_ns + books.exposed_ns
    return books.hidden_ns / work_ns if work_ns else 0.0


def _percent(share: float) -> str:
    """Rounded down, so that only all of it is 100 %."""
    percent = 100 * share
    return f"{math.floor(percent * 10) / 10:g}{_NBSP}%"


# --- one panel --------------------------------------------------------------------------------


def _panel(panel: Panel, scale: _Scale) -> str:
    boundary = panel.boundary
    parts = [
        _text(0, 14, panel.loop, "loop"),
        _text(_LEFT - 10, _HOST_Y + 22, "host", "lane end"),
        _text(_LEFT - 10, _DEVICE_Y + 22, "device", "lane end"),
        *_axis(boundary.step, scale),
        *_host(boundary, scale),
        *_device(boundary, scale),
        *_fades(boundary, scale),
        *_gap_label(boundary, scale),
    ]
    return "".join(parts)


def _host(boundary: Boundary, scale: _Scale) -> Iterator[str]:
    pins: list[tuple[float, Stage]] = []
    for span in boundary.host:
        start_ns, end_ns = scale.clip(span.start_ns, span.end_ns)
        if start_ns >= end_ns:
            continue
        name = _name(span.stage)
        whole = f"{name} {_time(span.end_ns - span.start_ns)}"
        yield _bar(scale, (start_ns, end_ns), _HOST_Y, f"stage {name}", f"host: {whole}")
        middle, width = scale.x((start_ns + end_ns) / 2), (end_ns - start_ns) * scale.per_ns
        yield _fit(middle, _HOST_Y + 21, width, (whole, name), f"on-{name}")
        if span.stage in WORK and width < _NARROW:
            pins.append((middle, span.stage))
    yield from _pins(pins)


def _pins(pins: Sequence[tuple[float, Stage]]) -> Iterator[str]:
    """A dot on a stalk for each bar too narrow to see; neighbours get stalks of other lengths."""
    last, level = -math.inf, 0
    for x, stage in pins:
        level = (level + 1) % 3 if x - last < 7 else 0
        last, top = x, _HOST_Y - 5 - 6 * level
        yield (
            f'<path class="stalk" d="M{x:.2f} {_HOST_Y}V{top}"/>'
            f'<circle class="stage {_name(stage)} pin" cx="{x:.2f}" cy="{top}" r="2.6"/>'
        )


def _device(boundary: Boundary, scale: _Scale) -> Iterator[str]:
    for span in boundary.device:
        start_ns, end_ns = scale.clip(span.start_ns, span.end_ns)
        if start_ns >= end_ns:
            continue
        step, ran = f"step {span.step}", _time(span.end_ns - span.start_ns)
        yield _bar(scale, (start_ns, end_ns), _DEVICE_Y, "busy", f"device: {step} ran {ran}")
        middle, width = scale.x((start_ns + end_ns) / 2), (end_ns - start_ns) * scale.per_ns
        labels = (f"{step} · {ran}", step)
        yield _fit(middle, _DEVICE_Y + 21, width - _FADE, labels, "on-busy")
    for before, after in pairwise(boundary.device):
        start_ns, end_ns = scale.clip(before.end_ns, after.start_ns)
        if start_ns < end_ns:
            tip = f"device idle {_time(after.start_ns - before.end_ns)}"
            yield _bar(scale, (start_ns, end_ns), _DEVICE_Y, "gap", tip)
        elif before.end_ns == after.start_ns:  # two runs without a gap would look like one
            yield f'<path class="seam" d="M{scale.x(before.end_ns):.3f} {_DEVICE_Y}v{_LANE}"/>'


def _gap_label(boundary: Boundary, scale: _Scale) -> Iterator[str]:
    """A bracket under the gap, as wide as the gap, and its length in words."""
    left, right = scale.x(0), scale.x(boundary.gap_ns)
    y = _DEVICE_Y + _LANE + 5
    words = f"device idle {_time(boundary.gap_ns)}"
    yield f'<path class="bracket" d="M{left:.2f} {y}v4H{right:.2f}v-4"/>'
    if right - left > len(words) * 7.5:
        yield _text((left + right) / 2, y + 19, words, "idle-word middle")
    else:
        yield _text(left + 6, y + 19, words, "idle-word")


def _fades(boundary: Boundary, scale: _Scale) -> Iterator[str]:
    """Where a lane goes on beyond the window, it fades out."""
    spans = (*boundary.host, *boundary.device)
    height = _DEVICE_Y + _LANE - _HOST_Y
    if min(span.start_ns for span in spans) < scale.from_ns:
        yield _rect(_LEFT, _HOST_Y, _FADE, height, 'fill="url(#fade-left)"')
    if max(span.end_ns for span in spans) > scale.to_ns:
        yield _rect(_LEFT + _PLOT - _FADE, _HOST_Y, _FADE, height, 'fill="url(#fade-right)"')


def _axis(step: int, scale: _Scale) -> Iterator[str]:
    unit, unit_ns = ("ms", 1_000_000) if scale.to_ns >= 4_000_000 else ("µs", 1_000)
    every = _tick_ns(scale.to_ns - scale.from_ns)
    yield f'<path class="axis" d="M{_LEFT} {_AXIS_Y}h{_PLOT}"/>'
    for time_ns in range(math.ceil(scale.from_ns / every) * every, scale.to_ns + 1, every):
        x = scale.x(time_ns)
        kind = "zero" if time_ns == 0 else "grid"
        yield f'<path class="{kind}" d="M{x:.2f} {_HOST_Y - 4}V{_AXIS_Y + 4}"/>'
        words = f"{time_ns / unit_ns:g}".replace("-", "−")
        words += f" {unit}" if time_ns else f": step {step} ends"
        if x + len(words) * 3 < _WIDTH:
            yield _text(x, _AXIS_Y + 17, words, f"tick {'strong ' if not time_ns else ''}middle")


def _tick_ns(span_ns: int) -> int:
    """A round distance of ticks that puts five to ten on the axis."""
    rough = span_ns / 10
    power = 10 ** math.floor(math.log10(rough))
    return int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough))


# --- the table --------------------------------------------------------------------------------


def _table(panels: Sequence[Panel]) -> str:
    rows: list[str] = []
    for pair, group in groupby(panels, key=lambda panel: panel.pair):
        rows.append(f'<tr class="pair"><th colspan="9" scope="rowgroup">{escape(pair)}</th></tr>')
        rows.extend(_table_row(panel) for panel in group)
    return "".join(rows)


def _table_row(panel: Panel) -> str:
    books, steps = panel.books, max(panel.books.steps, 1)
    lanes = (books.hidden_ns, books.exposed_ns, books.waiting_ns, books.busy_ns)
    idle_ns = books.wall_ns - books.busy_ns
    numbers = (
        f"{books.steps:,}",
        *(_micros(ns / steps) for ns in (books.wall_ns, *lanes, idle_ns)),
    )
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    causes = sorted(books.idle_ns.items(), key=lambda item: -item[1])
    why = ", ".join(f"{cause} {_micros(ns / steps)}" for cause, ns in causes if ns > idle_ns / 50)
    share = f"{books.device_idle_pct:.{1 if books.device_idle_pct >= 0.1 else 2}f}"
    return (
        f'<tr><th scope="row">{escape(panel.loop)}</th>{cells}'
        f'<td class="why"><b>{share}{_NBSP}%</b> {escape(why)}</td></tr>'
    )


def _micros(ns: float) -> str:
    return f"{ns / 1e3:,.0f}" if ns >= 10_000 else f"{ns / 1e3:,.1f}"


# --- small parts ------------------------------------------------------------------------------


def _time(ns: float) -> str:
    """Three digits and a unit: 640 ns, 21.3 µs, 213 µs, 6.02 ms, 104 ms."""
    for unit, unit_ns in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        value = ns / unit_ns
        if value >= 0.9995:
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:.{digits}f}{_NBSP}{unit}"
    return f"{ns:.0f}{_NBSP}ns"


def _name(stage: Stage) -> str:
    return stage.name.lower()


def _rect(x: float, y: float, width: float, height: float, rest: str) -> str:
    return f'<rect x="{x:.3f}" y="{y}" width="{width:.3f}" height="{height}" {rest}/>'


def _bar(scale: _Scale, ns: tuple[int, int], y: int, kind: str, tip: str) -> str:
    """A bar of exactly its time's width; its times stand in the markup too."""
    start_ns, end_ns = ns
    return (
        f'<rect class="{kind}" x="{scale.x(start_ns):.3f}" y="{y}" '
        f'width="{(end_ns - start_ns) * scale.per_ns:.3f}" height="{_LANE}" '
        f'data-start-ns="{start_ns}" data-end-ns="{end_ns}"><title>{escape(tip)}</title></rect>'
    )


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:.2f}" y="{y}" class="{kind}">{escape(words)}</text>'


def _fit(middle: float, y: float, width: float, labels: Iterable[str], kind: str) -> str:
    """The first of `labels` that fits in `width`, centred; nothing when none does."""
    words = next((label for label in labels if len(label) * _CHAR + 8 <= width), None)
    return _text(middle, y, words, f"{kind} middle") if words else ""


def _legend() -> str:
    names = {
        "plan": "plan",
        "launch": "launch",
        "encode": "encode",
        "decode": "decode",
        "retire": "retire",
        "deliver": "deliver",
        "mail": "requests and masks",
        "gc": "garbage collection",
        "wait": "wait (asleep)",
        "idle": "no step",
    }
    host = "".join(f'<li><i class="key {key}"></i>{name}</li>' for key, name in names.items())
    return (
        f'<ul class="legend"><li class="what">host</li>{host}'
        '<li class="what next">device</li><li><i class="key busy"></i>busy</li>'
        '<li><i class="key gap"></i>idle between steps</li></ul>'
    )


_READING = (
    "Time runs to the right; 0 is the moment a step ends on the device. The panels of a pair share "
    "one scale, pairs differ. Bars are exactly as wide as their time; a work stage too short to "
    "see has a pin in its colour, whose size means nothing. Bars that fade out go on.",
    "The boundary drawn is the one with the median gap among the run's steady steps.",
    "Table: µs per step over the whole run. Hidden + exposed + waiting = wall = busy + idle. "
    "Hidden is host work while the device is busy, exposed is host work while it is idle; the "
    "cause of idle time is what the host was at until it handed the next step over, and then where "
    "the step was.",
)

_DEFS = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="hatch-ground" width="7" height="7"/>'
    '<rect class="hatch-line" width="2.4" height="7"/></pattern>'
    '<linearGradient id="fade-left"><stop class="card" offset="0"/>'
    '<stop class="card clear" offset="1"/></linearGradient>'
    '<linearGradient id="fade-right"><stop class="card clear" offset="0"/>'
    '<stop class="card" offset="1"/></linearGradient></defs>'
)

_STYLE = """
:root { color-scheme: light dark; --page: #f4f5f7; --card: #ffffff; --ink: #1b2230;
  --soft: #5b6577; --line: #d9dde4; --grid: #e9ecf1; --busy: #3b4861; --on-busy: #ffffff;
  --plan: #2b6fdb; --launch: #8b54d1; --retire: #d98200; --deliver: #12936f; --wait: #e6e9ef;
  --encode: #b45fb8; --decode: #b0a000; --mail: #4f97a8; --gc: #7d4b2a;
  --on-bar: #ffffff; --idle: #cf2f26; --idle-ground: #fdeceb; }
@media (prefers-color-scheme: dark) { :root { --page: #11151c; --card: #1a2029; --ink: #e8ecf3;
  --soft: #9aa5b8; --line: #364051; --grid: #262e3a; --busy: #93a3c2; --on-busy: #11151c;
  --plan: #5b9bff; --launch: #b98cff; --retire: #f0a63a; --deliver: #3cc79c; --wait: #2b3341;
  --encode: #dc93e0; --decode: #d8ca3f; --mail: #7dc3d4; --gc: #b98a66;
  --on-bar: #11151c; --idle: #ff6f66; --idle-ground: #3a2023; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 28px 20px 40px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 12px; letter-spacing: -0.01em; }
h2 { font-size: 16px; margin: 0 0 2px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 20px 10px; margin: 14px 0; }
.says { margin: 0 0 12px; color: var(--soft); max-width: 110ch; }
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 860px; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; margin: 0; padding: 0;
  font-size: 13px; color: var(--soft); }
.legend .what { font-weight: 600; color: var(--ink); }
.legend .next { margin-left: 14px; }
.key { display: inline-block; width: 14px; height: 12px; margin-right: 6px; border-radius: 2px;
  vertical-align: -1px; }
.key.plan { background: var(--plan); } .key.launch { background: var(--launch); }
.key.retire { background: var(--retire); } .key.deliver { background: var(--deliver); }
.key.encode { background: var(--encode); } .key.decode { background: var(--decode); }
.key.mail { background: var(--mail); } .key.gc { background: var(--gc); }
.key.wait { background: var(--wait); box-shadow: inset 0 0 0 1px var(--line); }
.key.idle { box-shadow: inset 0 0 0 1px var(--line); } .key.busy { background: var(--busy); }
.key.gap { background: repeating-linear-gradient(135deg, var(--idle) 0 2px,
  var(--idle-ground) 2px 6px); }
svg text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
svg .loop { font-size: 15px; font-weight: 650; fill: var(--ink); }
svg .lane { font-weight: 600; fill: var(--ink); }
svg .strong { fill: var(--ink); font-weight: 600; }
.plan { fill: var(--plan); } .launch { fill: var(--launch); } .retire { fill: var(--retire); }
.encode { fill: var(--encode); } .decode { fill: var(--decode); }
.mail, .mask { fill: var(--mail); } .gc { fill: var(--gc); }
.deliver { fill: var(--deliver); } .wait { fill: var(--wait); } .idle { fill: none; }
.busy { fill: var(--busy); } .gap { fill: url(#hatch); }
.hatch-ground { fill: var(--idle-ground); } .hatch-line { fill: var(--idle); }
svg .on-plan, svg .on-launch, svg .on-encode, svg .on-decode, svg .on-retire, svg .on-deliver,
svg .on-mail, svg .on-mask, svg .on-gc { fill: var(--on-bar);
  font-weight: 600; }
svg .on-wait, svg .on-idle { fill: var(--soft); }
svg .on-busy { fill: var(--on-busy); font-weight: 600; }
svg .idle-word { fill: var(--idle); font-size: 13px; font-weight: 700; }
.bracket { fill: none; stroke: var(--idle); stroke-width: 1.5; }
.seam { stroke: var(--card); }
.axis { stroke: var(--line); } .grid { stroke: var(--grid); } .stalk { stroke: var(--soft); }
.zero { stroke: var(--soft); stroke-dasharray: 3 3; }
.card { stop-color: var(--card); } .clear { stop-opacity: 0; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: right; white-space: nowrap; }
thead th { color: var(--soft); font-weight: 600; padding-bottom: 3px; }
thead .band { text-align: center; color: var(--ink); padding: 0; }
thead .band span { display: block; margin: 0 10px; border-bottom: 1px solid var(--line); }
tbody tr:first-child th { border-top: 1px solid var(--line); }
th[scope="row"], .pair th, .why, thead .left { text-align: left; }
.pair th { padding-top: 12px; color: var(--soft); font-weight: 600; }
.why { white-space: normal; color: var(--soft); } .why b { color: var(--ink); }
.notes { font-size: 13px; color: var(--soft); padding-left: 18px; max-width: 125ch; }
.notes li { margin: 3px 0; }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title><style>{style}</style></head>
<body><main><h1>{title}</h1>{legend}
{figures}
<section><h2>The two books, µs per step</h2><div class="scroll"><table><thead>
<tr><th colspan="3"></th><th class="band" colspan="3"><span>host</span></th>
<th class="band" colspan="3"><span>device</span></th></tr>
<tr><th class="left">loop</th><th>steps</th><th>wall</th><th>hidden</th><th>exposed</th>
<th>waiting</th><th>busy</th><th>idle</th><th class="left">idle share, by cause (µs)</th></tr>
</thead><tbody>{table}</tbody></table></div></section>
<ul class="notes">{remarks}</ul></main></body></html>
"""

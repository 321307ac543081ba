"""Plain SVG pictures for the documents: lines and points, bars, lanes.  Knows no engine.

Every length on the page is a number times the picture's scale, so the pictures can be read off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

INK, GRID, PALE = "#24292f", "#d8dee4", "#6e7781"
COLOURS = ("#cf222e", "#0969da", "#1a7f37", "#9a6700", "#8250df")
_PANEL_W, _PANEL_H, _LEFT, _TOP, _GAP, _FOOT = 250, 210, 52, 46, 58, 74
_LANE, _LANE_GAP = 20, 4
FILLS = {
    "plan": "#54aeff",
    "retire": "#0969da",
    "forward": "#2da44e",
    "launch": "#8250df",
    "deliver": "#1b7c83",
    "waits": "#eaeef2",
    "idle": "#ff8182",
}


@dataclass(frozen=True)
class Panel:
    """One diagram: lines and points by the series' name, values as (x, y)."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    points: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Bar:
    """Something that takes from `start` to `end`."""

    label: str
    start: float
    end: float
    kind: str


def diagrams(panels: Sequence[Panel], x_name: str, y_name: str, note: str) -> str:
    """Panels side by side on one pair of scales that begin at zero."""
    values = [
        value
        for panel in panels
        for series in (*panel.lines.values(), *panel.points.values())
        for value in series
    ]
    x_top, y_top = (_ceiling(max(value[axis] for value in values)) for axis in (0, 1))
    names = list(dict.fromkeys(n for panel in panels for n in (*panel.lines, *panel.points)))
    parts = [
        _panel(panel, _LEFT + i * (_PANEL_W + _GAP), (x_top, y_top), names, x_name)
        for i, panel in enumerate(panels)
    ]
    parts.append(_text(8, 18, y_name, PALE))
    width = _LEFT + len(panels) * (_PANEL_W + _GAP) - _GAP + 20
    foot = _TOP + _PANEL_H + 58
    for i, name in enumerate(names):
        x = _LEFT + i * 150
        parts.append(f'<rect x="{x}" y="{foot - 9}" width="16" height="4" fill="{_colour(i)}"/>')
        parts.append(_text(x + 22, foot - 3, name))
    parts.append(_text(_LEFT, foot + 18, note, PALE))
    return _page(max(width, _LEFT + len(names) * 150), _TOP + _PANEL_H + _FOOT + 16, parts)


def _panel(
    panel: Panel, left: float, tops: tuple[float, float], names: list[str], x_name: str
) -> str:
    x_top, y_top = tops
    bottom = _TOP + _PANEL_H

    def at(value: tuple[float, float]) -> tuple[float, float]:
        return left + value[0] / x_top * _PANEL_W, bottom - value[1] / y_top * _PANEL_H

    parts = [_text(left, _TOP - 10, panel.title, INK, bold=True)]
    for i in range(6):
        x, y = at((x_top * i / 5, y_top * i / 5))
        parts.append(_line(left, y, left + _PANEL_W, y, GRID))
        parts.append(_text(left - 6, y + 4, f"{y_top * i / 5:g}", PALE, anchor="end"))
        parts.append(_line(x, bottom, x, bottom + 4, PALE))
        parts.append(_text(x, bottom + 17, f"{x_top * i / 5:g}", PALE, anchor="middle"))
    parts.append(_text(left + _PANEL_W / 2, bottom + 34, x_name, PALE, anchor="middle"))
    for name, series in panel.lines.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, series))
        stroke = _colour(names.index(name))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="1.8"/>'
        )
    for name, series in panel.points.items():
        colour = _colour(names.index(name))
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.75"/>'
            for x, y in map(at, series)
        ]
    return "".join(parts)


@dataclass(frozen=True)
class Curves:
    """One diagram with scales of its own: lines by the series' name, values as (x, y).

    `x` and `y` are (lowest, highest) on the scales, drawn in fifths.
    """

    title: str
    x_name: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    x: tuple[float, float]
    y: tuple[float, float]


def curves(panels: Sequence[Curves], y_name: str, note: str) -> str:
    """Panels side by side, each on its own scales."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    lefts = [_LEFT + i * (_PANEL_W + _GAP) for i in range(len(panels))]
    parts = [_own_panel(*pair, names) for pair in zip(panels, lefts, strict=True)]
    parts.append(_text(8, 18, y_name, PALE))
    foot = _TOP + _PANEL_H + 58
    for i, name in enumerate(names):
        x = _LEFT + i * 150
        parts.append(f'<rect x="{x}" y="{foot - 9}" width="16" height="4" fill="{_colour(i)}"/>')
        parts.append(_text(x + 22, foot - 3, name))
    parts.append(_text(_LEFT, foot + 18, note, PALE))
    width = _LEFT + len(panels) * (_PANEL_W + _GAP) - _GAP + 20
    return _page(max(width, _LEFT + len(note) * 6), _TOP + _PANEL_H + _FOOT + 16, parts)


def _own_panel(panel: Curves, left: float, names: list[str]) -> str:
    bottom = _TOP + _PANEL_H
    (x_low, x_high), (y_low, y_high) = panel.x, panel.y

    def at(value: tuple[float, float]) -> tuple[float, float]:
        x = min(max(value[0], x_low), x_high)
        return (
            left + (x - x_low) / (x_high - x_low) * _PANEL_W,
            bottom - (value[1] - y_low) / (y_high - y_low) * _PANEL_H,
        )

    parts = [_text(left, _TOP - 10, panel.title, INK, bold=True)]
    for i in range(6):
        values = x_low + (x_high - x_low) * i / 5, y_low + (y_high - y_low) * i / 5
        x, y = at(values)
        parts.append(_line(left, y, left + _PANEL_W, y, GRID))
        parts.append(_text(left - 6, y + 4, f"{values[1]:.4g}", PALE, anchor="end"))
        parts.append(_line(x, bottom, x, bottom + 4, PALE))
        parts.append(_text(x, bottom + 17, f"{values[0]:.4g}", PALE, anchor="middle"))
    parts.append(_text(left + _PANEL_W / 2, bottom + 34, panel.x_name, PALE, anchor="middle"))
    for name, series in panel.lines.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, series))
        stroke = _colour(names.index(name))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="1.8"/>'
        )
    return "".join(parts)


def bars(groups: Mapping[str, Mapping[str, float]], floor: float, note: str) -> str:
    """Groups of horizontal bars, each with its value; `floor` is drawn as a line."""
    names = list(next(iter(groups.values())))
    top = _ceiling(max(value for group in groups.values() for value in group.values()))
    left, width, line = 300, 420, 15
    parts: list[str] = []
    y = 34.0
    for title, group in groups.items():
        parts.append(_text(left - 12, y + line * (len(names) / 2) + 1, title, anchor="end"))
        for i, (name, value) in enumerate(group.items()):
            long = value / top * width
            parts.append(
                f'<rect x="{left}" y="{y + i * line:.1f}" width="{long:.1f}" height="{line - 3}" '
                f'fill="{_colour(names.index(name))}"/>'
            )
            parts.append(_text(left + long + 6, y + i * line + 10, f"{value:.2f}", PALE))
        y += len(names) * line + 12
    x = left + floor / top * width
    parts.append(_line(x, 22, x, y - 8, INK, dash=True))
    parts.append(_text(x, 16, f"{floor:g} ms", anchor="middle"))
    for i, name in enumerate(names):
        at = left - 280 + i * 140
        parts.append(f'<rect x="{at}" y="{y + 6}" width="12" height="10" fill="{_colour(i)}"/>')
        parts.append(_text(at + 18, y + 15, name))
    parts.append(_text(20, y + 38, note, PALE))
    return _page(left + width + 70, y + 52, parts)


def lanes(
    rows: Mapping[str, Mapping[str, Sequence[Bar]]], until: float, unit: str, note: str
) -> str:
    """Each row's lanes under each other on one scale of time, cut off at `until`."""
    left, width = 172, 860
    used = {
        bar.kind for group in rows.values() for bars_here in group.values() for bar in bars_here
    }
    fills = {kind: fill for kind, fill in FILLS.items() if kind in used}
    count = sum(len(group) for group in rows.values())
    bottom = 16.0 + count * (_LANE + _LANE_GAP) + len(rows) * 14
    parts: list[str] = []
    for i in range(9):
        x = left + i / 8 * width
        parts.append(_line(x, 10, x, bottom, GRID))
        parts.append(_text(x, bottom + 14, f"{until * i / 8:g}", PALE, anchor="middle"))
    parts.append(_text(left + width + 14, bottom + 14, unit, PALE))
    y = 16.0
    for title, group in rows.items():
        parts.append(_text(8, y + _LANE + 4, title, bold=True))
        for name, bars_here in group.items():
            parts.append(_text(left - 8, y + 14, name, PALE, anchor="end"))
            parts.append(_line(left, y + _LANE, left + width, y + _LANE, GRID))
            for bar in bars_here:
                start, end = (min(value, until) / until * width for value in (bar.start, bar.end))
                if end > start:
                    parts.append(_bar(left + start, y, end - start, fills[bar.kind], bar.label))
            y += _LANE + _LANE_GAP
        y += 14
    for i, (kind, fill) in enumerate(fills.items()):
        x = left + i * 110
        parts.append(f'<rect x="{x}" y="{y + 26}" width="12" height="10" fill="{fill}"/>')
        parts.append(_text(x + 18, y + 35, kind))
    # beside the legend, or below it where that is long
    beside = len(fills) <= 3
    parts.append(_text(left + 350 if beside else left, y + 35 + (0 if beside else 22), note, PALE))
    return _page(left + width + 40, y + (48 if beside else 70), parts)


def _bar(x: float, y: float, width: float, fill: str, label: str) -> str:
    shape = (
        f'<rect x="{x:.1f}" y="{y + 1:.1f}" width="{width:.1f}" height="{_LANE - 2}" '
        f'fill="{fill}" stroke="white" stroke-width="0.8"/>'
    )
    if width < 14:
        return shape
    return shape + _text(x + width / 2, y + 14, label, "white", anchor="middle")


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _ceiling(value: float) -> float:
    """A round number not below `value`, of which a fifth is round too."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * step for step in (1, 1.5, 2, 2.5, 3, 4, 5, 10) if unit * step >= value)


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, dash: bool = False) -> str:
    dashes = ' stroke-dasharray="4 3"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{dashes}/>'
    )


def _text(
    x: float, y: float, words: str, fill: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}"{weight}>'
        f"{escape(words)}</text>"
    )


def _page(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="system-ui, sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )

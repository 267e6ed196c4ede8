"""Small line charts as inline SVG: what the reports need, and nothing to install for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 45

COLOURS = ["#1f6fb4", "#c2571a", "#2b8a3e", "#7a4fb5", "#b8236b", "#5c6770"]


@dataclass(frozen=True)
class Series:
    """One line, as points in ascending x."""

    name: str
    points: list[tuple[float, float]]
    step: bool = False
    """Whether a value holds until the next point, as a count does."""


@dataclass(frozen=True)
class Marker:
    """A vertical line at an event."""

    x: float
    name: str


def line_chart(
    title: str, x_label: str, y_label: str, series: list[Series], markers: list[Marker] = (), from_zero: bool = True
) -> str:
    """An `<svg>` element. The y axis has its zero, or begins where the values do."""
    xs = [x for line in series for x, _ in line.points] + [marker.x for marker in markers]
    ys = [y for line in series for _, y in line.points]
    if not xs or not ys:
        return f"<p>{escape(title)}: nothing was measured.</p>"
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(min(ys + [0] * from_zero), max(ys))

    def at_x(x: float) -> float:
        return LEFT + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="12">',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for y in y_ticks:
        parts.append(f'<path d="M{LEFT} {at_y(y):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at_y(y) + 4:.1f}" text-anchor="end">{_number(y)}</text>')
    for x in x_ticks:
        parts.append(f'<path d="M{at_x(x):.1f} {HEIGHT - BOTTOM}v5" stroke="#333"/>')
        parts.append(f'<text x="{at_x(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_number(x)}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" stroke="#333" fill="none"/>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(y_label)}</text>'
    )
    for number, marker in enumerate(markers):
        x, y = at_x(marker.x), TOP + 10 + 14 * number  # one below the other: events come close together
        words = f'x="{x + 4:.1f}"' if x < WIDTH - 150 else f'x="{x - 4:.1f}" text-anchor="end"'
        parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#900" stroke-dasharray="4 3"/>')
        parts.append(f'<text {words} y="{y}" fill="#900">{escape(marker.name)}</text>')
    for number, line in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(
            f'<path d="{_path(line, at_x, at_y)}" stroke="{colour}" stroke-width="1.8" fill="none" '
            f'stroke-linejoin="round"/>'
        )
        y = TOP + 16 * number + 26
        parts.append(f'<path d="M{LEFT + 12} {y - 4}h22" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{LEFT + 40}" y="{y}">{escape(line.name)}</text>')
    return "\n".join(parts) + "\n</svg>"


def _path(line: Series, at_x, at_y) -> str:
    if not line.points:
        return ""
    x, y = line.points[0]
    words = [f"M{at_x(x):.1f} {at_y(y):.1f}"]
    for x, y in line.points[1:]:
        words.append(f"H{at_x(x):.1f}V{at_y(y):.1f}" if line.step else f"L{at_x(x):.1f} {at_y(y):.1f}")
    return "".join(words)


def _ticks(low: float, high: float) -> list[float]:
    """About six round numbers that enclose the range."""
    if high <= low:
        high = low + 1
    rough = (high - low) / 6
    size = 10 ** math.floor(math.log10(rough))
    size *= next(factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first, last = math.floor(low / size), math.ceil(high / size)
    return [n * size for n in range(first, last + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:g}"

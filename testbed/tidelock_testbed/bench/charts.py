"""Bars beside bars, as SVG: what line charts cannot show."""

from __future__ import annotations

from html import escape

from ..svg import COLOURS

WIDTH, ROW, GAP, LEFT, TOP = 860, 15, 12, 300, 70


def bar_chart(title: str, unit: str, names: list[str], groups: list[tuple[str, list[tuple[float, str]]]]) -> str:
    """Horizontal bars: one group for each label, one bar in it for each name, with the text at its end."""
    most = max((value for _, bars in groups for value, _ in bars), default=0) or 1
    height = TOP + sum(len(bars) * ROW + GAP for _, bars in groups) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="10" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="10" y="36" fill="#555">{escape(unit)}</text>',
    ]
    for number, name in enumerate(names):
        x = 10 + number * 165
        parts.append(f'<rect x="{x}" y="46" width="10" height="10" fill="{_colour(number)}"/>')
        parts.append(f'<text x="{x + 15}" y="55">{escape(name)}</text>')
    y = TOP
    for label, bars in groups:
        middle = y + len(bars) * ROW / 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(label)}</text>')
        for number, (value, text) in enumerate(bars):
            width = value / most * (WIDTH - LEFT - 150)
            parts.append(
                f'<rect x="{LEFT}" y="{y + 1}" width="{width:.1f}" height="{ROW - 2}" fill="{_colour(number)}"/>'
            )
            parts.append(f'<text x="{LEFT + width + 5:.1f}" y="{y + ROW - 4}" font-size="11">{escape(text)}</text>')
            y += ROW
        y += GAP
    return "\n".join(parts) + "\n</svg>"


def on_white(svg: str) -> str:
    """The same chart with a background of its own: a reader's page may be dark."""
    head, end, rest = svg.partition(">")
    return f'{head}{end}<rect width="100%" height="100%" fill="#fff"/>{rest}' if end else svg


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]

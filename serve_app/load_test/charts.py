"""Distributions as histograms of block characters, and as SVG files of cumulative shares."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

import numpy as np

_BLOCKS = " ▏▎▍▌▋▊▉█"
_BINS = 10
_BAR_CELLS = 40
# Sizes of a panel of an SVG file in pixels: the plot, and the margins for labels.
_PLOT = (260, 180)
_MARGIN = (50, 40)
_MOST_POINTS = 200
_TICKS = 4


def seconds(value: float) -> str:
    """Such as "1.234 s", "56.7 ms"."""
    return f"{value:.3f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def histogram(values: Sequence[float]) -> list[str]:
    """Lines with the lower bound, a bar and the count of each bin, for at least one value. The bins
    are equally wide; the last one has all values from the 99th percentile upwards."""
    low, high = min(values), float(np.percentile(values, 99))
    edges = [low + (high - low) * i / _BINS for i in range(_BINS)] if high > low else [low]
    indices = np.searchsorted(edges, values, side="right") - 1
    counts = np.bincount(indices, minlength=len(edges)).tolist()
    widest = max(len(seconds(edge)) for edge in edges)
    return [
        f"{seconds(edge):>{widest}} {_bar(count / max(counts)):<{_BAR_CELLS}} {count}"
        for edge, count in zip(edges, counts, strict=True)
    ]


def cumulative_svg(title: str, panels: Mapping[str, Sequence[float]]) -> str:
    """An SVG file with one panel for each distribution of seconds: the share of values that are at
    most x."""
    width = len(panels) * (_PLOT[0] + _MARGIN[0]) + _MARGIN[0]
    height = _PLOT[1] + 3 * _MARGIN[1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_MARGIN[0]}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for index, (name, values) in enumerate(panels.items()):
        left = _MARGIN[0] + index * (_PLOT[0] + _MARGIN[0])
        parts.append(
            f'<g transform="translate({left} {2 * _MARGIN[1]})">{_panel(name, values)}</g>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _bar(share: float) -> str:
    eighths = round(share * _BAR_CELLS * 8)
    full, rest = divmod(max(eighths, 1 if share else 0), 8)
    return "█" * full + _BLOCKS[rest].strip()


def _panel(name: str, values: Sequence[float]) -> str:
    width, height = _PLOT
    most = max(values) or 1.0
    shares = np.linspace(0, 1, min(_MOST_POINTS, len(values) + 1))
    points = zip(np.quantile(values, shares).tolist(), shares.tolist(), strict=True)
    line = " ".join(f"{width * x / most:.1f},{height * (1 - y):.1f}" for x, y in points)
    parts = [f'<text y="-8" font-weight="bold">{escape(name)}</text>']
    for tick in range(_TICKS + 1):
        share = tick / _TICKS
        x, y = width * share, height * (1 - share)
        parts += [
            f'<path d="M0 {y:.1f}H{width}" stroke="#ddd"/>',
            f'<text x="-4" y="{y + 4:.1f}" text-anchor="end">{100 * share:.0f}%</text>',
            f'<text x="{x:.1f}" y="{height + 16}" text-anchor="middle">'
            f"{seconds(most * share)}</text>",
        ]
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="2"/>')
    return "".join(parts)

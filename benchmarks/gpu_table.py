"""What `gpu_check.py` prints: one page, goals beside what was reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

GOALS = {"read_share": 0.80, "overhead": 0.03, "waits": 1.0}
"""What the reference rig should reach."""


def table(found: Mapping[str, Any]) -> str:
    """Everything on one page; goals beside what was reached."""
    versions, same = found["stack"], found["equality"]
    ended = {name: figures for name, figures in found["engines"].items() if "ms_a_token" in figures}
    lines = [
        f"{versions['device']}; torch {versions['torch']}, CUDA {versions.get('cuda')}, "
        f"driver {versions.get('driver')}, transformers {versions['transformers']}, dfbench {versions['dfbench']}",
        f"random weights, {found['model']['parameters'] / 1e9:.2f} billion in {found['model']['dtype']}; "
        f"{found['seconds']:.0f} s in all",
        f"float32: {same['compared'] - len(same['unequal'])} of {same['compared']} runs give the "
        f"{same['tokens']} tokens of AR ({same['distinct']} distinct)"
        + "".join(f"; UNEQUAL: {name}" for name in same["unequal"]),
        "",
        _row("", ended),
    ]
    for title, value in ROWS:
        lines.append(_row(title, [value(figures) for figures in ended.values()]))
    widths = sorted({int(width) for figures in ended.values() for width in figures["verify_cost"]})
    for width in widths:
        cells = [_cost(figures["verify_cost"].get(str(width))) for figures in ended.values()]
        lines.append(_row(f"pass of {width} queries", cells))
    for name, figures in found["engines"].items():
        if name not in ended:
            lines.append(f"{name}: not measured ({figures.get('skipped') or figures.get('failed')})")
    return "\n".join(lines)


ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("AR, ms a token", lambda f: f"{f['ms_a_token']:.2f}"),
    ("memory is read at, GB/s", lambda f: f"{f['read_gb_s']:.0f}"),
    ("share of read bandwidth (≥ 0.80)", lambda f: _judged(f["read_share"], GOALS["read_share"], ".2f", least=True)),
    ("harness overhead a step (≤ 3 %)", lambda f: _judged(f["overhead"], GOALS["overhead"], ".1%")),
    ("host-device waits a step, AR (1)", lambda f: _judged(f["waits"]["AR"], GOALS["waits"], ".2f")),
    ("host-device waits a step, trees", lambda f: _judged(f["waits"]["trees"], GOALS["waits"], ".2f")),
    ("forward time ÷ step time", lambda f: f"{f['clocks']['forwards']:.3f}"),
    ("step times ÷ wall clock", lambda f: f"{f['clocks']['steps']:.3f}"),
    ("peak memory, GB", lambda f: "–" if f["peak_bytes"] is None else f"{f['peak_bytes'] / 1e9:.1f}"),
    ("static buffers, GB", lambda f: _built(f, "static_bytes", 1e9, ".2f")),
    (
        "graphs, and seconds to record them",
        lambda f: f"{_built(f, 'graphs', 1, 'd')}, {_built(f, 'capture_s', 1, '.1f')}",
    ),
)


def _judged(value: float | None, goal: float, form: str, *, least: bool = False) -> str:
    if value is None:
        return "–"
    reached = value >= goal if least else value <= goal
    return f"{value:{form}} {'reached' if reached else 'missed'}"


def _built(figures: Mapping[str, Any], name: str, unit: float, form: str) -> str:
    value = figures["built"].get(name)
    return "–" if value is None else format(value if form == "d" else value / unit, form)


def _cost(point: Mapping[str, float] | None) -> str:
    return "–" if point is None else f"{point['ms']:.2f} ms  × {point['ratio']:.2f}"


def _row(title: str, cells: Any) -> str:
    return f"{title:36s}" + "".join(f"{cell:>26s}" for cell in cells)

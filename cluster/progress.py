"""How far a run is, for people: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.progress import Task as Bar
from rich.text import Text

from dfbench.cluster.driver import OnProgress
from dfbench.cluster.driver import Progress as Standing

PLAIN_EVERY_S = 10.0
"""Seconds between two plain lines, where anything has changed."""


def duration(seconds: float | None) -> str:
    """`0:42`, `12:05` or `3:07:00`; a dash where it is not known."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rate(jobs_per_s: float) -> str:
    """Jobs a second, or a minute where that says more."""
    return f"{jobs_per_s:.1f} jobs/s" if jobs_per_s >= 1 else f"{jobs_per_s * 60:.1f} jobs/min"


def line(now: Standing) -> str:
    """One plain line: done of all, failed, rate, time left, workers; before a first job, what comes before it."""
    counts = now.counts
    failed = f", {counts.failed} failed" if counts.failed else ""
    done = f"{counts.done}/{counts.total} jobs done{failed}"
    if counts.done + counts.failed == counts.total:
        return done
    if not now.workers:
        return f"{done}; {_coming(now)}"
    if now.eta_s is None:
        return f"{done}; {_workers(now.workers)} warming up" + " and measuring what a pass costs" * now.measures
    return f"{done}, {rate(now.rate)}, {duration(now.eta_s)} left, {_workers(now.workers)}"


def _coming(now: Standing) -> str:
    """What there is before the first worker."""
    if now.loading:
        return f"{_workers(now.loading)} loading the target"
    return "waiting for a device that others use" if now.waiting else "waiting for a device"


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


@contextmanager
def shown(console: Console) -> Iterator[OnProgress]:
    """A callback for the driver that shows progress on this console while the context lasts."""
    if not console.is_terminal:
        yield _plain(console)
        return
    with Progress(
        TextColumn("[bold]{task.description}"), BarColumn(), _Standing(), console=console, transient=False
    ) as bars:
        bar = bars.add_task("jobs", total=None)

        def show(now: Standing) -> None:
            bars.update(bar, total=now.counts.total, completed=now.counts.done + now.counts.failed, standing=line(now))

        yield show


class _Standing(TextColumn):
    """The plain line beside the bar."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Bar) -> Text:
        return Text(str(task.fields.get("standing", "starting Ray")))


def _plain(console: Console) -> OnProgress:
    last_text, last_at = "", float("-inf")

    def show(now: Standing) -> None:
        nonlocal last_text, last_at
        text, at = line(now), time.monotonic()
        settled = now.counts.done + now.counts.failed == now.counts.total
        if text != last_text and (settled or at - last_at >= PLAIN_EVERY_S):
            console.print(text, highlight=False, markup=False, soft_wrap=True)
            last_text, last_at = text, at

    return show

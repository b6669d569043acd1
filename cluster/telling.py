"""What a driver tells: people through callbacks, the run through its log. Nothing a run depends on happens here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from dfbench.cluster.events import Events
from dfbench.cluster.ledger_schema import Counts
from dfbench.cluster.pool import Member
from dfbench.workers.parts import Part

REPORT_EVERY_S = 0.5


class Progress(NamedTuple):
    """Where a run stands: jobs by state, jobs a second, seconds left (None before anything is known), workers.

    `waiting`: workers whose device is in use by others. `measures`: workers measure first what a pass costs.
    """

    counts: Counts
    rate: float
    eta_s: float | None
    elapsed_s: float
    workers: int
    loading: int
    in_flight: int
    waiting: int = 0
    measures: bool = True


class Result(NamedTuple):
    """How a driver left its run: the ledger's state, the jobs' states, and what was worth telling on the way."""

    state: str
    counts: Counts
    notes: list[str]


OnProgress = Callable[[Progress], None]
OnFiles = Callable[[Path], None]
OnNote = Callable[[str], None]


class Teller:
    """Passes on notes, progress and events. `settled` are the jobs that this driver saw end, done or failed."""

    def __init__(
        self,
        run_dir: Path,
        on_progress: OnProgress | None,
        on_files: OnFiles | None,
        on_note: OnNote | None,
        *,
        measures: bool,
    ) -> None:
        self._run_dir, self._measures = run_dir, measures
        self._on_progress, self._on_files, self._on_note = on_progress, on_files, on_note
        self._began, self._reported = time.monotonic(), float("-inf")
        self.events = Events(run_dir)
        self.notes: list[str] = []
        self.settled = 0

    def note(self, text: str) -> None:
        """A sentence that a person should read."""
        self.notes.append(text)
        self.events.event("note", text=text)
        if self._on_note is not None:
            self._on_note(text)

    def files_changed(self) -> None:
        if self._on_files is not None:
            self._on_files(self._run_dir)

    def part(self, member: Member, part: Part) -> None:
        """Records of a shard have come in."""
        for outcome in part.outcomes:
            if outcome.kind:
                self.events.event(
                    "job failed", shard=part.shard_id, job=outcome.job_id, kind=outcome.kind, node=member.node
                )
        self.events.shard(part.shard_id, "\n".join(_lines(member, part)))

    def progress(self, counts: Counts, members: list[Member], *, force: bool = False) -> None:
        """Say how far the run is, if somebody listens and nothing was said just now."""
        now = time.monotonic()
        if self._on_progress is None or not (force or now - self._reported >= REPORT_EVERY_S):
            return
        self._reported = now
        elapsed = now - self._began
        rate = self.settled / max(elapsed, 1e-9)
        loading = sum(member.loading is not None for member in members)
        waiting = sum(member.waiting for member in members)
        if loading == len(members) and not self.settled:
            self._began = now  # Nobody could work yet: that says nothing about how fast it goes.
            elapsed = 0.0
        in_flight = sum(member.shard is not None for member in members)
        eta = counts.pending / rate if rate > 0 else None
        there = len(members) - loading
        who = (there, loading - waiting, in_flight, waiting)
        self._on_progress(Progress(counts, rate, eta, elapsed, *who, self._measures))


def _lines(member: Member, part: Part) -> Iterator[str]:
    yield f"attempt {part.attempt} on {member.worker_id} ({member.node}): {len(part.outcomes)} jobs"
    for outcome in part.outcomes:
        if outcome.kind:
            yield f"  {outcome.job_id} ({outcome.arm}) {outcome.kind}: {outcome.message}"

"""Run directories: where a new one goes, which one a sweep goes on in, and writing the plan into it."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dfbench.cluster import run_place
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.ledger_schema import LEDGER_FILE
from dfbench.cluster.plan import Plan
from dfbench.cluster.runspec import PROMPTS_FILE, write_prompts
from dfbench.errors import DfbenchError, RunError

RUNS = Path("runs")
LATEST = "latest"
SWEEP_FILE = "sweep.yaml"
SHARDS_PART = ".shards.part"
"""A replay's shards, until its ledger has them."""
_PARTS = {f".{PROMPTS_FILE}.part", f".{LEDGER_FILE}.part", SHARDS_PART}
_LEFTOVERS = {SWEEP_FILE, PROMPTS_FILE, run_place.LOCK_FILE, *_PARTS}
"""What a submit that was stopped before its plan was complete may have left in a run directory."""


@dataclass(frozen=True)
class Place:
    """Where a sweep runs: a directory, and whether the run in it goes on (else it is new)."""

    run_dir: Path
    resumed: bool


def place(plan: Plan, run: Path | None = None, *, new: bool = False, runs: Path = RUNS) -> Place:
    """The directory for this plan: the one named, else that of its newest unfinished run, else a new one.

    Raises RunError where the directory cannot hold it. Writes nothing.
    """
    if run is not None:
        return _named(plan, run, new)
    if not new and (unfinished := find_unfinished(plan.sha, runs)) is not None:
        run_place.require_usable(unfinished)
        return Place(unfinished, resumed=True)
    fresh = new_dir(plan.sweep.name, runs)
    run_place.require_usable(fresh)
    return Place(fresh, resumed=False)


def _named(plan: Plan, run: Path, new: bool) -> Place:
    run_place.require_usable(run)
    outer = next((folder for folder in run.resolve().parents if run_place.exists(folder)), None)
    if outer is not None:
        raise RunError(f"{run} is inside the run {outer}: name a directory outside of it with --run.")
    if run_place.exists(run):
        if new:
            raise RunError(f"{run} already holds a run: with --new, name another --run or leave it out.")
        with Ledger.open(run, readonly=True) as there:
            if there.run.sweep_sha != plan.sha:
                raise RunError(
                    f"{run} holds a run of another sweep ('{there.run.sweep}', or other settings, prompts or versions"
                    " of it): name another --run, or leave it out."
                )
        return Place(run, resumed=True)
    if run.is_dir() and any(entry.name not in _LEFTOVERS for entry in run.iterdir()):
        raise RunError(f"{run} is not empty and holds no run: name a new or empty directory with --run.")
    return Place(run, resumed=False)


def find_unfinished(sweep_sha: str, runs: Path = RUNS) -> Path | None:
    """The newest run of this very sweep under `runs` that has work left; cancelled ones count."""
    found: list[tuple[str, Path]] = []
    for path in sorted(runs.glob(f"*/{LEDGER_FILE}")):
        if path.parent.is_symlink():
            continue
        try:
            with Ledger.open(path.parent, readonly=True) as there:
                counts = there.counts()
                if there.run.sweep_sha == sweep_sha and counts.done < counts.total:
                    found.append((there.meta("created_at"), path.parent))
        except (DfbenchError, sqlite3.Error):
            continue  # Not a run that could go on; it is no business of this sweep.
    return max(found)[1] if found else None


def new_dir(name: str, runs: Path = RUNS) -> Path:
    """A directory that does not exist yet: the sweep's name and the time, in UTC."""
    base = runs / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    path, number = base, 2
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path


def create(run_dir: Path, plan: Plan) -> None:
    """Write a plan into a run directory: effective sweep, prompts, and last the ledger, which makes it a run.

    Raises RunError where another process writes there at this moment.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with run_place.driver_lock(run_dir):
            if run_place.exists(run_dir):
                raise RunError(f"{run_dir} was taken by another submit just now: give the command again.")
            (run_dir / SWEEP_FILE).write_text(plan.sweep.to_yaml(), encoding="utf-8")
            write_prompts(run_dir, plan.prompts(), plan.warmups())
            Ledger.create(run_dir, plan.run_spec(run_dir.resolve().name), plan.shards()).close()
    except OSError as error:
        raise RunError(f"the run cannot be written to {run_dir}: {error.strerror or error}.") from error


def point_latest(run_dir: Path, runs: Path = RUNS) -> None:
    """Let `runs/latest` lead to this run, where it is one of `runs`."""
    if run_dir.resolve().parent != runs.resolve():
        return
    link = runs / LATEST
    if link.exists() and not link.is_symlink():
        return
    scratch = runs / f".{LATEST}.{run_dir.name}"
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(run_dir.resolve().name)
    scratch.replace(link)

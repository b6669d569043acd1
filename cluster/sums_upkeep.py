"""Sums on disk: derived again from the step rows, to find those that lie and to make those that are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dfbench.cluster.commit import next_number, write_files
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.ledger_schema import RecordFile
from dfbench.cluster.record_rows import ROWS, read_rows
from dfbench.cluster.sums import JOB_COLUMNS, STEP_COLUMNS, sums_of
from dfbench.workers.checks import JobKey, job_keys
from dfbench.workers.records import SUMS


def verify_sums(ledger: Ledger) -> Iterator[str]:
    """Every row of `sums` that is not what its job's step rows come to, one sentence each."""
    files = ledger.files("sums")
    owned = 0
    for shards, made in _derived(ledger, set().union(*(ledger.shards_of(file.name) for file in files))):
        stored = _rows_of(ledger, "sums", shards, made["job_id"])
        owned += stored.num_rows
        yield from _differences(stored, made)
    if stray := sum(file.rows for file in files) - owned:
        yield f"rows of sums that are of no job: {stray}."


def add_sums(ledger: Ledger, instead: Collection[str] = ()) -> int:
    """Derive the sums of every job that has none, those in the files `instead` not counted. Returns how many."""
    there = set(_keys(ledger, [file for file in ledger.files("sums") if file.name not in instead]))
    lacking = {shard for *key, shard in _keys(ledger, ledger.files("jobs"), "shard_id") if tuple(key) not in there}
    generation, number = ledger.next_generation(), next_number(ledger)
    new: list[RecordFile] = []
    holds: dict[str, set[str]] = {}
    for shards, made in _derived(ledger, lacking):
        absent = made.filter(pa.array([key not in there for key in job_keys(made)], pa.bool_()))
        for file in write_files(ledger.run_dir, {"sums": absent}, generation=generation, number=number):
            new.append(file)
            holds[file.name] = shards
        number += 1
    if new or instead:
        ledger.replace_files(new, holds, sorted(instead))
    return sum(file.rows for file in new)


def _differences(stored: pa.Table, made: pa.Table) -> Iterator[str]:
    """What is wrong with each stored row, beside the one that its job should have."""
    places: dict[JobKey, int] = {key: place for place, key in enumerate(job_keys(made))}
    keys = job_keys(stored)
    for job_id, attempt in keys:
        if (job_id, attempt) not in places:
            yield f"job {job_id}: it has sums of attempt {attempt}, but no rows of it."
    for (job_id, _), count in Counter(keys).items():
        if count > 1:
            yield f"job {job_id}: it has {count} rows of sums."
    found = stored.filter(pa.array([key in places for key in keys], pa.bool_()))
    due = made.take(pa.array([places[key] for key in keys if key in places], pa.int64()))
    wrong: dict[int, str] = {}
    for name in SUMS.names:
        for row in np.flatnonzero(_unlike(found[name], due[name])).tolist():
            told, counted = found[name][row].as_py(), due[name][row].as_py()
            wrong.setdefault(row, f"its sums say {name} {told}, its rows say {counted}")
    for row, message in sorted(wrong.items()):
        yield f"job {found['job_id'][row]}: {message}."


def _unlike(one: pa.ChunkedArray, other: pa.ChunkedArray) -> np.ndarray:
    """Where two columns differ, a null from a value too."""
    differ = pc.fill_null(pc.not_equal(one, other), False)
    apart = pc.not_equal(one.is_null(), other.is_null())
    unlike: np.ndarray = pc.or_(differ, apart).to_numpy()
    return unlike


def _derived(ledger: Ledger, wanted: set[str]) -> Iterator[tuple[set[str], pa.Table]]:
    """Sums of these shards' jobs as their rows have them now, some whole shards at a time."""
    for shards in _portions(ledger, wanted):
        jobs = _read(ledger, "jobs", shards, pc.field("shard_id").isin(sorted(shards)), JOB_COLUMNS)
        steps = _rows_of(ledger, "steps", shards, jobs["job_id"], STEP_COLUMNS)
        yield shards, sums_of(jobs, steps)


def _portions(ledger: Ledger, wanted: set[str]) -> Iterator[set[str]]:
    """These shards in groups whose step rows are in as few files as can be, about `ROWS` rows each."""
    left = set(wanted)
    shards: set[str] = set()
    rows = 0
    for file in ledger.files("steps"):
        mine = ledger.shards_of(file.name)
        if fresh := mine & left:
            shards |= fresh
            left -= fresh
            rows += file.rows * len(fresh) // len(mine)
        if rows >= ROWS:
            yield shards
            shards, rows = set(), 0
    if shards | left:
        yield shards | left


def _rows_of(
    ledger: Ledger, table: str, shards: set[str], job_ids: pa.ChunkedArray, columns: Sequence[str] | None = None
) -> pa.Table:
    """The rows of these jobs, which are of these shards."""
    return _read(ledger, table, shards, pc.field("job_id").isin(pc.unique(job_ids)), columns)


def _read(
    ledger: Ledger, table: str, shards: set[str], condition: pc.Expression, columns: Sequence[str] | None = None
) -> pa.Table:
    """Rows of a table that are of these shards and satisfy a condition."""
    holding = ledger.files_of(shards)
    files = [file for file in ledger.files(table) if file.name in holding]
    return read_rows(ledger, files, table, condition, columns)


def _keys(ledger: Ledger, files: Sequence[RecordFile], *more: str) -> Iterator[tuple[Any, ...]]:
    """Job and attempt of every row, and these columns beside."""
    for file in files:
        table = pq.read_table(ledger.run_dir / file.name, columns=["job_id", "attempt", *more])
        yield from zip(*(column.to_pylist() for column in table.columns), strict=True)

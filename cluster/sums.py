"""What the step rows of each job come to: the rows of `sums`, derived at a commit from the tables that it writes.

They say nothing that the step rows do not: the views read them in their place, and `verify` derives them again.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dfbench.workers.checks import as_numpy, job_keys, runs
from dfbench.workers.records import JOBS, SUMS

TIMES = ("step_ns", "draft_ns", "forward_ns")
JOB_COLUMNS = (
    *(name for name in SUMS.names if name in JOBS.names), "shard_id", "repeat", "drafter", "output_ids",
)  # fmt: skip
"""Columns of `jobs` that sums are made of."""
STEP_COLUMNS = ("job_id", "attempt", "position", "drafted", "accepted", "emitted", *TIMES)
"""Columns of `steps` that sums are made of."""


def sums_of(jobs: pa.Table, steps: pa.Table) -> pa.Table:
    """One row for each row of `jobs`. A job's AR job must be among them, as it is in a commit of whole attempts."""
    rows = _Steps(steps, jobs)
    columns: dict[str, object] = {name: jobs[name] for name in SUMS.names if name in JOBS.names}
    columns["steps"] = rows.size
    columns["drafted_steps"] = rows.total(rows["drafted"] > 0)
    columns["proposed"] = rows.total(rows["drafted"])
    columns |= {name: rows.total(rows[name]) for name in ("accepted", "emitted")}
    columns |= {name: pa.array(rows.total(rows[name]), mask=~rows.known(name)) for name in TIMES}
    columns |= _beside_ar(jobs, rows)
    arrays = [_array(columns[entry.name], entry.type) for entry in SUMS]
    return pa.Table.from_arrays(arrays, schema=SUMS)


def _beside_ar(jobs: pa.Table, rows: _Steps) -> dict[str, pa.Array]:
    """What AR paid at the positions where each job ran a pass (docs/measurement.md §2, `speedup_bound`).

    AR runs a pass at every position: its p-th one is the one at position p.
    """
    ar = baselines(jobs)
    lengths = as_numpy(pc.list_value_length(jobs["output_ids"]))
    spec = (ar >= 0) & (np.asarray(jobs["drafter"].to_pylist(), dtype=object) != "ar")
    of_ar, position = ar[rows.owner], rows["position"]
    inside = spec[rows.owner] & (position >= 1) & (position <= rows.size[of_ar])
    cost = np.zeros(len(position), dtype=np.int64)
    cost[inside] = rows["step_ns"][rows.first[of_ar[inside]] + position[inside] - 1]
    past = rows.total(spec[rows.owner] & (position > rows.size[of_ar]))
    known = spec & (rows.size > 0) & rows.known("step_ns")[ar]
    return {
        "ar_job_id": jobs["job_id"].combine_chunks().take(pa.array(ar, mask=ar < 0)),
        "passes_past_ar": pa.array(np.where(lengths > lengths[ar], past, 0), mask=~spec),
        "ar_pass_ns": pa.array(rows.total(cost), mask=~known),
    }


def baselines(jobs: pa.Table) -> np.ndarray:
    """The row of the AR job that each job is compared with, −1 where there is none: the rule of the view `couples`.

    The view does not trust this one: where the two differ, it is the step rows that count.
    """
    names = ("shard_id", "attempt", "prompt_id", "repeat", "device")
    keys = list(zip(*(jobs[name].to_pylist() for name in names), strict=True))
    columns = (jobs[name].to_pylist() for name in ("drafter", "warmup", "arm", "pair_only"))
    found: dict[tuple[object, ...], tuple[tuple[bool, str, bool], int]] = {}
    for place, (key, drafter, warmup, arm, pair_only) in enumerate(zip(keys, *columns, strict=True)):
        if drafter == "ar" and not warmup:
            mine = (arm != "ar", arm, pair_only), place
            found[key] = min(found.get(key, mine), mine)
    return np.array([found[key][1] if key in found else -1 for key in keys], dtype=np.int64)


class _Steps:
    """Step rows by job and position: those of job `j` are the `size[j]` rows from `first[j]` on."""

    def __init__(self, steps: pa.Table, jobs: pa.Table) -> None:
        places = {key: place for place, key in enumerate(job_keys(jobs))}
        starts, keys = runs(steps)
        lengths = np.diff(np.append(starts, steps.num_rows))
        owner = np.repeat(np.array([places.get(key, -1) for key in keys], dtype=np.int64), lengths)
        position = as_numpy(steps["position"])
        ordered = owner.size == 0 or (owner[0] >= 0 and _ascending(owner, position))
        order = None if ordered else np.lexsort((position, owner))[np.count_nonzero(owner < 0) :]
        self._table = steps if order is None else steps.take(order)
        self.owner = owner if order is None else owner[order]
        self.size = np.bincount(self.owner, minlength=jobs.num_rows).astype(np.int64)
        self.first = np.cumsum(self.size) - self.size
        self._columns: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        """A column; 0 where a time is not known."""
        if name not in self._columns:
            self._columns[name] = as_numpy(self._table[name])
        return self._columns[name]

    def total(self, values: np.ndarray) -> np.ndarray:
        """Values of the rows, added up for each job."""
        totals = np.zeros(len(self.size), dtype=np.int64)
        some = self.size > 0
        if some.any():
            totals[some] = np.add.reduceat(values, self.first[some], dtype=np.int64)
        return totals

    def known(self, name: str) -> np.ndarray:
        """Whether any step of each job has this time."""
        if not self._table[name].null_count:
            return self.size > 0
        valid = self._table[name].is_valid().combine_chunks().to_numpy(zero_copy_only=False)
        return self.total(valid) > 0


def _ascending(owner: np.ndarray, position: np.ndarray) -> bool:
    later = owner[1:] > owner[:-1]
    return bool(np.all(later | ((owner[1:] == owner[:-1]) & (position[1:] >= position[:-1]))))


def _array(values: object, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    return array.cast(kind)

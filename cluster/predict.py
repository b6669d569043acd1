"""The speedup that a run's step widths predict on a device, by workload and arm: `speedup_model`.

Rows are read file by file; what is kept is two sums a prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from dfbench.cluster.ledger import Ledger
from dfbench.cluster.verify_cost import VerifyCost, times

Interval = Callable[[Sequence[float], Sequence[float]], Any]


class Prediction(NamedTuple):
    """One workload and arm. `interval`: of the speedup, over prompts; None where there is none."""

    workload: str
    arm: str
    prompts: int
    mat: float
    speedup: float
    interval: Any


class _Job(NamedTuple):
    workload: str
    prompt_id: str
    arm: str
    prompt_tokens: int
    tokens: int


def predict(run_dir: Path, cost: VerifyCost, interval: Interval) -> list[Prediction]:
    """Predictions for every workload and arm of a run, measured jobs only; AR's own is 1 by definition."""
    with Ledger.open(run_dir, readonly=True) as ledger:
        files = {table: [run_dir / file.name for file in ledger.files(table)] for table in ("jobs", "steps")}
    jobs = _jobs(files["jobs"])
    sums: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0] * 4))
    for job_id, positions, queries in _steps(files["steps"]):
        job = jobs.get(job_id)
        if job is None:
            continue
        ar, own = times(cost, job.prompt_tokens, positions, queries, job.tokens)
        cell = sums[job.workload, job.arm][job.prompt_id]
        for place, value in enumerate((ar, own, job.tokens, len(positions))):
            cell[place] += value
    return [_prediction(*key, list(prompts.values()), interval) for key, prompts in sorted(sums.items())]


def _prediction(workload: str, arm: str, rows: list[list[float]], interval: Interval) -> Prediction:
    ar, own, tokens, steps = (list(column) for column in zip(*rows, strict=True))
    return Prediction(workload, arm, len(rows), sum(tokens) / sum(steps), sum(ar) / sum(own), interval(ar, own))


def _jobs(files: list[Path]) -> dict[str, _Job]:
    columns = ["job_id", "workload", "prompt_id", "arm", "prompt_tokens", "output_ids", "warmup", "pair_only"]
    found: dict[str, _Job] = {}
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=4096, columns=columns):
            lengths = batch["output_ids"].value_lengths().to_pylist()
            rows = batch.drop_columns(["output_ids"]).to_pylist()
            for row, length in zip(rows, lengths, strict=True):
                if not row["warmup"] and not row["pair_only"]:
                    job = _Job(row["workload"], row["prompt_id"], row["arm"], row["prompt_tokens"], length - 1)
                    found[row["job_id"]] = job
    return found


def _steps(files: list[Path]) -> Iterator[tuple[str, Any, Any]]:
    """(job_id, positions, queries) of every job; the rows of a job lie together in one file."""
    columns = ["job_id", "position", "queries", "warmup", "pair_only"]
    for file in files:
        table = pq.read_table(file, columns=columns)
        keep = ~(table["warmup"].to_numpy() | table["pair_only"].to_numpy())
        names = np.asarray(table["job_id"].to_pylist(), object)[keep]
        if not len(names):
            continue
        starts = np.flatnonzero(np.r_[True, names[1:] != names[:-1]])
        positions, queries = table["position"].to_numpy()[keep], table["queries"].to_numpy()[keep]
        for start, end in zip(starts, [*starts[1:], len(names)], strict=True):
            yield names[start], positions[start:end], queries[start:end]

"""The record format: Arrow schemas, rows from a finished job, and the identities that every row must satisfy.

Schema history:
    1  the first.
    2  `sums`: what the step rows of each job come to, so that the headline figures need not read them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dfbench.errors import RecordError
from dfbench.workers.checks import breaches
from dfbench.workers.loop import Step, Trace
from dfbench.workers.spec import ArmSpec, JobSpec, PromptSpec, ShardSpec, TargetSpec
from dfbench.workers.target import Evidence

SCHEMA_VERSION = 2

_IDENTITY = [
    pa.field("run_id", pa.string(), nullable=False),
    pa.field("job_id", pa.string(), nullable=False),
    pa.field("workload", pa.string(), nullable=False),
    pa.field("prompt_id", pa.string(), nullable=False),
    pa.field("arm", pa.string(), nullable=False),
    pa.field("device", pa.string(), nullable=False),
    pa.field("attempt", pa.int32(), nullable=False),
    pa.field("warmup", pa.bool_(), nullable=False),
    pa.field("pair_only", pa.bool_(), nullable=False),
]


def _schema(name: str, fields: Sequence[pa.Field]) -> pa.Schema:
    return pa.schema(fields, metadata={"dfbench.table": name, "dfbench.schema_version": str(SCHEMA_VERSION)})


JOBS = _schema(
    "jobs",
    [
        *_IDENTITY,
        pa.field("shard_id", pa.string(), nullable=False),
        pa.field("drafter", pa.string(), nullable=False),
        pa.field("params", pa.string(), nullable=False),  # JSON
        pa.field("cache", pa.string(), nullable=False),  # cold, carried, preloaded
        pa.field("target", pa.string(), nullable=False),  # torch, recorded, scripted
        pa.field("engine", pa.string(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("revision", pa.string()),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("stack", pa.string(), nullable=False),  # dfbench, torch and transformers versions
        pa.field("worker_id", pa.string(), nullable=False),
        pa.field("repeat", pa.int32(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("arm_order", pa.int32(), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("max_new_tokens", pa.int32(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),  # eos, length
        pa.field("began_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("start_ns", pa.int64()),
        pa.field("prefill_ns", pa.int64()),
        pa.field("decode_ns", pa.int64()),
        pa.field("wall_ns", pa.int64()),
        pa.field("repetition", pa.float64()),
        pa.field("output_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("throttled", pa.bool_()),  # null where the device has no telemetry
        pa.field("telemetry", pa.string()),  # JSON
    ],
)

STEPS = _schema(
    "steps",
    [
        *_IDENTITY,
        pa.field("step", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),  # of the first token it emits
        pa.field("queries", pa.int32(), nullable=False),
        pa.field("padding", pa.int32(), nullable=False),
        pa.field("drafted", pa.int32(), nullable=False),
        pa.field("depth", pa.int32(), nullable=False),  # of the draft; 0 when there was none
        pa.field("accepted", pa.int32(), nullable=False),
        pa.field("emitted", pa.int32(), nullable=False),
        pa.field("step_ns", pa.int64()),
        pa.field("draft_ns", pa.int64()),
        pa.field("forward_ns", pa.int64()),
        pa.field("accept_ns", pa.int64()),
        pa.field("commit_ns", pa.int64()),
    ],
)

TOKENS = _schema(
    "tokens",
    [
        *_IDENTITY,
        pa.field("position", pa.int32(), nullable=False),
        pa.field("token_id", pa.int32(), nullable=False),
        pa.field("step", pa.int32()),  # null for position 0, which prefill gives
        pa.field("top1_id", pa.int32(), nullable=False),
        pa.field("top1_logit", pa.float32(), nullable=False),
        pa.field("top2_id", pa.int32(), nullable=False),
        pa.field("top2_logit", pa.float32(), nullable=False),
        pa.field("top_ties", pa.int32(), nullable=False),  # entries equal to the maximum; 1 = no tie
    ],
)

SUMS = _schema(
    "sums",
    [
        *_IDENTITY,
        pa.field("steps", pa.int64(), nullable=False),
        pa.field("drafted_steps", pa.int64(), nullable=False),
        pa.field("proposed", pa.int64(), nullable=False),
        pa.field("accepted", pa.int64(), nullable=False),
        pa.field("emitted", pa.int64(), nullable=False),
        pa.field("step_ns", pa.int64()),  # times are null where no step has one
        pa.field("draft_ns", pa.int64()),
        pa.field("forward_ns", pa.int64()),
        pa.field("ar_job_id", pa.string()),  # the AR job that it is compared with; null where there is none
        pa.field("passes_past_ar", pa.int64()),  # passes that begin behind the end of AR's output; null for AR's own
        pa.field("ar_pass_ns", pa.int64()),  # AR's step times at the positions of the other passes
    ],
)
"""One row a job: its rows of `steps` added up at the commit (cluster/sums.py), and what it is to be compared with."""

WITNESS = _schema(
    "witness",
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),  # control, noise, teacher, again, witness, replay
        pa.field("job_id", pa.string(), nullable=False),  # the job that the row is about
        pa.field("attempt", pa.int32(), nullable=False),  # and the attempt of it that left the rows
        pa.field("workload", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("arm", pa.string(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("shape", pa.string(), nullable=False),  # ar, spec: whose passes; full: one over all
        pa.field("queries", pa.int32(), nullable=False),
        pa.field("token_id", pa.int32()),  # the emitted token under test; null, like the logits, for kind replay
        pa.field("token_logit", pa.float32()),
        pa.field("top1_id", pa.int32()),
        pa.field("top1_logit", pa.float32()),
        pa.field("top2_id", pa.int32()),
        pa.field("top2_logit", pa.float32()),
        pa.field("recorded_logit", pa.float32()),  # what the run recorded for the emitted token
        pa.field("worker_id", pa.string(), nullable=False),
        pa.field("device", pa.string(), nullable=False),
    ],
)

CALIBRATION = _schema(
    "calibration",
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("worker_id", pa.string(), nullable=False),
        pa.field("device", pa.string(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("engine", pa.string(), nullable=False),
        pa.field("stack", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),  # forward = one pass; read = one sweep over memory
        pa.field("context", pa.int32()),  # tokens in the KV cache (forward)
        pa.field("queries", pa.int32()),  # tokens in the pass (forward)
        pa.field("bytes", pa.int64()),  # bytes read (read)
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("ns", pa.int64(), nullable=False),
    ],
)

SCHEMAS: Mapping[str, pa.Schema] = {
    "jobs": JOBS,
    "steps": STEPS,
    "tokens": TOKENS,
    "sums": SUMS,
    "witness": WITNESS,
    "calibration": CALIBRATION,
}


@dataclass(frozen=True)
class WorkerFacts:
    """What is the same for every job of a worker: read back from what it loaded, not from what was asked for."""

    worker_id: str
    device: str
    model: str
    revision: str | None
    dtype: str
    engine: str
    stack: str


@dataclass(frozen=True)
class JobRecord:
    """The rows of one finished job."""

    jobs: pa.Table
    steps: pa.Table
    tokens: pa.Table


def job_record(
    shard: ShardSpec,
    job: JobSpec,
    arm: ArmSpec,
    prompt: PromptSpec,
    target: TargetSpec,
    facts: WorkerFacts,
    trace: Trace,
    *,
    began_at: int,
    timed: bool = True,
    warmup: bool = False,
    throttled: bool | None = None,
    telemetry: dict[str, Any] | None = None,
) -> JobRecord:
    """Arrow tables of one finished job. `began_at`: µs since the epoch. Times are null for an untimed target."""
    row = job_row(shard, job, arm, prompt, target, facts, began_at=began_at, warmup=warmup)
    row |= outcome_row(trace, timed=timed, throttled=throttled, telemetry=telemetry)
    return JobRecord(**tables([JobRows(row, trace, timed)]))


class JobRows(NamedTuple):
    """A finished job before its rows are made: its row of `jobs`, and the trace that steps and tokens come from."""

    row: dict[str, Any]
    trace: Trace
    timed: bool = True


def outcome_row(
    trace: Trace, *, timed: bool = True, throttled: bool | None = None, telemetry: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The columns of `jobs` that are known once a job has run."""
    phases = timed and not trace.wall_only
    return {
        "finish_reason": trace.finish_reason,
        "start_ns": trace.start_ns if phases else None,
        "prefill_ns": trace.prefill_ns if phases else None,
        "decode_ns": trace.decode_ns if phases else None,
        "wall_ns": trace.wall_ns if timed else None,
        "repetition": repetition(trace.output),
        "output_ids": trace.output,
        "throttled": throttled,
        "telemetry": json.dumps(telemetry, sort_keys=True) if telemetry is not None else None,
    }


def tables(finished: Sequence[JobRows]) -> dict[str, pa.Table]:
    """Arrow tables of many finished jobs, by name; columns are made once for all of them."""
    rows = [job.row for job in finished]
    arrays = [pa.array([row[entry.name] for row in rows], entry.type) for entry in JOBS]
    return {
        "jobs": pa.Table.from_arrays(arrays, schema=JOBS),
        "steps": _step_table(finished, rows),
        "tokens": _token_table(finished, rows),
    }


def job_row(
    shard: ShardSpec,
    job: JobSpec,
    arm: ArmSpec,
    prompt: PromptSpec,
    target: TargetSpec,
    facts: WorkerFacts,
    *,
    began_at: int,
    warmup: bool = False,
) -> dict[str, Any]:
    """The columns of `jobs` that are known before a job has run."""
    return {
        "run_id": shard.run_id,
        "job_id": job.job_id,
        "workload": job.workload,
        "prompt_id": job.prompt_id,
        "arm": job.arm,
        "device": facts.device,
        "attempt": shard.attempt,
        "warmup": warmup,
        "pair_only": job.pair_only,
        "shard_id": shard.shard_id,
        "drafter": arm.drafter,
        "params": json.dumps(arm.params, sort_keys=True),
        "cache": arm.cache,
        "target": target.kind,
        "engine": facts.engine,
        "model": facts.model,
        "revision": facts.revision,
        "dtype": facts.dtype,
        "stack": facts.stack,
        "worker_id": facts.worker_id,
        "repeat": job.repeat,
        "turn": job.turn,
        "arm_order": job.arm_order,
        "prompt_tokens": len(prompt.prompt_ids),
        "max_new_tokens": shard.max_new_tokens,
        "began_at": began_at,
    }


def repetition(output: Sequence[int], n: int = 4) -> float | None:
    """Share of the output's n-grams that occurred earlier in it (docs/measurement.md §2: greedy loops inflate MAT)."""
    grams = len(output) - n + 1
    if grams < 1:
        return None
    distinct = len(Counter(tuple(output[i : i + n]) for i in range(grams)))
    return 1 - distinct / grams


def _step_table(finished: Sequence[JobRows], rows: Sequence[dict[str, Any]]) -> pa.Table:
    counts = [len(job.trace.steps) for job in finished]
    if not sum(counts):
        return STEPS.empty_table()
    steps = np.array([step for job in finished for step in job.trace.steps], dtype=np.int64)
    columns: dict[str, Any] = {name: steps[:, place] for place, name in enumerate(Step._fields)}
    columns["step"] = np.concatenate([np.arange(count) for count in counts])
    untimed = ~np.repeat([job.timed for job in finished], counts)
    if untimed.any():
        for name in Step._fields:
            if name.endswith("_ns"):
                columns[name] = pa.array(columns[name], mask=untimed)
    return _with_identity(rows, counts, columns, STEPS)


def _token_table(finished: Sequence[JobRows], rows: Sequence[dict[str, Any]]) -> pa.Table:
    pairs = [(job.trace, row) for job, row in zip(finished, rows, strict=True) if job.trace.evidence is not None]
    if not pairs:
        return TOKENS.empty_table()
    columns: dict[str, Any] = {"token_id": [token for trace, _ in pairs for token in trace.output]}
    columns["position"] = np.concatenate([np.arange(len(trace.output)) for trace, _ in pairs])
    columns["step"] = [step for trace, _ in pairs for step in _step_of(trace)]
    for place, name in enumerate(Evidence._fields):
        columns[name] = np.concatenate([trace.evidence[place] for trace, _ in pairs if trace.evidence is not None])
    return _with_identity([row for _, row in pairs], [len(trace.output) for trace, _ in pairs], columns, TOKENS)


def _step_of(trace: Trace) -> list[int | None]:
    """The step that emitted each token; prefill gives the first one."""
    return [None, *(number for number, step in enumerate(trace.steps) for _ in range(step.emitted))]


def _with_identity(
    rows: Sequence[dict[str, Any]], counts: Sequence[int], columns: dict[str, Any], schema: pa.Schema
) -> pa.Table:
    """A table whose identity columns repeat each job's `count` times, beside columns that are given whole."""
    owner = pa.array(np.repeat(np.arange(len(rows), dtype=np.int32), counts))
    arrays = []
    for entry in schema:
        if entry.name in columns:
            column = columns[entry.name]
            made = column if isinstance(column, pa.Array) else pa.array(column)
            arrays.append(made.cast(entry.type))
        else:
            arrays.append(pa.array([row[entry.name] for row in rows], entry.type).take(owner))
    return pa.Table.from_arrays(arrays, schema=schema)


def check(record: JobRecord, eos_ids: Collection[int] = ()) -> None:
    """Raise RecordError unless the rows of one job satisfy every identity of docs/measurement.md §1 and §4."""
    for message in breaches(record.jobs, record.steps, record.tokens, eos_ids).values():
        raise RecordError(message)

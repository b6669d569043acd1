"""The record format: Arrow schemas, rows from a finished job, and the identities that every row must satisfy.

Schema history:
    1  the first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dfbench.errors import RecordError
from dfbench.workers.checks import breaches
from dfbench.workers.loop import Trace
from dfbench.workers.spec import ArmSpec, JobSpec, PromptSpec, ShardSpec, TargetSpec

SCHEMA_VERSION = 1

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
    identity = {entry.name: row[entry.name] for entry in _IDENTITY}
    row |= {
        "finish_reason": trace.finish_reason,
        "start_ns": trace.start_ns if timed else None,
        "prefill_ns": trace.prefill_ns if timed else None,
        "decode_ns": trace.decode_ns if timed else None,
        "wall_ns": trace.wall_ns if timed else None,
        "repetition": repetition(trace.output),
        "output_ids": trace.output,
        "throttled": throttled,
        "telemetry": json.dumps(telemetry, sort_keys=True) if telemetry is not None else None,
    }
    return JobRecord(
        pa.Table.from_pylist([row], schema=JOBS), _step_table(identity, trace, timed), _token_table(identity, trace)
    )


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
    """Share of the output's n-grams that occurred earlier in it (MEASUREMENT: greedy loops inflate MAT)."""
    grams = len(output) - n + 1
    if grams < 1:
        return None
    distinct = len(Counter(tuple(output[i : i + n]) for i in range(grams)))
    return 1 - distinct / grams


def _constant(value: Any, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), rows)


def _with_identity(identity: dict[str, Any], columns: dict[str, Any], rows: int, schema: pa.Schema) -> pa.Table:
    arrays = []
    for entry in schema:
        if entry.name in identity:
            arrays.append(_constant(identity[entry.name], entry.type, rows))
        else:
            arrays.append(pa.array(columns[entry.name], entry.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _step_table(identity: dict[str, Any], trace: Trace, timed: bool) -> pa.Table:
    rows = len(trace.steps)
    if not rows:
        return STEPS.empty_table()
    columns: dict[str, Any] = dict(zip(trace.steps[0]._fields, zip(*trace.steps, strict=True), strict=True))
    columns["step"] = range(rows)
    if not timed:
        columns.update({name: [None] * rows for name in columns if name.endswith("_ns")})
    return _with_identity(identity, columns, rows, STEPS)


def _token_table(identity: dict[str, Any], trace: Trace) -> pa.Table:
    if trace.evidence is None:
        return TOKENS.empty_table()
    step_of: list[int | None] = [None]
    for number, step in enumerate(trace.steps):
        step_of += [number] * step.emitted
    columns = {
        "position": range(len(trace.output)),
        "token_id": trace.output,
        "step": step_of,
        **trace.evidence._asdict(),
    }
    return _with_identity(identity, columns, len(trace.output), TOKENS)


def check(record: JobRecord, eos_ids: Collection[int] = ()) -> None:
    """Raise RecordError unless the rows of one job satisfy every identity of MEASUREMENT.md §1 and §4."""
    for message in breaches(record.jobs, record.steps, record.tokens, eos_ids).values():
        raise RecordError(message)

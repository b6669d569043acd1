"""Run directories made to order: a valid ledger and valid Parquet files, from a few jobs written out by hand."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dfbench.cluster.commit import encode
from dfbench.cluster.ledger_schema import INDEXES, SCHEMA
from dfbench.cluster.sums import sums_of
from dfbench.workers.loop import Step, Trace
from dfbench.workers.records import CALIBRATION, SCHEMAS, JobRecord, WorkerFacts, job_record
from dfbench.workers.spec import ArmSpec, JobSpec, PromptSpec, ShardSpec, TargetSpec
from dfbench.workers.target import Evidence

DRAFTERS = {"ar": "ar", "pld": "pld", "cacheback": "cacheback"}


@dataclass(frozen=True)
class Facts:
    """What is the same for every job of a made run unless a job says otherwise."""

    device: str = "toy device"
    model: str = "toy"
    dtype: str = "bfloat16"
    engine: str = "cached"
    stack: str = "dfbench 0.1.0, torch 0, transformers 0"
    worker_id: str = "w0"


@dataclass
class RunMaker:
    """Collects jobs, then `write()` makes the run directory.

    `emits` says how many tokens each step emits (all but the bonus were drafted), `costs` what each step took in ms.
    """

    path: Path
    run_id: str = "made"
    facts: Facts = field(default_factory=Facts)
    records: list[tuple[str, JobRecord]] = field(default_factory=list)
    planned: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    prompts: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    attempts: list[tuple[Any, ...]] = field(default_factory=list)
    calibration: list[dict[str, Any]] = field(default_factory=list)
    workers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def job(
        self,
        workload: str,
        prompt_id: str,
        arm: str,
        output: Sequence[int],
        emits: Sequence[int] = (),
        costs: Sequence[float] | None = None,
        *,
        repeat: int = 0,
        turn: int = 0,
        attempt: int = 1,
        arm_order: int = 0,
        warmup: bool = False,
        pair_only: bool = False,
        cache: str = "cold",
        drafter: str = "",
        drafted: Sequence[int] | None = None,
        queries: Sequence[int] | None = None,
        prefill_ms: float = 0.0,
        start_ms: float = 0.0,
        wall_ms: float | None = None,
        draft_ms: float = 0.0,
        forward_share: float = 0.5,
        timed: bool = True,
        finish: str = "length",
        evidence: Evidence | None = None,
        throttled: bool | None = None,
        facts: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> str:
        """Add a finished job; returns its id. `emits` defaults to one token a step; with `wall_ms` it has no steps."""
        emits = list(emits) or [1] * (len(output) - 1)
        costs = costs or [1.0] * len(emits)
        drafted = list(drafted) if drafted is not None else [count - 1 for count in emits]
        steps, position = [], 1
        for number, (count, cost, proposed) in enumerate(zip(emits, costs, drafted, strict=True)):
            total = int(cost * 1e6)
            draft = int(draft_ms * 1e6)
            forward = int(total * forward_share)
            width = queries[number] if queries else proposed + 1
            steps.append(Step(position, width, 0, proposed, proposed, count - 1, count, total, draft, forward, 0, 0))
            position += count
        trace = Trace(
            output=list(output),
            steps=steps,
            finish_reason=finish,
            start_ns=int(start_ms * 1e6),
            prefill_ns=int(prefill_ms * 1e6),
            decode_ns=sum(step.step_ns for step in steps),
            evidence=evidence,
        )
        if wall_ms is not None:
            trace = Trace(list(output), finish_reason=finish, wall_only=True, decode_ns=int(wall_ms * 1e6))
        shard_id = f"{workload}/{prompt_id}/{repeat}"
        job_id = f"{workload}/{prompt_id}/{arm}/{repeat}" + ("/warm" if warmup else "")
        prompt = self.prompt(workload, prompt_id, warmup=warmup)
        named = {**self.facts.__dict__, **(facts or {})}
        shard = ShardSpec(self.run_id, shard_id, workload, (prompt,), (), (), len(output), attempt=attempt)
        record = job_record(
            shard,
            JobSpec(job_id, workload, prompt_id, arm, repeat, arm_order, turn, pair_only),
            ArmSpec(arm, drafter or DRAFTERS.get(arm, arm), dict(params or {}), cache),  # type: ignore[arg-type]
            prompt,
            TargetSpec(),
            WorkerFacts(revision=None, **named),
            trace,
            began_at=0,
            timed=timed,
            warmup=warmup,
            throttled=throttled,
        )
        self.records.append((shard_id, record))
        self.workers.setdefault(named["worker_id"], {"device": named["device"]})
        if not warmup and not pair_only:
            self.plan(workload, prompt_id, arm, repeat, turn, arm_order, state="done", attempt=attempt)
        return job_id

    def plan(
        self,
        workload: str,
        prompt_id: str,
        arm: str,
        repeat: int = 0,
        turn: int = 0,
        arm_order: int = 0,
        *,
        state: str = "pending",
        attempt: int | None = None,
    ) -> None:
        """Put a job into the plan; `job` does so for finished ones."""
        job_id = f"{workload}/{prompt_id}/{arm}/{repeat}"
        shard_id = f"{workload}/{prompt_id}/{repeat}"
        self.planned[job_id] = (
            job_id, shard_id, workload, prompt_id, arm, repeat, turn, arm_order, state, attempt,
        )  # fmt: skip
        self.prompt(workload, prompt_id)

    def prompt(self, workload: str, prompt_id: str, *, warmup: bool = False, source: str = "made") -> PromptSpec:
        """Put a prompt into prompts.parquet."""
        text = f"prompt {prompt_id} of {workload}"
        sha = hashlib.sha256(text.encode()).hexdigest()
        self.prompts.setdefault(
            (workload, prompt_id),
            {
                "workload": workload,
                "prompt_id": prompt_id,
                "source": source,
                "text": text,
                "messages": "[]",
                "prompt_ids": [1, 2, 3],
                "prompt_sha": sha,
                "warmup": warmup,
            },
        )
        return PromptSpec(workload, prompt_id, source, text, (1, 2, 3), sha)

    def forward(self, queries: int, us: float, *, context: int = 64, sample: int = 0, **facts: str) -> None:
        """Add a calibration pass."""
        self._calibrate("forward", us, sample, facts, context=context, queries=queries, bytes=None)

    def read(self, size: int, us: float, *, sample: int = 0, **facts: str) -> None:
        """Add a calibration sweep over memory."""
        self._calibrate("read", us, sample, facts, context=None, queries=None, bytes=size)

    def _calibrate(self, kind: str, us: float, sample: int, facts: Mapping[str, str], **more: Any) -> None:
        row = {**self.facts.__dict__, **facts, **more, "run_id": self.run_id, "kind": kind}
        self.calibration.append({**row, "sample": sample, "ns": int(us * 1000)})

    def write(self, groups: int = 1, *, sweep: str = "made", state: str = "done", sums: bool = True) -> Path:
        """Make the run directory with its records in `groups` commits; returns its path.

        Without `sums` it is as schema 1 had it: step rows alone.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        files = []
        size = -(-len(self.records) // groups) if self.records else 1
        for number, start in enumerate(range(0, len(self.records), size)):
            chunk = self.records[start : start + size]
            tables = {name: pa.concat_tables([getattr(r, name) for _, r in chunk]) for name in ("jobs", "steps")}
            tables["tokens"] = pa.concat_tables([record.tokens for _, record in chunk])
            if sums:
                tables["sums"] = sums_of(tables["jobs"], tables["steps"])
            files += [(*write_file(self.path, name, tables[name], number), {s for s, _ in chunk}) for name in tables]
        if self.calibration:
            table = pa.Table.from_pylist(self.calibration, schema=CALIBRATION)
            files.append((*write_file(self.path, "calibration", table, 0), set()))
        if self.prompts:
            pq.write_table(prompt_table(list(self.prompts.values())), self.path / "prompts.parquet")
        meta = {"run_id": self.run_id, "sweep": sweep, "state": state, "ledger_version": "1"}
        write_ledger(self.path, meta, list(self.planned.values()), files, self.attempts, self.workers)
        return self.path


def prompt_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """prompts.parquet as the driver writes it."""
    text = ("workload", "prompt_id", "source", "text", "messages")
    fields = [
        *((name, pa.string()) for name in text),
        ("prompt_ids", pa.list_(pa.int32())),
        ("prompt_sha", pa.string()),
    ]
    return pa.Table.from_pylist(list(rows), schema=pa.schema([*fields, ("warmup", pa.bool_())]))


def write_file(run: Path, table: str, rows: pa.Table, number: int) -> tuple[str, str, int, int, str]:
    """Write one record file; returns its row of the ledger: name, table, rows, bytes, sha256."""
    name = f"records/0/{table}-{number:06}.parquet"
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    data = encode(rows.cast(SCHEMAS[table]) if table in SCHEMAS else rows).to_pybytes()
    (run / name).write_bytes(data)
    return name, table, rows.num_rows, len(data), hashlib.sha256(data).hexdigest()


def write_ledger(
    run: Path,
    meta: Mapping[str, str],
    jobs: Sequence[tuple[Any, ...]],
    files: Sequence[tuple[str, str, int, int, str, set[str]]],
    attempts: Sequence[tuple[Any, ...]] = (),
    workers: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Make ledger.db; `jobs` are rows of its jobs table."""
    (run / "ledger.db").unlink(missing_ok=True)
    db = sqlite3.connect(run / "ledger.db")
    db.executescript("pragma journal_mode=wal;" + SCHEMA + INDEXES)
    db.executemany("insert into meta values (?, ?)", meta.items())
    shards = dict.fromkeys((job[1], job[2]) for job in jobs)
    db.executemany(
        "insert into shards values (?, ?, ?, 'done', 1, 'w0', '{}')",
        [(shard, position, workload) for position, (shard, workload) in enumerate(shards)],
    )
    db.executemany("insert into jobs values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", jobs)
    db.executemany("insert into attempts values (?, ?, ?, ?, ?, ?, ?, ?)", attempts)
    for name, table, rows, size, sha, covered in files:
        db.execute("insert into files values (?, ?, 0, ?, ?, ?, 1)", (name, table, rows, size, sha))
        db.executemany("insert into file_shards values (?, ?)", [(name, shard) for shard in sorted(covered)])
    for worker, facts in (workers or {}).items():
        db.execute(
            "insert into workers values (?, 'node0', ?, ?, '2026-01-01T00:00:00', null)",
            (worker, facts.get("device"), json.dumps(dict(facts))),
        )
    db.commit()
    db.close()

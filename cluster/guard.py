"""The guard's model work as a run of its own, `guard/` inside the run that it examines.

A guard run is planned from the finished jobs of the run, one guard job a job, and driven like any run: same ledger,
same driver, resumed by the same command, retried, recorded. Its rows (`witness`) are then copied into the examined run
and named by that run's ledger, where `analysis` judges them.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dfbench.cluster import commit
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.runspec import PROMPTS_FILE, PlannedShard, RunSpec, ShardReader, ShardRow, base_prompt
from dfbench.errors import RunError
from dfbench.workers.records import SCHEMAS
from dfbench.workers.spec import GuardJob, GuardSpec, JobSpec, PassShape, guard_id

FOLDER = "guard"
EXAMINES = "examines"
"""Key of `RunSpec.extra` that holds the examined run's directory."""

_JOB_COLUMNS = [
    "job_id", "attempt", "shard_id", "workload", "prompt_id", "arm", "drafter", "repeat", "turn", "warmup",
    "max_new_tokens", "output_ids",
]  # fmt: skip
_STEP_COLUMNS = ["job_id", "attempt", "position", "drafted", "depth", "accepted", "emitted"]
_TOKEN_COLUMNS = ["job_id", "attempt", "position", "top1_logit"]


@dataclass(frozen=True)
class Group:
    """Jobs of one prompt that belong together: one attempt's AR job and the spec jobs paired with it."""

    key: str
    workload: str
    prompt_id: str
    ar: dict[str, Any]
    jobs: tuple[dict[str, Any], ...]


def prepare(run_dir: Path) -> Path:
    """The guard run of a run: made anew, or, where the run has not changed since, the one that is there. Raises
    RunError where nothing can be examined."""
    with Ledger.open(run_dir, readonly=True) as ledger:
        run = ledger.run
        if run.target.kind != "torch":
            raise RunError(
                f"the run's target is {run.target.kind}, which records no logits: guard it with --join-only."
            )
        groups = _groups(_read(run_dir, ledger, "jobs", _JOB_COLUMNS).to_pylist())
        done = ledger.counts().done
    if not groups:
        raise RunError(f"{run_dir} has no finished job beside a finished AR job of the same prompt: submit it first.")
    guard_dir = run_dir / FOLDER
    fingerprint = f"{run.sweep_sha}:{done}:{len(groups)}"
    if (guard_dir / "ledger.db").is_file():
        with Ledger.open(guard_dir, readonly=True) as ledger:
            if ledger.run.sweep_sha == fingerprint:
                return guard_dir
    if not (run_dir / PROMPTS_FILE).is_file():
        raise RunError(f"{run_dir / PROMPTS_FILE} is missing: guard the run with --join-only, or submit it again.")
    if guard_dir.exists():  # of the run as it was, or half prepared
        shutil.rmtree(guard_dir)
    guard_dir.mkdir()
    shutil.copyfile(run_dir / PROMPTS_FILE, guard_dir / PROMPTS_FILE)
    spec = RunSpec(
        run_id=run.run_id,
        sweep=f"{run.sweep} (guard)",
        sweep_sha=fingerprint,
        target=run.target,
        arms=run.arms,
        ignore_eos=run.ignore_eos,
        enable_thinking=run.enable_thinking,
        deadline_s=run.deadline_s,
        extra={EXAMINES: str(run_dir.resolve())},
    )
    Ledger.create(guard_dir, spec, _planned(groups)).close()
    return guard_dir


def adopt(run_dir: Path) -> int:
    """Copy the guard run's witness rows into the examined run, in the place of earlier ones. Returns their number."""
    guard_dir = run_dir / FOLDER
    with Ledger.open(guard_dir, readonly=True) as ledger:
        table = _read(guard_dir, ledger, "witness", None)
    with Ledger.open(run_dir) as ledger:
        old = [file.name for file in ledger.files("witness")]
        generation, number = ledger.next_generation(), commit.next_number(ledger)
        files = commit.write_files(run_dir, {"witness": table}, generation=generation, number=number)
        ledger.replace_files(files, {file.name: set() for file in files}, old)
    return int(table.num_rows)


class GuardReader:
    """Puts the guard's shards together, as `ShardReader` does for a sweep's."""

    def __init__(self, guard_dir: Path, run: RunSpec) -> None:
        self._run = run
        self._prompts = ShardReader(guard_dir, run)
        examined = Path(run.extra[EXAMINES])
        with Ledger.open(examined, readonly=True) as ledger:
            rows = _read(examined, ledger, "jobs", _JOB_COLUMNS).to_pylist()
            self._steps = _by_job(_read(examined, ledger, "steps", _STEP_COLUMNS))
            self._logits = _by_job(_read(examined, ledger, "tokens", _TOKEN_COLUMNS))
        self._groups = {group.key: group for group in _groups(rows)}
        self._answers = {
            (row["shard_id"], row["attempt"], row["repeat"], base_prompt_of(row), row["turn"]): tuple(row["output_ids"])
            for row in rows
            if row["drafter"] == "ar" and not row["warmup"]
        }

    def shard(self, row: ShardRow) -> GuardSpec:
        """What a worker needs to examine what is left of one prompt."""
        group = self._groups[row.shard_id]
        wanted = {job.job_id for job in row.jobs if not job.pair_only}
        ar = self._job(group.ar, None)
        jobs = [self._job(job, group.ar) for job in group.jobs]
        chosen = [job for job in jobs if guard_id(job.job_id, job.attempt) in wanted]
        first = group.ar
        turn, base = first["turn"], base_prompt_of(first)
        history = tuple(
            self._answers[first["shard_id"], first["attempt"], first["repeat"], base, earlier]
            for earlier in range(turn)
        )
        return GuardSpec(
            run_id=self._run.run_id,
            shard_id=row.shard_id,
            workload=group.workload,
            prompt=self._prompts.prompt(group.workload, base),
            prompt_id=group.prompt_id,
            arms=self._run.arms,
            ar=ar,
            jobs=tuple(chosen),
            max_new_tokens=first["max_new_tokens"],
            history=history,
            enable_thinking=self._run.enable_thinking,
            attempt=row.attempt,
            deadline_s=self._run.deadline_s,
        )

    def _job(self, row: dict[str, Any], ar: dict[str, Any] | None) -> GuardJob:
        key = row["job_id"], row["attempt"]
        steps = self._steps.get(key, [])
        return GuardJob(
            job_id=row["job_id"],
            attempt=row["attempt"],
            arm=row["arm"],
            output_ids=tuple(row["output_ids"]),
            passes=tuple(PassShape(*(step[name] for name in _STEP_COLUMNS[2:])) for step in steps),
            recorded_logits=tuple(token["top1_logit"] for token in self._logits.get(key, [])),
            divergence=None if ar is None else first_difference(ar["output_ids"], row["output_ids"]),
        )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position at which two outputs differ, one of them having ended included; None for equal ones."""
    for position, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def base_prompt_of(job: dict[str, Any]) -> str:
    """The planned prompt of a job row, whichever turn it ran."""
    return base_prompt(JobSpec(job["job_id"], job["workload"], job["prompt_id"], job["arm"], turn=job["turn"]))


def _groups(rows: Iterable[dict[str, Any]]) -> list[Group]:
    """Finished jobs by shard, attempt, prompt and repeat; those without an AR job beside them are left out, and the
    judge sees them missing."""
    gathered: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if not row["warmup"]:
            gathered[f"{row['shard_id']}:{row['attempt']}:{row['prompt_id']}:{row['repeat']}"].append(row)
    found = []
    for key, jobs in gathered.items():
        references = [job for job in jobs if job["drafter"] == "ar"]
        if references:
            ar = references[0]
            found.append(Group(key, ar["workload"], ar["prompt_id"], ar, tuple(jobs)))
    return found


def _planned(groups: Sequence[Group]) -> Iterator[PlannedShard]:
    for group in groups:
        jobs = [
            JobSpec(
                guard_id(job["job_id"], job["attempt"]),
                group.workload,
                group.prompt_id,
                job["arm"],
                job["repeat"],
                order,
                job["turn"],
            )
            for order, job in enumerate(group.jobs)
        ]
        cap = group.ar["max_new_tokens"]
        yield PlannedShard(group.key, group.workload, [base_prompt_of(group.ar)], jobs, cap)


def _read(run_dir: Path, ledger: Ledger, table: str, columns: list[str] | None) -> pa.Table:
    """The committed rows of one table."""
    files = [run_dir / file.name for file in ledger.files(table)]
    if not files:
        return SCHEMAS[table].empty_table() if columns is None else pa.table({name: [] for name in columns})
    return pa.concat_tables([pq.read_table(path, columns=columns) for path in files])


def _by_job(table: pa.Table) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Rows by (job_id, attempt), in order of position."""
    if not table.num_rows:
        return {}
    order = pc.sort_indices(table, sort_keys=[(name, "ascending") for name in ("job_id", "attempt", "position")])
    found: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in table.take(order).to_pylist():
        found[row["job_id"], row["attempt"]].append(row)
    return found

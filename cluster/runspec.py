"""What a run is, apart from its state: the settings every shard shares, the planned shards, and the prompts file.

A run directory alone is enough to go on with a run: the ledger holds a `RunSpec` and the planned shards,
`prompts.parquet` the prompts, and `ShardReader` puts them together again into what travels to a worker.
"""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dfbench.errors import RunError
from dfbench.workers.spec import ArmSpec, JobSpec, PromptSpec, ShardSpec, TargetSpec

PROMPTS_FILE = "prompts.parquet"
GROUP_PROMPTS, GROUP_TOKENS = 4096, 500_000
"""Most prompts, and about the most tokens, in a row group of the prompts file."""
KEPT_GROUPS = 4

PROMPTS = pa.schema(
    [
        pa.field("workload", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),  # JSON
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("prompt_sha", pa.string(), nullable=False),
        pa.field("warmup", pa.bool_(), nullable=False),
        pa.field("followups", pa.string(), nullable=False),  # JSON: user messages of the turns to come
        pa.field("recorded_ids", pa.list_(pa.int32())),
    ],
    metadata={"dfbench.table": "prompts", "dfbench.schema_version": "1"},
)


@dataclass(frozen=True)
class RunSpec:
    """What all shards of a run have in common.

    `sweep_sha` identifies the effective sweep: a second submit with the same one continues the run. `deadline_s` is
    the total time that one job may take. `extra`: under `calibrate`, whether workers first measure what their passes
    cost; the rest is the caller's and never read here.
    """

    run_id: str
    sweep: str
    sweep_sha: str
    target: TargetSpec
    arms: tuple[ArmSpec, ...]
    ignore_eos: bool = False
    enable_thinking: bool = False
    deadline_s: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        given = json.loads(text)
        target = given.pop("target")
        target["buckets"] = tuple(target["buckets"])
        arms = tuple(ArmSpec(**arm) for arm in given.pop("arms"))
        return cls(target=TargetSpec(**target), arms=arms, **given)


class PlannedShard(NamedTuple):
    """One shard of a plan; `jobs` are in the order in which they run. Plans are streams of these."""

    shard_id: str
    workload: str
    prompt_ids: Sequence[str]
    jobs: Sequence[JobSpec]
    max_new_tokens: int


class ShardRow(NamedTuple):
    """A shard as the ledger has it: what is left of it to do. `attempt` is the number of the next attempt."""

    shard_id: str
    position: int
    workload: str
    prompt_ids: tuple[str, ...]
    max_new_tokens: int
    attempt: int
    strikes: int
    jobs: tuple[JobSpec, ...]


def write_prompts(run_dir: Path, prompts: Iterable[PromptSpec], warmups: Iterable[PromptSpec] = ()) -> None:
    """Write `prompts.parquet`: the planned prompts, then the warm-up ones. Whole or not at all."""
    final = run_dir / PROMPTS_FILE
    partial = run_dir / f".{PROMPTS_FILE}.part"
    with pq.ParquetWriter(partial, PROMPTS, compression="zstd") as writer:
        for warmup, group in ((False, prompts), (True, warmups)):
            for batch in _batches(group):
                rows = [_prompt_row(prompt, warmup) for prompt in batch]
                writer.write_table(pa.Table.from_pylist(rows, schema=PROMPTS))
    partial.replace(final)


class ShardReader:
    """Puts shards together from ledger rows and `prompts.parquet`.

    Only names and places are kept; of the prompts themselves, the row groups that were asked for last.
    """

    def __init__(self, run_dir: Path, run: RunSpec) -> None:
        path = run_dir / PROMPTS_FILE
        if not path.is_file():
            raise RunError(f"{path} is missing: submit the sweep again with --new.")
        self.run = run
        self._file = pq.ParquetFile(path)
        groups = self._file.metadata.num_row_groups
        self._begins = [0, *accumulate(self._file.metadata.row_group(group).num_rows for group in range(groups))]
        self._group = lru_cache(maxsize=KEPT_GROUPS)(self._file.read_row_group)
        self._place: dict[tuple[str, str], int] = {}
        self._warmup: dict[str, list[int]] = {}
        names = ("workload", "prompt_id", "warmup")
        table = self._file.read(columns=list(names))
        keys = (table[name].to_pylist() for name in names)
        for row, (workload, prompt_id, warmup) in enumerate(zip(*keys, strict=True)):
            if warmup:
                self._warmup.setdefault(workload, []).append(row)
            else:
                self._place[workload, prompt_id] = row

    def prompt(self, workload: str, prompt_id: str) -> PromptSpec:
        """The planned prompt of this name. Raises RunError where the file lacks it."""
        row = self._place.get((workload, prompt_id))
        if row is None:
            raise RunError(f"{PROMPTS_FILE} has no prompt '{prompt_id}' of workload '{workload}': submit with --new.")
        return self._read(row)

    def shard(self, row: ShardRow) -> ShardSpec:
        """What a worker needs to run what is left of this shard."""
        run = self.run
        return ShardSpec(
            run_id=run.run_id,
            shard_id=row.shard_id,
            workload=row.workload,
            prompts=tuple(self.prompt(row.workload, prompt_id) for prompt_id in row.prompt_ids),
            arms=run.arms,
            jobs=row.jobs,
            max_new_tokens=row.max_new_tokens,
            ignore_eos=run.ignore_eos,
            enable_thinking=run.enable_thinking,
            warmup=tuple(self._read(place) for place in self._warmup.get(row.workload, ())),
            attempt=row.attempt,
            deadline_s=run.deadline_s,
            calibrate=bool(run.extra.get("calibrate")),
        )

    def _read(self, row: int) -> PromptSpec:
        group = bisect_right(self._begins, row) - 1
        table = self._group(group)
        given = {name: table[name][row - self._begins[group]].as_py() for name in PROMPTS.names}
        recorded = given["recorded_ids"]
        return PromptSpec(
            workload=given["workload"],
            prompt_id=given["prompt_id"],
            source=given["source"],
            text=given["text"],
            prompt_ids=tuple(given["prompt_ids"]),
            prompt_sha=given["prompt_sha"],
            messages=tuple(json.loads(given["messages"])),
            followups=tuple(json.loads(given["followups"])),
            recorded_ids=None if recorded is None else tuple(recorded),
        )


def with_pairs(jobs: Sequence[JobSpec], all_jobs: Sequence[JobSpec], reference: str | None) -> tuple[JobSpec, ...]:
    """The jobs left of a shard, with a fresh run of the reference arm wherever one must be paired.

    `reference` is the name of the arm that never drafts. A later turn needs the reference's earlier ones as well:
    its prompt is rendered from their answers.
    """
    left = {job.job_id for job in jobs}
    needed: dict[tuple[str, int], int] = {}
    for job in jobs:
        key = (base_prompt(job), job.repeat)
        needed[key] = max(needed.get(key, 0), job.turn)
    result: list[JobSpec] = []
    for job in all_jobs:
        if job.job_id in left:
            result.append(job)
        elif job.arm == reference and job.turn <= needed.get((base_prompt(job), job.repeat), -1):
            result.append(dataclasses.replace(job, pair_only=True))
    return tuple(result)


def base_prompt(job: JobSpec) -> str:
    """The id of the planned prompt that this job's turn belongs to."""
    return job.prompt_id.removesuffix(f"#{job.turn + 1}") if job.turn else job.prompt_id


def _prompt_row(prompt: PromptSpec, warmup: bool) -> dict[str, Any]:
    return {
        "workload": prompt.workload,
        "prompt_id": prompt.prompt_id,
        "source": prompt.source,
        "text": prompt.text,
        "messages": json.dumps(prompt.messages, ensure_ascii=False),
        "prompt_ids": prompt.prompt_ids,
        "prompt_sha": prompt.prompt_sha,
        "warmup": warmup,
        "followups": json.dumps(prompt.followups, ensure_ascii=False),
        "recorded_ids": prompt.recorded_ids,
    }


def _batches(items: Iterable[PromptSpec]) -> Iterable[list[PromptSpec]]:
    """Prompts in row groups of bounded size, however long they are."""
    batch: list[PromptSpec] = []
    tokens = 0
    for item in items:
        batch.append(item)
        tokens += len(item.prompt_ids) + len(item.recorded_ids or ())
        if len(batch) == GROUP_PROMPTS or tokens >= GROUP_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch

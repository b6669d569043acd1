"""`Sweep` → `Plan`: prompts with their token ids, jobs with their identity, shards in their order.

A job's id is a digest of everything that decides its output and timing class, and of nothing else: not the number of
workers, the order of the plan, or the other prompts (a 31st prompt renames nothing). Shards are generated, never kept:
a plan of a million jobs takes the memory of its prompts.
"""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from dfbench.cluster import render, workloads
from dfbench.cluster.runspec import PlannedShard, RunSpec
from dfbench.cluster.sweep import Arm, Scripted, Sweep, Workload, canonical
from dfbench.cluster.workloads import Row, turn_id
from dfbench.drafters import registry
from dfbench.drafters.base import DrafterContext
from dfbench.errors import ModelError, SweepError, UsageError
from dfbench.workers.spec import JobSpec, PromptSpec

ID_DIGITS = 16
"""Hex digits of a job or shard id."""


class Prompts(Protocol):
    """The planned prompts of one workload, in order, made when asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> PromptSpec: ...

    def turns(self) -> int:
        """Turns of all prompts together; a prompt without followups has one."""

    def digest(self) -> str:
        """Of all ids and contents, in order."""


@dataclass(frozen=True)
class Group:
    """One workload of a plan: what is measured, and the reserved prompts that workers warm up on."""

    workload: str
    prompts: Prompts
    warmup: tuple[PromptSpec, ...]


@dataclass(frozen=True)
class Plan:
    """What a sweep comes to. `sweep` is the effective one, its model pinned by revision or digest.

    `eos_ids`: ids that end an output.
    """

    sweep: Sweep
    groups: tuple[Group, ...]
    eos_ids: frozenset[int] = frozenset()

    @cached_property
    def carried(self) -> bool:
        """Whether an arm learns across prompts, which makes every workload one ordered shard."""
        return any(arm.cache == "carried" for arm in self.sweep.arms)

    @property
    def shard_count(self) -> int:
        return len(self.groups) if self.carried else sum(len(group.prompts) for group in self.groups)

    @property
    def job_count(self) -> int:
        return sum(group.prompts.turns() for group in self.groups) * len(self.sweep.arms) * self.sweep.repeats

    @cached_property
    def sha(self) -> str:
        """Digest of everything that makes this the same sweep: where it is equal, `submit` continues a run."""
        sweep = self.sweep
        parts = {
            "name": sweep.name,
            "arms": [arm_key(sweep, arm, self.eos_ids) for arm in sweep.arms],
            "repeats": sweep.repeats,
            "calibrate": sweep.calibrate,
            "workloads": [
                [group.workload, group.prompts.digest(), [prompt.prompt_sha for prompt in group.warmup]]
                for group in self.groups
            ],
        }
        return hashlib.sha256(canonical(parts)).hexdigest()

    def run_spec(self, run_id: str) -> RunSpec:
        """What all shards of a run of this plan have in common."""
        sweep = self.sweep
        return RunSpec(
            run_id=run_id,
            sweep=sweep.name,
            sweep_sha=self.sha,
            target=sweep.target_spec(),
            arms=tuple(arm.spec() for arm in sweep.arms),
            ignore_eos=sweep.ignore_eos,
            enable_thinking=sweep.enable_thinking,
            deadline_s=sweep.job_deadline_s,
            extra={"calibrate": sweep.calibrate},
        )

    def prompts(self) -> Iterator[PromptSpec]:
        """Every planned prompt, workload by workload."""
        for group in self.groups:
            yield from (group.prompts[index] for index in range(len(group.prompts)))

    def warmups(self) -> Iterator[PromptSpec]:
        """Every prompt that is reserved for warm-up."""
        for group in self.groups:
            yield from group.warmup

    def shards(self) -> Iterator[PlannedShard]:
        """Every shard in plan order, made one by one.

        All arms of one prompt, repeat by repeat and turn by turn; or, where an arm is carried, the workload's ordered
        prompts times all arms, once a repeat: a worker forgets what a carried arm learned where a repeat begins.
        """
        keys = [arm_key(self.sweep, arm, self.eos_ids) for arm in self.sweep.arms]
        for group in self.groups:
            size = len(group.prompts) if self.carried else 1
            for start in range(0, len(group.prompts), size):
                members = [group.prompts[index] for index in range(start, start + size)]
                histories = _histories(members) if self.carried else [""]
                jobs = tuple(self._jobs(members, histories, keys, start))
                yield PlannedShard(
                    shard_id=_digest([job.job_id for job in jobs]),
                    workload=group.workload,
                    prompt_ids=tuple(prompt.prompt_id for prompt in members),
                    jobs=jobs,
                    max_new_tokens=self._cap(members),
                )

    def _jobs(
        self, prompts: Sequence[PromptSpec], histories: Sequence[str], keys: Sequence[str], start: int
    ) -> Iterator[JobSpec]:
        arms = self.sweep.arms
        for repeat in range(self.sweep.repeats):
            for index, (prompt, history) in enumerate(zip(prompts, histories, strict=True), start=start):
                for turn in range(len(prompt.followups) + 1):
                    for place in range(len(arms)):
                        which = (place + index + repeat + turn) % len(arms)
                        past = history if arms[which].cache == "carried" else ""
                        yield JobSpec(
                            job_id=job_id(keys[which], prompt, turn=turn, repeat=repeat, history=past),
                            workload=prompt.workload,
                            prompt_id=turn_id(prompt.prompt_id, turn),
                            arm=arms[which].name,
                            repeat=repeat,
                            arm_order=place,
                            turn=turn,
                        )

    def _cap(self, prompts: Sequence[PromptSpec]) -> int:
        """The sweep's cap; a recorded prompt on its own cannot give more than was recorded."""
        recorded = prompts[0].recorded_ids
        if len(prompts) == 1 and recorded is not None and self.sweep.target == "recorded":
            return min(self.sweep.max_new_tokens, len(recorded))
        return self.sweep.max_new_tokens


def arm_key(sweep: Sweep, arm: Arm, eos_ids: frozenset[int]) -> str:
    """Digest of the part of a job's identity that all prompts of an arm share (docs/measurement.md §7)."""
    target = sweep.target_spec()
    model = sweep.model
    options = copy.deepcopy(arm.options)
    for file in registry.files(arm.drafter, options):
        if file.sha256 is not None:  # A file is its content; where it lies is of no account.
            del file.holder[file.option]
    pinned = {"digest": model.digest} if model.digest else {"id": model.id, "revision": model.revision}
    return _digest(
        {
            "target": target.kind,
            "model": pinned,
            "options": target.options,
            "dtype": target.dtype,
            "logits_dtype": target.logits_dtype,
            "engine": target.engine,
            "kv_repair": target.kv_repair,
            "attention": target.attention,
            "max_queries": target.max_queries,
            "buckets": target.buckets,
            "trust_remote_code": target.trust_remote_code,
            "enable_thinking": sweep.enable_thinking,
            "ignore_eos": sweep.ignore_eos,
            "eos_ids": sorted(eos_ids),
            "max_new_tokens": sweep.max_new_tokens,
            "arm": arm.name,
            "drafter": arm.drafter,
            "drafter_options": options,
            "drafter_source": arm.source,
            "cache": arm.cache,
        },
        digits=64,
    )


def job_id(arm: str, prompt: PromptSpec, *, turn: int = 0, repeat: int = 0, history: str = "") -> str:
    """A job's id from its arm's key and its prompt; `history` is the digest of a carried arm's earlier prompts."""
    recorded = "" if prompt.recorded_ids is None else _sha_of_ids(prompt.recorded_ids)
    later = list(prompt.followups[:turn])
    return _digest([arm, prompt.workload, prompt.prompt_id, prompt.prompt_sha, recorded, later, turn, repeat, history])


def _digest(value: Any, digits: int = ID_DIGITS) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()[:digits]


def _sha_of_ids(ids: Sequence[int]) -> str:
    return hashlib.sha256(array("i", ids).tobytes()).hexdigest()


def _histories(prompts: Sequence[PromptSpec]) -> list[str]:
    """For every prompt the digest of those before it, in order; empty for the first."""
    histories = [""]
    for prompt in prompts[:-1]:
        histories.append(_digest([histories[-1], prompt.prompt_id, prompt.prompt_sha, list(prompt.followups)]))
    return histories


def plan(sweep: Sweep) -> Plan:
    """Read and render every prompt of a sweep. Raises UsageError for whatever could not run as it stands.

    What cannot be had, model and data sets alike, is named in one error.
    """
    if sweep.target == "scripted":
        groups = tuple(_made_up(workload, sweep) for workload in sweep.workloads)
        return _checked(Plan(sweep, groups, frozenset({2}) if sweep.scripted.eos_at else frozenset()))
    missing: list[UsageError] = []
    renderer: render.Renderer | None = None
    try:
        renderer = render.open_renderer(sweep)
    except ModelError as error:
        missing.append(error)
    chosen: list[tuple[Workload, list[Row], list[Row]]] = []
    for workload in sweep.workloads:
        try:
            chosen.append((workload, *workloads.split(workload, workloads.load(workload), sweep.warmup)))
        except workloads.Unavailable as error:
            missing.append(error)
    if missing or renderer is None:
        raise (
            missing[0]
            if len(missing) == 1
            else UsageError("; ".join(str(error).rstrip(".") for error in missing) + ".")
        )
    groups = tuple(
        Group(
            workload.name,
            RenderedPrompts(workload.name, rows, [renderer.ids(workload.name, row) for row in rows]),
            tuple(RenderedPrompts(workload.name, warm, [renderer.ids(workload.name, row) for row in warm])),
        )
        for workload, rows, warm in chosen
    )
    return _checked(Plan(renderer.sweep, groups, renderer.eos_ids), renderer.context())


MOST_JOBS = 20_000_000
"""A ledger of more is gigabytes, and a sweep that asks for them has a typing error."""


def _checked(made: Plan, context: DrafterContext | None = None) -> Plan:
    """Raise UsageError for arms that cannot work: files that do not suit, later turns without AR's earlier answers."""
    for arm in made.sweep.arms:
        if registry.files(arm.drafter, arm.options):
            registry.create(arm.drafter, arm.options, context)
    if made.job_count > MOST_JOBS:
        raise SweepError(
            f"the sweep has {made.job_count} jobs, more than the {MOST_JOBS} that one run holds: lower `repeats` or "
            "`prompts`, or split it."
        )
    has_ar = any(arm.drafter == "ar" for arm in made.sweep.arms)
    for group in made.groups:
        if not has_ar and group.prompts.turns() > len(group.prompts):
            raise SweepError(
                f"workload '{group.workload}' has later turns, which hold AR's earlier answers: add the arm `ar`."
            )
    return made


class RenderedPrompts(Sequence[PromptSpec]):
    """Rows and their token ids, kept compactly; a `PromptSpec` is made when one is asked for."""

    def __init__(self, workload: str, rows: Sequence[Row], ids: Sequence[array[int]]) -> None:
        self._workload, self._rows, self._ids = workload, rows, ids

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptSpec:  # type: ignore[override]
        row, ids = self._rows[index], self._ids[index]
        return PromptSpec(
            workload=self._workload,
            prompt_id=row.prompt_id,
            source=row.source,
            text=row.text or next((m["content"] for m in reversed(row.messages) if m["role"] == "user"), ""),
            prompt_ids=tuple(ids),
            prompt_sha=_sha_of_ids(ids),
            messages=row.messages,
            followups=row.followups,
            recorded_ids=row.recorded_ids,
        )

    def turns(self) -> int:
        return len(self._rows) + sum(len(row.followups) for row in self._rows)

    def digest(self) -> str:
        sha = hashlib.sha256()
        for row, ids in zip(self._rows, self._ids, strict=True):
            sha.update(canonical([row.prompt_id, list(row.followups), list(row.recorded_ids or ())]))
            sha.update(ids.tobytes())
        return sha.hexdigest()


class MadeUpPrompts(Sequence[PromptSpec]):
    """Prompts of a scripted target: prompt i is the same whatever the number of prompts, and takes no memory."""

    def __init__(self, workload: str, count: int, options: Scripted, prefix: str = "p") -> None:
        self._workload, self._count, self._options, self._prefix = workload, count, options, prefix

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> PromptSpec:  # type: ignore[override]
        if not 0 <= index < self._count:
            raise IndexError(index)
        name, options = f"{self._prefix}{index}", self._options
        seed = f"{options.seed}/{self._workload}/{name}".encode()
        noise = array("H", hashlib.shake_128(seed).digest(2 * options.prompt_tokens))
        ids = tuple(3 + value % (options.vocab - 3) for value in noise)
        return PromptSpec(self._workload, name, "scripted", "", ids, _sha_of_ids(ids))

    def turns(self) -> int:
        return self._count

    def digest(self) -> str:
        return _digest([self._count, self._options.model_dump()])


def _made_up(workload: Workload, sweep: Sweep) -> Group:
    count = workload.prompts or sweep.scripted.prompts
    return Group(
        workload.name,
        MadeUpPrompts(workload.name, count, sweep.scripted),
        tuple(MadeUpPrompts(workload.name, sweep.warmup, sweep.scripted, prefix="w")),
    )

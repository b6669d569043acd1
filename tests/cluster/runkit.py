"""Makes small runs of a scripted target for the tests of ledger, commit, driver and chaos."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dfbench.cluster.commit import FinishedShard
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.runspec import PlannedShard, RunSpec, ShardReader, write_prompts
from dfbench.workers.actor import Worker
from dfbench.workers.spec import ArmSpec, JobSpec, PromptSpec, TargetSpec

ARMS = (ArmSpec("ar", "ar"), ArmSpec("pld", "pld"))
CARRIED = (ArmSpec("ar", "ar"), ArmSpec("cacheback", "cacheback", {}, "carried"))


def prompt(name: str, length: int = 6, workload: str = "w") -> PromptSpec:
    """A prompt of `length` tokens that depend on its name."""
    ids = tuple(3 + (sum(map(ord, name)) + i) % 50 for i in range(length))
    return PromptSpec(workload, name, "test", name, ids, f"sha-{name}")


def planned(shards: int, arms: tuple[ArmSpec, ...] = ARMS, cap: int = 12) -> Iterator[PlannedShard]:
    """One shard a prompt, all arms in it, in a rotating order."""
    for i in range(shards):
        order = [arms[(i + k) % len(arms)] for k in range(len(arms))]
        jobs = [JobSpec(f"j{i}-{arm.name}", "w", f"p{i}", arm.name, arm_order=k) for k, arm in enumerate(order)]
        yield PlannedShard(f"s{i}", "w", [f"p{i}"], jobs, cap)


def whole(prompts: int, arms: tuple[ArmSpec, ...] = CARRIED, cap: int = 12) -> Iterator[PlannedShard]:
    """One ordered shard of all prompts times all arms, as a carried arm needs it."""
    jobs = [JobSpec(f"j{i}-{arm.name}", "w", f"p{i}", arm.name) for i in range(prompts) for arm in arms]
    yield PlannedShard("all", "w", [f"p{i}" for i in range(prompts)], jobs, cap)


def make_run(
    run_dir: Path,
    shards: int,
    *,
    arms: tuple[ArmSpec, ...] = ARMS,
    plan: Iterator[PlannedShard] | None = None,
    warmups: int = 1,
    deadline_s: float | None = None,
    **options: Any,
) -> Ledger:
    """A planned run of a scripted target with these options."""
    run_dir.mkdir(parents=True, exist_ok=True)
    target = TargetSpec(kind="scripted", options=options)
    run = RunSpec("run", "test", "sha", target, arms, deadline_s=deadline_s)
    write_prompts(run_dir, [prompt(f"p{i}") for i in range(shards)], [prompt(f"warm{i}") for i in range(warmups)])
    return Ledger.create(run_dir, run, planned(shards, arms) if plan is None else plan)


def work(ledger: Ledger, limit: int = 10**6, worker: Worker | None = None) -> list[FinishedShard]:
    """Run what is left of a run in this process, as a worker would: no driver, no Ray, nothing committed."""
    if worker is None:
        worker = Worker(ledger.run.target, "here")
        ready = worker.load()
        ledger.add_worker(worker.worker_id, "here", ready.facts.device, ready.info)
    reader = ShardReader(ledger.run_dir, ledger.run)
    finished = []
    for row in ledger.pending(limit):
        shard = FinishedShard(reader.shard(row), worker.worker_id, "here")
        shard.parts = list(worker.run(shard.spec))
        finished.append(shard)
    return finished

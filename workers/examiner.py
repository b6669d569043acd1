"""The guard's worker: the same device and target as any worker, but it examines finished jobs instead of running new
ones. Its jobs are named after the guard's own, its rows after the jobs that they are about."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from dfbench.errors import DfbenchError
from dfbench.workers.actor import Worker
from dfbench.workers.failing import describe, failure_kind
from dfbench.workers.parts import JobOutcome, Part
from dfbench.workers.spec import GuardJob, GuardSpec, guard_id
from dfbench.workers.witness import guard_table

if TYPE_CHECKING:
    from dfbench.workers.engine import TorchTarget


class Examiner(Worker):
    """Runs `GuardSpec`s: each job's witness rows are one part; what examining a job raises fails that job alone."""

    def run(self, shard: GuardSpec) -> Iterator[Part]:  # type: ignore[override]
        """Examine a prompt's jobs one by one."""
        for job in shard.jobs:
            outcome, table = self._examine(shard, job)
            unusable = outcome.kind in ("oom", "device")
            tables = {} if table is None else {"witness": table}
            yield Part(shard.shard_id, shard.attempt, (outcome,), tables, unusable)
            if unusable:
                return

    def _examine(self, shard: GuardSpec, job: GuardJob) -> tuple[JobOutcome, pa.Table | None]:
        running, job_id = self._running, guard_id(job.job_id, job.attempt)
        running.began, running.job_id = time.monotonic(), job_id
        try:
            if self._target is None or self._facts is None:
                raise DfbenchError("the worker has no target: load it first.")
            return JobOutcome(job_id, job.arm), guard_table(cast("TorchTarget", self._target), shard, job, self._facts)
        except Exception as error:
            return JobOutcome(job_id, job.arm, failure_kind(error), describe(error)), None
        finally:
            running.job_id = ""
            running.count += 1

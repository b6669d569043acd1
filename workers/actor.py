"""The worker: a plain class that holds one target on one device and runs shards on it.

`cluster.driver` makes it remote. It runs a shard's jobs back to back and hands records over between jobs, never inside
one. What a job raises is an outcome of that job; the others' rows stand. `pulse` and `stop` are called from other
threads while a job runs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from dfbench.drafters import registry
from dfbench.drafters.base import Drafter, DrafterContext
from dfbench.errors import Cancelled, DfbenchError
from dfbench.workers import provenance, shipped
from dfbench.workers.failing import describe, failure_kind
from dfbench.workers.faults import reach
from dfbench.workers.loop import Trace, decode
from dfbench.workers.parts import Gatherer, JobOutcome, Part
from dfbench.workers.records import JobRows, WorkerFacts, job_row, outcome_row, tables
from dfbench.workers.shipped import Shipped
from dfbench.workers.spec import ArmSpec, JobSpec, PromptSpec, ShardSpec, TargetSpec
from dfbench.workers.target import RecordedTarget, ScriptedTarget, Target, scripted_rule

if TYPE_CHECKING:
    from dfbench.workers.fastpath import Replayed
    from dfbench.workers.telemetry import Monitor

WARMUP_PREFIX = "warmup:"
ANY_DEVICE = "any device"
"""The device of rows that no device decides."""


class Pulse(NamedTuple):
    """Where a worker is: the job it runs, since when, and a number that grows with every step of it."""

    job_id: str
    seconds: float
    progress: int


class Ready(NamedTuple):
    """What a worker says once it has its target: who and what it is, and which ids end an output."""

    facts: WorkerFacts
    eos_ids: frozenset[int]
    info: dict[str, Any]


@dataclass
class _Running:
    """The job at hand, as other threads see it."""

    job_id: str = ""
    began: float = 0.0
    trace: Trace | None = None
    count: int = 0
    stopped: set[str] = field(default_factory=set)
    left: bool = False


class Worker:
    """One target on one device. `load` first, then `run` a shard at a time."""

    def __init__(self, target: TargetSpec, node: str = "", worker_id: str | None = None) -> None:
        self.spec = target
        self.node = node or socket.gethostname()
        self.worker_id = worker_id or f"{self.node}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._running = _Running()
        self._warm: set[str] = set()
        self._drafters: dict[str, Drafter] = {}
        self._target: Target | None = None
        self._facts: WorkerFacts | None = None
        self._monitor: Monitor | None = None
        self._calibrated = False
        self._context = DrafterContext()

    def load(self, *files: Shipped) -> Ready:
        """Load the target and keep the drafters' files; say what it is. Raises what the loader raises."""
        reach("worker.load")
        shipped.keep(files)
        target = load_target(self.spec)
        info = provenance.worker_facts(target) | {"pid": os.getpid(), "node": self.node}
        info["eos_ids"] = sorted(target.eos_ids)
        if target.kind == "recorded":
            info |= self.spec.options.get("labels", {})  # what is known about the model that was recorded
        self._target, self._monitor, self._context = target, open_monitor(target), drafter_context(target)
        facts = provenance.record_facts(info, self.worker_id)
        # What is recorded comes out the same everywhere: a cluster of several devices must not split a figure.
        self._facts = replace(facts, device=ANY_DEVICE) if target.kind == "recorded" else facts
        return Ready(facts, frozenset(target.eos_ids), info)

    def pulse(self) -> Pulse:
        """Where this worker is. Safe to call while a job runs, from another thread."""
        running = self._running
        trace = running.trace
        steps = len(trace.steps) if trace is not None else 0
        seconds = time.monotonic() - running.began if running.job_id else 0.0
        return Pulse(running.job_id, seconds, running.count * 1_000_000 + steps)

    def stop(self, job_id: str, leave: bool = False) -> None:
        """Tell this job to stop at its next step; it ends as cancelled. Safe to call while it runs.

        With `leave` no other job of its shard begins either.
        """
        running = self._running
        running.left = running.left or leave
        running.stopped.add(job_id)
        if running.job_id == job_id and running.trace is not None:
            running.trace.stop = True

    def run(self, shard: ShardSpec) -> Iterator[Part]:
        """Run a shard's jobs in order and yield their records, in parts of about a second or a job, if it is longer."""
        self._running.left = False
        if shard.calibrate and not self._calibrated:
            yield self._calibration(shard)
        parts = Gatherer(shard, self._join)
        for outcome, record in self._outcomes(shard):
            unusable = outcome.kind in ("oom", "device")
            parts.add(outcome, record)
            if unusable or parts.due():
                yield parts.take(unusable)
            if unusable:
                return
            if self._running.left:
                break
        yield parts.take(False)

    def _calibration(self, shard: ShardSpec) -> Part:
        """What passes cost here, once a worker, in a few seconds; no rows for a target without a model."""
        self._calibrated = True
        target, facts = self._target, self._facts
        tables: dict[str, pa.Table] = {}
        if target is not None and facts is not None and target.kind == "torch":
            from dfbench.workers import calibrate

            rows = calibrate.calibrate(target, facts, calibrate.SHORT, shard.run_id)  # type: ignore[arg-type]
            tables["calibration"] = rows
        return Part(shard.shard_id, shard.attempt, (), tables)

    def _outcomes(self, shard: ShardSpec) -> Iterator[tuple[JobOutcome, JobRows | Replayed | None]]:
        yield from self._warm_up(shard)
        arms = {arm.name: arm for arm in shard.arms}
        broken: dict[str, JobOutcome] = {}
        repeat = 0
        conversation = _Conversation(shard, self._target)
        for job in shard.jobs:
            arm = arms[job.arm]
            if job.repeat != repeat:
                repeat = job.repeat
                self._forget()
            if arm.name in broken:
                yield broken[arm.name]._replace(job_id=job.job_id), None
                continue
            outcome, record, trace = self._job(shard, job, arm, conversation)
            if trace is not None:
                conversation.heard(job, arm, trace)
            elif arm.cache == "carried":
                # Its later jobs depend on what it would have learned here.
                message = f"an earlier job of this carried arm failed ({job.job_id})."
                broken[arm.name] = outcome._replace(message=message)
            yield outcome, record

    def _warm_up(self, shard: ShardSpec) -> Iterator[tuple[JobOutcome, JobRows | Replayed | None]]:
        """Before the first shard of a workload: its reserved prompts through every arm; then all state is cleared."""
        if shard.workload not in self._warm:
            for prompt in shard.warmup:
                for order, arm in enumerate(shard.arms):
                    job_id = f"{WARMUP_PREFIX}{shard.shard_id}:{shard.attempt}:{prompt.prompt_id}:{arm.name}"
                    job = JobSpec(job_id, shard.workload, prompt.prompt_id, arm.name, arm_order=order)
                    outcome, record, _ = self._attempt(shard, job, arm, prompt, warmup=True)
                    yield outcome._replace(warmup=True), record
            self._warm.add(shard.workload)
        self._forget()

    def _forget(self) -> None:
        """Clear what every drafter has learned: before a shard, and where a repeat begins."""
        for drafter in self._drafters.values():
            drafter.reset()

    def _job(
        self, shard: ShardSpec, job: JobSpec, arm: ArmSpec, conversation: _Conversation
    ) -> tuple[JobOutcome, JobRows | Replayed | None, Trace | None]:
        try:
            prompt = conversation.prompt(job)
        except Exception as error:
            return _outcome(job, "error", describe(error)), None, None
        return self._attempt(shard, job, arm, prompt)

    def _attempt(
        self, shard: ShardSpec, job: JobSpec, arm: ArmSpec, prompt: PromptSpec, *, warmup: bool = False
    ) -> tuple[JobOutcome, JobRows | Replayed | None, Trace | None]:
        """One job; whatever it raises becomes its outcome."""
        running = self._running
        trace = Trace(stop=job.job_id in running.stopped)
        running.trace, running.began, running.job_id = trace, time.monotonic(), job.job_id
        try:
            record = self._record(shard, job, arm, prompt, trace, warmup)
        except Cancelled:
            return _outcome(job, "cancelled", "the job was told to stop."), None, None
        except Exception as error:
            return _outcome(job, failure_kind(error), describe(error)), None, None
        finally:
            running.job_id, running.trace = "", None
            running.count += 1
        return _outcome(job), record, trace

    def _record(
        self, shard: ShardSpec, job: JobSpec, arm: ArmSpec, prompt: PromptSpec, trace: Trace, warmup: bool
    ) -> JobRows | Replayed:
        target, facts = self._target, self._facts
        if target is None or facts is None:
            raise DfbenchError("the worker has no target: load it first.")
        drafter = self._drafter(arm)
        if isinstance(target, RecordedTarget):
            return self._replayed(shard, job, arm, prompt, target, drafter, warmup)
        if arm.cache != "carried":
            drafter.reset()
        target.top_k = drafter.top_k
        eos_ids = frozenset() if shard.ignore_eos else target.eos_ids
        began_at = time.time_ns() // 1000
        reach("worker.job")
        run = decode
        if getattr(drafter, "generates", False) and target.kind == "torch":
            from dfbench.workers.hf import hf_run as run  # type: ignore[assignment]
        with _gc_frozen(), _watched(self._monitor) as seen:
            run(target, drafter, prompt.prompt_ids, max_new_tokens=shard.max_new_tokens, eos_ids=eos_ids, trace=trace)
        row = job_row(shard, job, arm, prompt, self.spec, facts, began_at=began_at, warmup=warmup)
        row |= outcome_row(trace, timed=target.timed, **seen)
        return JobRows(row, trace, target.timed)

    def _replayed(
        self,
        shard: ShardSpec,
        job: JobSpec,
        arm: ArmSpec,
        prompt: PromptSpec,
        target: RecordedTarget,
        drafter: Drafter,
        warmup: bool,
    ) -> Replayed:
        """One job of a recorded target: no clock runs, and rows are made for many jobs at once."""
        from dfbench.workers import fastpath

        assert self._facts is not None
        began_at = time.time_ns() // 1000
        reach("worker.job")
        decoded = fastpath.decode(
            drafter,
            prompt.prompt_ids,
            prompt.recorded_ids or (),
            target=target,
            max_new_tokens=shard.max_new_tokens,
            eos_ids=frozenset() if shard.ignore_eos else target.eos_ids,
            cold=arm.cache != "carried",
        )
        row = job_row(shard, job, arm, prompt, self.spec, self._facts, began_at=began_at, warmup=warmup)
        return fastpath.Replayed(row, decoded)

    def _join(self, records: Sequence[Any]) -> dict[str, pa.Table]:
        """The rows of several jobs as one table of each kind."""
        if isinstance(self._target, RecordedTarget):
            from dfbench.workers import fastpath

            return fastpath.tables(records, keep_ids=self.spec.options.get("keep_ids", True))
        return tables(records)

    def _drafter(self, arm: ArmSpec) -> Drafter:
        drafter = self._drafters.get(arm.name)
        if drafter is None:
            drafter = self._drafters[arm.name] = registry.create(arm.drafter, arm.params, self._context)
        return drafter


class _Conversation:
    """The prompts of a shard's jobs: those of the plan, and later turns, rendered once AR has answered."""

    def __init__(self, shard: ShardSpec, target: Target | None) -> None:
        self._prompts = {prompt.prompt_id: prompt for prompt in shard.prompts}
        self._shard = shard
        self._target = target

    def prompt(self, job: JobSpec) -> PromptSpec:
        prompt = self._prompts.get(job.prompt_id)
        if prompt is None:
            raise DfbenchError(
                f"turn {job.turn + 1} of '{job.prompt_id}' has no prompt: AR did not answer the last one."
            )
        return prompt

    def heard(self, job: JobSpec, arm: ArmSpec, trace: Trace) -> None:
        """AR's answer makes the next turn's prompt."""
        prompt = self._prompts[job.prompt_id]
        if arm.drafter != "ar" or not prompt.followups:
            return
        following = self._target.next_turn(prompt, trace.output, self._shard.enable_thinking)  # type: ignore[union-attr]
        self._prompts.setdefault(following.prompt_id, following)


def load_target(spec: TargetSpec) -> Target:
    """The target that a spec describes; torch is imported only where it is needed."""
    options = spec.options
    if spec.kind == "scripted":
        step_ms = float(options.get("step_ms", 0.0))
        eos = frozenset({2}) if options.get("eos_at") else frozenset()
        step_ns = int(step_ms * 1e6)
        return ScriptedTarget(
            scripted_rule(options),
            vocab_size=int(options.get("vocab", 64)),
            eos_ids=eos,
            cost=lambda queries: step_ns or 1_000_000,
            sleep=step_ns > 0,
        )
    if spec.kind == "recorded":
        recorded = RecordedTarget(int(options.get("vocab_size") or 2**31 - 1), frozenset(options.get("eos_ids") or ()))
        recorded.max_nodes = spec.max_queries - 1
        return recorded
    from dfbench.workers import engine

    return engine.load_target(spec)


def drafter_context(target: Target) -> DrafterContext:
    """What drafters may know of this target; a frozen table refuses another tokenizer than its own."""
    tokenizer = getattr(target, "tokenizer", None)
    digest = None
    if tokenizer is not None:
        from dfbench.workers.models import tokenizer_hash

        digest = tokenizer_hash(tokenizer)
    return DrafterContext(target.vocab_size, frozenset(target.eos_ids), digest, shipped.here())


def open_monitor(target: Target) -> Monitor | None:
    """What watches the target's device while a job runs; a target without a model is not worth watching."""
    if target.kind != "torch":
        return None
    from dfbench.workers import telemetry

    device = target.device  # type: ignore[attr-defined]
    if device.type != "cuda":
        return telemetry.open_monitor()
    import torch

    return telemetry.open_monitor(str(torch.cuda.get_device_properties(device).uuid))


def _outcome(job: JobSpec, kind: str = "", message: str = "") -> JobOutcome:
    return JobOutcome(job.job_id, job.arm, kind, message, job.pair_only)


@contextlib.contextmanager
def _gc_frozen() -> Iterator[None]:
    """No garbage collection inside: it would fall into the timed region of whichever job it hits."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _watched(monitor: Monitor | None) -> Iterator[dict[str, Any]]:
    """What the device did meanwhile: filled in at the end, empty where nothing watches it."""
    seen: dict[str, Any] = {}
    if monitor is None:
        yield seen
        return
    monitor.begin()
    yield seen
    telemetry = monitor.end()
    seen.update(throttled=telemetry.throttled, telemetry=telemetry.as_json())

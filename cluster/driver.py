"""The driver: next shard → dispatch → collect → commit, until nothing is left.

It owns the queue, the ledger and the files; Ray carries calls and tables. Retries, deadlines and the reading of
failures are here, since Ray's own retry of a stream splices two attempts and its cancel does not stop an actor's call.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import ray

from dfbench.cluster import guard, pool, upkeep
from dfbench.cluster.commit import Committer, FinishedShard
from dfbench.cluster.events import Events
from dfbench.cluster.failures import classify
from dfbench.cluster.ledger import Counts, Failure, Ledger, driver_lock
from dfbench.cluster.pool import Device, Member
from dfbench.cluster.queue import Health, Queue
from dfbench.cluster.runspec import ShardReader
from dfbench.errors import ClusterError, DfbenchError, UsageError
from dfbench.workers.actor import JobOutcome, Part, Worker
from dfbench.workers.examiner import Examiner
from dfbench.workers.faults import reach


@dataclass(frozen=True)
class Options:
    """How to drive a run; nothing here changes what is measured. Times are in seconds.

    `max_attempts`: attempts at a shard that may be lost to infrastructure. `poison_after`: lost attempts in a row that
    set a node aside. `progress_s`: a job that makes no step for this long is stopped; `silence_s`: a worker that does
    not answer for this long is given up. `grace_s`: how long a job may take to stop before its worker is killed.
    `setup_s`: time for loading a model. `patience_s`: how long to wait for a first or another worker.
    """

    address: str = "local"
    workers: int | None = None
    workers_per_node: int | None = None
    device: str | None = None
    max_attempts: int = 3
    poison_after: int = 3
    cooldown_s: float = 70.0
    progress_s: float = 300.0
    silence_s: float = 60.0
    grace_s: float = 10.0
    setup_s: float = 1800.0
    patience_s: float = 120.0
    commit_s: float = 2.0
    allow_version_change: bool = False


class Progress(NamedTuple):
    """Where a run stands: jobs by state, jobs a second, seconds left (None before anything is known), workers."""

    counts: Counts
    rate: float
    eta_s: float | None
    elapsed_s: float
    workers: int
    loading: int
    in_flight: int


class Result(NamedTuple):
    """How a driver left its run: the ledger's state, the jobs' states, and what was worth telling on the way."""

    state: str
    counts: Counts
    notes: list[str]


OnProgress = Callable[[Progress], None]
OnFiles = Callable[[Path], None]
OnNote = Callable[[str], None]


def run(
    run_dir: Path,
    options: Options | None = None,
    *,
    on_progress: OnProgress | None = None,
    on_files: OnFiles | None = None,
    on_note: OnNote | None = None,
) -> Result:
    """Run what is left of a run, on a Ray cluster, to its end. Everything finished survives whatever stops it.

    `on_progress` is called about twice a second, `on_files` whenever other record files are committed, `on_note` with
    each sentence a person should read. Raises RunError when another driver is at work, ClusterError when no cluster or
    worker can be had, and what loading the target raises when no worker can do it.
    """
    options = options or Options()
    with driver_lock(run_dir), Ledger.open(run_dir) as ledger:
        ledger.check_versions(allow_change=options.allow_version_change)
        driver = Driver(ledger, options, on_progress, on_files, on_note)
        try:
            return driver.drive()
        except (OSError, sqlite3.OperationalError) as error:
            raise DfbenchError(
                f"the run cannot be written to {run_dir} ({error}): make room, then run the same command again."
            ) from error
        finally:
            driver.close()


@dataclass
class _Pace:
    """Jobs done since this driver began, for rate and remaining time."""

    began: float = field(default_factory=time.monotonic)
    first: float = 0.0
    done: int = 0

    def add(self, jobs: int) -> None:
        self.first = self.first or time.monotonic()
        self.done += jobs

    def rate(self) -> float:
        return self.done / max(time.monotonic() - self.began, 1e-9)


class Driver:
    """One sweep's driver. `drive` is its life; `step` is one turn of its loop."""

    def __init__(
        self,
        ledger: Ledger,
        options: Options,
        on_progress: OnProgress | None = None,
        on_files: OnFiles | None = None,
        on_note: OnNote | None = None,
    ) -> None:
        self.ledger, self.options = ledger, options
        self._on_progress, self._on_files, self._on_note = on_progress, on_files, on_note
        self.events = Events(ledger.run_dir)
        self.notes: list[str] = []
        self.members: list[Member] = []
        self.queue = Queue(ledger.pending, max_attempts=options.max_attempts)
        self.health = Health(options.poison_after, options.cooldown_s)
        guards = guard.EXAMINES in ledger.run.extra
        self._reader = (guard.GuardReader if guards else ShardReader)(ledger.run_dir, ledger.run)
        self._worker = Examiner if guards else Worker
        self._devices: list[Device] = []
        self._setup_error: BaseException | None = None
        self._pace = _Pace()
        self._at: dict[str, float] = {}
        self._data_version = 0
        self._cancelled = False
        self._connected = False
        self._files: list[object] | None = None

    # --- its life ----------------------------------------------------------------------------------------------

    def drive(self) -> Result:
        """Recover, run everything that is left, compact, and leave the ledger in order."""
        for note in upkeep.recover(self.ledger):
            self._note(note)
        self.ledger.begin()
        self.counts = self.ledger.counts()
        self._committer = Committer(self.ledger, max_age_s=self.options.commit_s)
        self._data_version = self.ledger.data_version()
        self._files_changed()
        self.events.event("begin", left=self.counts.pending, address=self.options.address)
        try:
            if not self.queue.finished():
                pool.connect(self.options.address, workers=self.options.workers or self.options.workers_per_node)
                self._connected = True
                while not self.finished():
                    self.step()
                self._commit(force=True)
        except BaseException as error:
            self.events.event("stopped", error=f"{type(error).__name__}: {error}")
            self._rescue()
            raise
        upkeep.compact(self.ledger, at_least=upkeep.COMPACT_AT_END)
        state = self.ledger.end()
        self._files_changed()
        self._report(force=True)
        self.events.event("end", state=state)
        return Result(state, self.ledger.counts(), self.notes)

    def step(self) -> None:
        """One turn: see who is there, hand out shards, take in what came back, commit."""
        self._look_around()
        self._dispatch()
        self._collect()
        self._watch()
        self._commit()
        self._report()

    def finished(self) -> bool:
        """Whether nothing is left, or the run was cancelled and nobody is at work any more."""
        if self._cancelled:
            return not any(member.shard for member in self.members)
        return not any(member.shard for member in self.members) and self._settled_all()

    def _settled_all(self) -> bool:
        """Nobody is at work. With nothing left to hand out, the last group is committed without waiting for more."""
        if not self.queue.empty():
            return False
        self._commit(force=True)
        return self.queue.finished()

    def close(self) -> None:
        """End the workers; leave Ray where this process started or joined it."""
        for member in self.members:
            member.kill()
        self.members = []
        self.events.close()
        if self._connected:
            ray.shutdown()

    def _rescue(self) -> None:
        """On the way out: commit what is finished, if the disk lets us."""
        try:
            self._commit(force=True)
            self.ledger.end()
        except (OSError, sqlite3.Error) as error:
            self.events.event("rescue failed", error=str(error))

    # --- nodes and workers -------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        if not self._every("nodes", 1.0):
            return
        self._heed_requests()
        known = {device.node.node_id for device in self._devices}
        nodes = pool.live_nodes()
        target = self.ledger.run.target
        per_node, wanted = self.options.workers_per_node, self.options.device
        self._devices = pool.devices(nodes, target, workers_per_node=per_node, device=wanted)
        present = {device.node.node_id: device.node for device in self._devices}
        for node_id in present.keys() - known:
            self.events.event("node joined", node=present[node_id].name)
        for node_id in known - present.keys():
            self.events.event("node left", node_id=node_id)
        self._hire()
        self._check_patience()

    def _hire(self) -> None:
        taken = {member.device.key for member in self.members}
        room = (self.options.workers or len(self._devices)) - len(self.members)
        for device in self._devices:
            if room <= 0 or self.queue_is_short():
                return
            if device.key not in taken and self.health.usable(device.node.node_id, time.monotonic()):
                if self._files is None:
                    self._files = pool.ship(self.ledger.run.arms)
                member = pool.hire(device, self.ledger.run.target, self._worker, self._files)
                self.members.append(member)
                self.events.event("worker hired", worker=member.worker_id, node=member.node)
                room -= 1

    def queue_is_short(self) -> bool:
        """Whether the workers there are, loading ones included, will do for what is left."""
        return len(self.members) >= max(1, self.counts.pending)

    def _check_patience(self) -> None:
        """Give up when nobody is there to work, and say why."""
        if self.members:
            self._at["alone"] = time.monotonic()
            return
        poisoned = self.health.poisoned()
        waited = time.monotonic() - self._at.setdefault("alone", time.monotonic())
        if self._devices and all(device.node.node_id in poisoned for device in self._devices):
            if isinstance(self._setup_error, UsageError):
                raise self._setup_error
            reasons = "; ".join(sorted({*poisoned.values()}))
            raise ClusterError(f"every node is set aside ({reasons}): see log/driver.jsonl in the run directory.")
        if waited > self.options.patience_s:
            raise ClusterError(
                f"no worker could be had for {waited:.0f} s: `dfbench nodes` lists the cluster's devices and what is "
                "wrong with each."
            )

    def _heed_requests(self) -> None:
        """Another process may have cancelled the run or marked shards for retry."""
        version = self.ledger.data_version()
        if version == self._data_version:
            return
        self._data_version = version
        self.counts = self.ledger.counts()
        self.queue.clear()
        if self.ledger.state == "cancelled" and not self._cancelled:
            self._cancelled = True
            self._note("the run was cancelled: running jobs are told to stop.")

    # --- dispatch ----------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        if self._cancelled:
            return
        here = {member.device.node.node_id for member in self.members}
        for member in self.members:
            node = member.device.node.node_id
            if not member.idle or not self.health.usable(node, time.monotonic()):
                continue
            row = self.queue.take(node, here)
            if row is None:
                continue
            shard = FinishedShard(self._reader.shard(row), member.worker_id, member.node)
            member.begin(row, shard)
            reach("driver.dispatched")

    # --- collect -----------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take in everything that has come, waiting a moment for the first of it."""
        waiting = {id(member.waitable()): member for member in self.members if member.waitable() is not None}
        if not waiting:
            time.sleep(0.05)
            return
        things = [member.waitable() for member in waiting.values()]
        ready, rest = ray.wait(things, num_returns=1, timeout=0.2)
        if ready and rest:
            more, _ = ray.wait(rest, num_returns=len(rest), timeout=0)
            ready += more
        for thing in ready:
            member = waiting[id(thing)]
            try:
                self._receive(member)
            except ray.exceptions.RayError as error:
                self._lost(member, *classify(error), error)

    def _receive(self, member: Member) -> None:
        if member.loading is not None:
            member.ready, member.loading = ray.get(member.loading), None
            self._joined(member)
            return
        try:
            part: Part = ray.get(next(member.stream))
        except StopIteration:
            self._finished(member)
            return
        member.heard = member.moved = time.monotonic()
        if member.shard is not None:
            member.shard.parts.append(part)
            self._log_part(member, part)
        if part.unusable:
            self._finished(member)
            self._dismiss(member, "its device is in no state to go on")
            if part.outcomes[-1].kind == "device":
                self._blame(member, "device", part.shard_id)

    def _joined(self, member: Member) -> None:
        ready = member.ready
        if ready is None:
            return
        facts = ready.facts
        if self.options.device and not pool.is_device(self.options.device, facts.device):
            self._dismiss(member, f"its device is a {facts.device}")
            self.health.bad(member.device.node.node_id, "node", "device", float("inf"))
            return
        self._committer.eos_ids = () if self.ledger.run.ignore_eos else ready.eos_ids
        self.ledger.add_worker(member.worker_id, member.node, facts.device, ready.info)
        self.events.event("worker ready", worker=member.worker_id, node=member.node, device=facts.device)

    def _finished(self, member: Member) -> None:
        """The stream ended: the attempt is over and waits for its commit."""
        broken = member.shard is not None and any(part.unusable for part in member.shard.parts)
        if member.shard is not None:
            self._committer.add(member.shard)
            reach("driver.collected")
        member.end()
        if not broken:
            self.health.good(member.device.node.node_id)

    def _log_part(self, member: Member, part: Part) -> None:
        for outcome in part.outcomes:
            if outcome.kind:
                self.events.event(
                    "job failed", shard=part.shard_id, job=outcome.job_id, kind=outcome.kind, node=member.node
                )
        self.events.shard(part.shard_id, "\n".join(_lines(member, part)))

    def _lost(self, member: Member, kind: str, message: str, error: BaseException | None = None) -> None:
        """A worker is gone, and with it what it was doing."""
        if member.loading is not None:
            self._setup_error = getattr(error, "cause", None) or error
            kind = "setup" if kind == "error" else kind
            if isinstance(self._setup_error, UsageError) and len(self.members) == 1:
                # Nobody else is there to do it, and trying again would not help: the request itself is wrong.
                raise self._setup_error
        self.events.event("worker lost", worker=member.worker_id, node=member.node, kind=kind, message=message)
        row = member.row
        culprit = row.shard_id if row is not None else member.worker_id
        failure = Failure(
            row.shard_id if row else None, None, row.attempt if row else 0, kind, message, member.node, member.worker_id
        )
        if row is None:
            self.ledger.fail_attempt(failure)
        elif kind == "error":
            # `run` turns what jobs raise into outcomes: what still comes out is a defect that would come again.
            self.ledger.fail_attempt(failure, final=True)
            self.queue.settled(row.shard_id)
        else:
            last = self.queue.lost(row, member.device.node.node_id)
            self.ledger.fail_attempt(failure, final=last)
            self.events.shard(row.shard_id, f"attempt {row.attempt} lost on {member.worker_id}: {kind}: {message}")
            if last:
                self._note(f"shard {row.shard_id} failed: {self.options.max_attempts} attempts were lost ({kind}).")
        member.end()
        self._dismiss(member, message)
        if kind != "error":
            self._blame(member, kind, culprit)

    def _blame(self, member: Member, kind: str, culprit: str) -> None:
        node_id = member.device.node.node_id
        already = node_id in self.health.poisoned()
        reason = self.health.bad(node_id, kind, culprit, time.monotonic())
        if reason and not already:
            self._note(f"node {member.node} is set aside: {reason}.")
            self.events.event("node set aside", node=member.node, reason=reason)

    def _dismiss(self, member: Member, why: str) -> None:
        """The worker goes; its device may get another one."""
        member.kill()
        if member in self.members:
            self.members.remove(member)
        if member.ready is not None:
            self.ledger.worker_left(member.worker_id)
        self.events.event("worker left", worker=member.worker_id, why=why)

    # --- deadlines ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Ask quiet workers how they are, and act on jobs that are stuck and workers that do not answer."""
        now = time.monotonic()
        for member in list(self.members):
            if member.loading is not None:
                if now - member.since > self.options.setup_s:
                    self._lost(member, "setup", f"no target after {self.options.setup_s:.0f} s")
            elif member.shard is not None:
                try:
                    self._watch_one(member, now)
                except ray.exceptions.RayError as error:
                    self._lost(member, *classify(error), error)

    def _watch_one(self, member: Member, now: float) -> None:
        options = self.options
        if member.pulse is None:
            if now - max(member.pulse_sent, member.heard) >= min(2.0, options.progress_s / 4):
                member.ask_pulse()
            return
        answered, _ = ray.wait([member.pulse], timeout=0)
        if not answered:
            if now - max(member.pulse_sent, member.heard) > options.silence_s:
                self._lost(member, "node", f"no answer for {options.silence_s:.0f} s")
            return
        pulse = ray.get(member.pulse)
        member.pulse, member.heard = None, now
        if member.last is None or (pulse.job_id, pulse.progress) != (member.last.job_id, member.last.progress):
            member.moved = now
        if member.last is None or pulse.job_id != member.last.job_id:
            member.stop_sent = 0.0
        member.last = pulse
        if pulse.job_id:
            self._judge(member, now)

    def _judge(self, member: Member, now: float) -> None:
        """Whether the job at hand has used up one of its deadlines, or its time to stop."""
        pulse, shard = member.last, member.shard
        if pulse is None or shard is None:
            return
        if member.stop_sent:
            if now - member.stop_sent > self.options.grace_s:
                self._cut_off(member, pulse.job_id)
            return
        kind = ""
        if self._cancelled:
            kind = "cancelled"
        elif now - member.moved > self.options.progress_s:
            kind = "stalled"
        elif shard.spec.deadline_s is not None and pulse.seconds > shard.spec.deadline_s:
            kind = "deadline"
        if kind:
            shard.stopped[pulse.job_id] = kind
            member.stop(pulse.job_id)
            self.events.event("job told to stop", job=pulse.job_id, kind=kind, worker=member.worker_id)

    def _cut_off(self, member: Member, job_id: str) -> None:
        """The job does not stop: it has failed, its worker is replaced, the rest of the shard runs again."""
        row, shard = member.row, member.shard
        if row is None or shard is None:
            return
        kind = shard.stopped.get(job_id, "stalled")
        if kind != "cancelled":
            message = f"it did not stop within {self.options.grace_s:.0f} s; its worker was replaced"
            failure = Failure(row.shard_id, job_id, row.attempt, kind, message, member.node, member.worker_id)
            self.ledger.fail_jobs([failure])
        self.queue.settled(row.shard_id)
        member.end()
        self._dismiss(member, f"job {job_id} did not stop")

    # --- commit ------------------------------------------------------------------------------------------------

    def _commit(self, *, force: bool = False) -> None:
        if not (force or self._committer.due()):
            return
        outcomes = self._committer.flush()
        for outcome in outcomes:
            self.queue.settled(outcome.shard_id)
            self._count(len(outcome.done), sum(f.job_id is not None for f in outcome.failures))
        if outcomes:
            self._note_running()
            self._files_changed()
            if upkeep.compact(self.ledger):
                self._files_changed()

    def _count(self, done: int, failed: int) -> None:
        counts = self.counts
        self._pace.add(done + failed)
        self.counts = Counts(
            max(counts.pending - done - failed, 0), counts.done + done, counts.failed + failed, counts.cancelled
        )

    def _note_running(self) -> None:
        placed = {member.row.shard_id: member.worker_id for member in self.members if member.row is not None}
        self.ledger.set_running(placed)

    def _files_changed(self) -> None:
        if self._on_files is not None:
            self._on_files(self.ledger.run_dir)

    # --- telling -----------------------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.events.event("note", text=text)
        if self._on_note is not None:
            self._on_note(text)

    def _report(self, *, force: bool = False) -> None:
        if self._on_progress is None or not (force or self._every("report", 0.5)):
            return
        rate = self._pace.rate()
        left = self.counts.pending
        loading = sum(member.loading is not None for member in self.members)
        self._on_progress(
            Progress(
                self.counts,
                rate,
                left / rate if rate > 0 else None,
                time.monotonic() - self._pace.began,
                len(self.members) - loading,
                loading,
                sum(member.shard is not None for member in self.members),
            )
        )

    def _every(self, what: str, seconds: float) -> bool:
        now = time.monotonic()
        if now - self._at.get(what, -1e9) < seconds:
            return False
        self._at[what] = now
        return True


def _lines(member: Member, part: Part) -> Iterator[str]:
    yield f"attempt {part.attempt} on {member.worker_id} ({member.node}): {len(part.outcomes)} jobs"
    for outcome in part.outcomes:
        if outcome.kind:
            yield f"  {_name(outcome)} {outcome.kind}: {outcome.message}"


def _name(outcome: JobOutcome) -> str:
    return f"{outcome.job_id} ({outcome.arm})"

"""The driver: next shard → dispatch → collect → commit, until nothing is left.

It owns the queue, the ledger and the files; Ray carries calls and tables. Retries, deadlines and the reading of
failures are the driver's, since Ray's own retry of a stream splices two attempts and its cancel does not stop an
actor's call. Who works is in `staff`, what is stuck in `deadlines`, what people hear in `telling`.
"""

from __future__ import annotations

import sqlite3
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import ray

from dfbench.cluster import deadlines, guard, pool, session, staff, start, upkeep
from dfbench.cluster.commit import Committer, FinishedShard
from dfbench.cluster.failures import classify
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.ledger_schema import CANCELLED, Counts, Failure
from dfbench.cluster.notice import Notice
from dfbench.cluster.pool import Member
from dfbench.cluster.queue import Health, Queue
from dfbench.cluster.run_place import driver_lock, unwritable
from dfbench.cluster.runspec import ShardReader
from dfbench.cluster.staff import Staff, Terms
from dfbench.cluster.telling import OnFiles, OnNote, OnProgress, Progress, Result, Teller
from dfbench.errors import DfbenchError
from dfbench.workers.actor import Worker
from dfbench.workers.examiner import Examiner
from dfbench.workers.faults import reach
from dfbench.workers.parts import Part

__all__ = ["Driver", "OnFiles", "OnNote", "OnProgress", "Options", "Progress", "Result", "run"]

LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Options:
    """How to drive a run; nothing here changes what is measured. Times are in seconds.

    `max_attempts`: attempts at a shard that may be lost to infrastructure. `poison_after`: lost attempts in a row that
    set a node aside. `progress_s`: a job that makes no step for this long is stopped; `silence_s`: a worker that does
    not answer for this long is given up. `grace_s`: how long a job may take to stop before its worker is killed.
    `setup_s`: time for loading a model. `patience_s`: how long to wait for a first or another worker; None is
    `staff.PATIENCE_S`, and no time at all for a device that no node has.
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
    patience_s: float | None = None
    commit_s: float = 2.0
    allow_version_change: bool = False


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
                f"{unwritable(run_dir, error)} ({error}): make room, then give the same command again, which goes on "
                "from what is committed."
            ) from error
        finally:
            driver.close()


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
        measures = bool(ledger.run.extra.get("calibrate")) and ledger.run.target.kind == "torch"
        self.teller = Teller(ledger.run_dir, on_progress, on_files, on_note, measures=measures)
        self.events = self.teller.events
        self.queue = Queue(ledger.pending, max_attempts=options.max_attempts)
        self.health = Health(options.poison_after, options.cooldown_s)
        guards = guard.EXAMINES in ledger.run.extra
        self._reader = (guard.GuardReader if guards else ShardReader)(ledger.run_dir, ledger.run)
        terms = Terms(options.workers, options.workers_per_node, options.device, options.patience_s)
        self.staff = Staff(ledger, terms, self.health, self.teller, Examiner if guards else Worker)
        self._looked = float("-inf")
        self._placed: dict[str, str] = {}
        self._data_version = 0
        self._redo = False
        self._cancelled = False
        self._processes_lost = False
        self._notice: Notice | None = None

    # --- its life ----------------------------------------------------------------------------------------------

    def drive(self) -> Result:
        """Recover, run everything that is left, compact, and leave the ledger in order."""
        for note in upkeep.recover(self.ledger):
            self.teller.note(note)
        self.ledger.begin()
        self.counts = self.ledger.counts()
        self._committer = Committer(self.ledger, max_age_s=self.options.commit_s)
        self._data_version = self.ledger.data_version()
        self.teller.files_changed()
        self.events.event("begin", left=self.counts.pending, address=self.options.address)
        try:
            if not self.queue.finished():
                self._connect()
                while not self.finished():
                    self.step()
                self._commit(force=True)
        except BaseException as error:
            self.events.event("stopped", error=f"{type(error).__name__}: {error}")
            self._rescue()
            raise
        upkeep.compact(self.ledger, at_least=upkeep.COMPACT_AT_END)
        state = self.ledger.end()
        self.teller.files_changed()
        self._report(force=True)
        self.events.event("end", state=state)
        return Result(state, self.ledger.counts(), self.teller.notes)

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
        if any(member.shard for member in self.staff.members):
            return False
        return self._cancelled or self._settled_all()

    def _settled_all(self) -> bool:
        """Nobody is at work. With nothing left to hand out, the last group is committed without waiting for more."""
        if not self.queue.empty():
            return False
        self._commit(force=True)
        return self.queue.finished()

    def close(self) -> None:
        """End the workers and leave Ray; one that was started here ends, and its logs stay where they are needed."""
        self.staff.close()
        if self._notice is not None:
            self._notice.withdraw()
            if (kept := session.end(keep=self._unexplained())) is not None:
                self.teller.note(f"Ray's own logs of what failed are kept in {kept}.")
        self.events.close()

    def _unexplained(self) -> bool:
        """Whether the run failed by something that the run's own log does not account for: a lost process, a defect."""
        error = sys.exception()
        if error is None:
            return self._processes_lost and self.ledger.counts().failed > 0
        return self._processes_lost or not isinstance(error, DfbenchError | KeyboardInterrupt)

    def _connect(self) -> None:
        options = self.options
        # On a Ray of its own, as on nodes that joined, a device is known before anything is loaded on it.
        labels = start.device_label() if options.device and options.address == "local" else None
        pool.connect(options.address, workers=options.workers or options.workers_per_node, labels=labels)
        self._notice = Notice()

    def _rescue(self) -> None:
        """On the way out: commit what is finished, if the disk lets us."""
        try:
            self._commit(force=True)
            self.ledger.end()
        except (OSError, sqlite3.Error) as error:
            self.events.event("rescue failed", error=str(error))

    # --- the world outside -------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        self._heed_requests()
        self.staff.look_around(self.counts.pending)
        self._note_placed()
        if self._notice is not None:
            self._notice.post(self.staff.members, self.health.poisoned())

    def _heed_requests(self) -> None:
        """Another process may have cancelled the run or marked shards for retry."""
        version = self.ledger.data_version()
        if version == self._data_version and not self._redo:
            return
        self._data_version = version
        if self.ledger.state == "cancelled" and not self._cancelled:
            self._cancelled = True
            self.teller.note("the run was cancelled: running jobs are told to stop.")
        self._redo = not self._cancelled and upkeep.redo(self.ledger, self.queue.busy)
        self.counts = self.ledger.counts()
        self.queue.clear()

    def _note_placed(self, *, again: bool = False) -> None:
        """Write down which shard is where, when that has changed; `again` after a commit, which settles shards."""
        placed = staff.placed(self.staff.members)
        if again or placed != self._placed:
            self._placed = placed
            self.ledger.set_running(placed)

    # --- dispatch ----------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        if self._cancelled:
            return
        here = {member.device.node.node_id for member in self.staff.members}
        for member in self.staff.members:
            if not member.idle or not self.staff.usable(member):
                continue
            row = self.queue.take(member.device.node.node_id, here)
            if row is None:
                continue
            shard = FinishedShard(self._reader.shard(row), member.worker_id, member.node)
            member.begin(row, shard)
            reach("driver.dispatched")

    # --- collect -----------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take in everything that has come, waiting a moment for the first of it."""
        waiting = {id(member.waitable()): member for member in self.staff.members if member.waitable() is not None}
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
            if self.staff.welcome(member):
                self._committer.eos_ids = () if self.ledger.run.ignore_eos else member.ready.eos_ids
            return
        try:
            part: Part = ray.get(next(member.stream))
        except StopIteration:
            self._finished(member)
            return
        member.heard = member.moved = time.monotonic()
        if member.shard is not None:
            member.shard.parts.append(part)
            self.teller.part(member, part)
        if part.unusable:
            self._finished(member)
            self.staff.dismiss(member, "its device is in no state to go on")
            if part.outcomes[-1].kind == "device":
                self.staff.blame(member, "device", part.shard_id)

    def _finished(self, member: Member) -> None:
        """The stream ended: the attempt is over and waits for its commit."""
        broken = member.shard is not None and any(part.unusable for part in member.shard.parts)
        if member.shard is not None:
            self._committer.add(member.shard)
            reach("driver.collected")
        member.end()
        if not broken:
            self.health.good(member.device.node.node_id)

    def _lost(self, member: Member, kind: str, message: str, error: BaseException | None = None) -> None:
        """A worker is gone, and with it what it was doing."""
        kind = self.staff.lost(member, kind, message, error)
        self._processes_lost |= kind not in ("error", "setup")
        row = member.row
        if row is not None:
            self._attempt_lost(member, kind, message)
        member.end()
        self.staff.dismiss(member, message)
        if kind != "error":
            self.staff.blame(member, kind, member.worker_id if row is None else row.shard_id)

    def _attempt_lost(self, member: Member, kind: str, message: str) -> None:
        row = member.row
        assert row is not None
        failure = Failure(row.shard_id, None, row.attempt, kind, message, member.node, member.worker_id)
        if kind == "error":
            # `run` turns what jobs raise into outcomes: what still comes out is a defect that would come again.
            self.ledger.fail_attempt(failure, final=True)
            self.queue.settled(row.shard_id)
            return
        last = self.queue.lost(row, member.device.node.node_id)
        self.ledger.fail_attempt(failure, final=last)
        self.events.shard(row.shard_id, f"attempt {row.attempt} lost on {member.worker_id}: {kind}: {message}")
        if last:
            self.teller.note(f"shard {row.shard_id} failed: {self.options.max_attempts} attempts were lost ({kind}).")

    # --- deadlines ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Act on jobs that are stuck and workers that do not answer."""
        for member in list(self.staff.members):
            try:
                found = deadlines.check(member, self.options, cancelled=self._cancelled)
            except ray.exceptions.RayError as error:
                self._lost(member, *classify(error), error)
                continue
            if found is None:
                continue
            if found.what == "lost":
                self._lost(member, found.kind, found.message)
            elif found.what == "stop" and member.shard is not None:
                member.shard.stopped[found.job_id] = found.kind
                member.stop(found.job_id, leave=self._cancelled)
                self.events.event("job told to stop", job=found.job_id, kind=found.kind, worker=member.worker_id)
            elif found.what == "cut off":
                self._cut_off(member, found.job_id, found.kind)

    def _cut_off(self, member: Member, job_id: str, kind: str) -> None:
        """The job does not stop: it has failed, its worker is replaced, the rest of the shard runs again."""
        row = member.row
        if row is None:
            return
        message = f"it did not stop within {self.options.grace_s:.0f} s; its worker was replaced"
        failure = Failure(row.shard_id, job_id, row.attempt, kind, message, member.node, member.worker_id)
        self.ledger.fail_jobs([failure])
        self.queue.settled(row.shard_id)
        member.end()
        self.staff.dismiss(member, f"job {job_id} did not stop")

    # --- commit ------------------------------------------------------------------------------------------------

    def _commit(self, *, force: bool = False) -> None:
        if not (force or self._committer.due()):
            return
        outcomes = self._committer.flush()
        for outcome in outcomes:
            self.queue.settled(outcome.shard_id)
            if self._notice is not None:
                self._notice.count(outcome.worker_id, len(outcome.done))
            failed = [f for f in outcome.failures if f.job_id is not None and f.kind != CANCELLED]
            self._count(len(outcome.done), len(failed))
        if outcomes:
            self._note_placed(again=True)
            self.teller.files_changed()
            if upkeep.compact(self.ledger):
                self.teller.files_changed()

    def _count(self, done: int, failed: int) -> None:
        counts = self.counts
        self.teller.settled += done + failed
        self.counts = Counts(
            max(counts.pending - done - failed, 0), counts.done + done, counts.failed + failed, counts.cancelled
        )

    def _report(self, *, force: bool = False) -> None:
        self.teller.progress(self.counts, self.staff.members, force=force)

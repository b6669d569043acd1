"""Deadlines: which jobs are stuck, which workers no longer answer, and what is to be done about it.

A worker is asked how it is while it is quiet. The driver acts on what is found; nothing is changed here but what is
known about a worker.
"""

from __future__ import annotations

import time
from typing import Literal, NamedTuple, Protocol

import ray

from dfbench.cluster.pool import Member
from dfbench.workers.actor import Pulse

ASK_EVERY_S = 2.0
"""A worker is asked when it was quiet for this long, or for a quarter of the progress deadline."""


class Limits(Protocol):
    """The driver's options that matter here, in seconds."""

    @property
    def progress_s(self) -> float: ...
    @property
    def silence_s(self) -> float: ...
    @property
    def grace_s(self) -> float: ...
    @property
    def setup_s(self) -> float: ...


class Finding(NamedTuple):
    """What is wrong with a worker or its job. `lost`: give the worker up; `stop`: tell the job to stop; `cut off`: it
    was told and did not. `kind` and `message` are the ledger's."""

    what: Literal["lost", "stop", "cut off"]
    kind: str
    message: str = ""
    job_id: str = ""


def check(member: Member, limits: Limits, *, cancelled: bool = False) -> Finding | None:
    """Ask a worker how it is, read its answer, and say what is wrong. Raises what Ray raises for a dead one."""
    now = time.monotonic()
    if member.loading is not None:
        if not _arrived(member, now):
            return None  # Others use its device; that may take as long as a sweep.
        late = now - member.since > limits.setup_s
        return Finding("lost", "setup", f"no target after {limits.setup_s:.0f} s") if late else None
    if member.shard is None:
        return None
    quiet = now - max(member.pulse_sent, member.heard)
    if member.pulse is None:
        if quiet >= min(ASK_EVERY_S, limits.progress_s / 4):
            member.ask_pulse()
        return None
    answered, _ = ray.wait([member.pulse], timeout=0)
    if not answered:
        silent = quiet > limits.silence_s
        return Finding("lost", "node", f"no answer for {limits.silence_s:.0f} s") if silent else None
    _hear(member, ray.get(member.pulse), now)
    return _judge(member, limits, cancelled, now)


def _arrived(member: Member, now: float) -> bool:
    """Whether the worker's process is there: the time for loading counts from then on."""
    if member.arriving is not None and ray.wait([member.arriving], timeout=0)[0]:
        member.arriving, member.since = None, now
    return member.arriving is None


def _hear(member: Member, pulse: Pulse, now: float) -> None:
    """Note what a worker said: whether its job has moved, whether it is another one."""
    last = member.last
    member.pulse, member.heard, member.last = None, now, pulse
    if last is None or (pulse.job_id, pulse.progress) != (last.job_id, last.progress):
        member.moved = now
    if last is None or pulse.job_id != last.job_id:
        member.stop_sent = 0.0


def _judge(member: Member, limits: Limits, cancelled: bool, now: float) -> Finding | None:
    """Whether the job at hand has used up one of its deadlines, or its time to stop."""
    pulse, shard = member.last, member.shard
    if pulse is None or shard is None or not pulse.job_id:
        return None
    if member.stop_sent:
        late = now - member.stop_sent > limits.grace_s
        return Finding("cut off", shard.stopped.get(pulse.job_id, "stalled"), "", pulse.job_id) if late else None
    kind = ""
    if cancelled:
        kind = "cancelled"
    elif now - member.moved > limits.progress_s:
        kind = "stalled"
    elif shard.spec.deadline_s is not None and pulse.seconds > shard.spec.deadline_s:
        kind = "deadline"
    return Finding("stop", kind, "", pulse.job_id) if kind else None

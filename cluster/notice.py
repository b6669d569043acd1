"""What a driver writes on the head about its work, once a second, for `dfbench nodes` to read from anywhere.

One value in the head's key-value store a driver, under its Ray job, which the head knows to be over when the driver is
gone, however it went: no clock is compared. Nothing depends on it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dfbench.cluster.head import NAMESPACE, NOTICES, Head

if TYPE_CHECKING:
    from dfbench.cluster.pool import Member


@dataclass
class Work:
    """What drivers say about one node: shards in hand, jobs a second since its first worker, why it is set aside."""

    shards: list[str] = field(default_factory=list)
    rate: float | None = None
    aside: str = ""


class Notice:
    """This driver's notice; Ray is connected already."""

    def __init__(self) -> None:
        # Slow to import, and not needed by who only reads.
        ray: Any = import_module("ray")
        self._store: Any = import_module("ray.experimental.internal_kv")
        self._unable = (ray.exceptions.RayError, RuntimeError)
        self._key = NOTICES + ray.get_runtime_context().get_job_id().encode()
        self._since: dict[str, float] = {}
        self._done: dict[str, int] = {}
        self._node_of: dict[str, str] = {}

    def count(self, worker_id: str, jobs: int) -> None:
        """This worker has done so many jobs more, perhaps before it was first posted."""
        self._done[worker_id] = self._done.get(worker_id, 0) + jobs

    def post(self, members: Sequence[Member], poisoned: Mapping[str, str]) -> None:
        """Say what every node works on now, and which are set aside."""
        now = time.monotonic()
        work = {node_id: Work(aside=reason) for node_id, reason in poisoned.items()}
        for member in members:
            if member.ready is None:
                continue
            node_id = self._node_of[member.worker_id] = member.device.node.node_id
            self._since.setdefault(node_id, now)
            here = work.setdefault(node_id, Work())
            if member.row is not None:
                here.shards.append(member.row.shard_id)
        done: dict[str, int] = {}
        for worker_id, jobs in self._done.items():
            if (node := self._node_of.get(worker_id)) is not None:
                done[node] = done.get(node, 0) + jobs
        for node_id, since in self._since.items():
            if node_id in work and done.get(node_id) and now > since:
                work[node_id].rate = done[node_id] / (now - since)
        text = json.dumps(as_notice(work))
        with contextlib.suppress(*self._unable):
            self._store._internal_kv_put(self._key, text.encode(), namespace=NAMESPACE)

    def withdraw(self) -> None:
        """This driver is done."""
        with contextlib.suppress(*self._unable):
            self._store._internal_kv_del(self._key, namespace=NAMESPACE)


def read(head: Head) -> dict[str, Work]:
    """By node id, what the drivers at work on this cluster say."""
    found: dict[str, Work] = {}
    for notice in head.notices:
        for node_id, told in notice.items():
            known = {key: told[key] for key in Work.__dataclass_fields__ if key in told}  # it may be a newer dfbench
            found[node_id] = _add(found.get(node_id, Work()), Work(**known))
    return found


def _add(one: Work, other: Work) -> Work:
    rates = [rate for rate in (one.rate, other.rate) if rate is not None]
    return Work(one.shards + other.shards, sum(rates) if rates else None, other.aside or one.aside)


def as_notice(work: Mapping[str, Work]) -> dict[str, Any]:
    """As a driver writes it."""
    return {node_id: asdict(one) for node_id, one in work.items()}

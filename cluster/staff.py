"""The workers of a driver: who is there, who is hired, who is let go, and which nodes are left alone.

A worker is hired for every device that is free and usable, as nodes come and go; a node on which work gets lost rests,
and one on which it keeps getting lost is set aside.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dfbench.cluster import pool
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.ledger_schema import Failure
from dfbench.cluster.pool import Device, Member, Node
from dfbench.cluster.queue import Health
from dfbench.cluster.stack import device as device_of
from dfbench.cluster.telling import Teller
from dfbench.errors import ClusterError, UsageError
from dfbench.workers.actor import Worker

PATIENCE_S = 120.0
"""How long a driver waits for a first or another worker, unless told otherwise."""


@dataclass(frozen=True)
class Terms:
    """On which devices workers may live, how many, and how long to wait for one. See `driver.Options`."""

    workers: int | None
    per_node: int | None
    device: str | None
    patience_s: float | None


class Staff:
    """The workers of one driver. `setup_error`: the last reason why one could not load its target."""

    def __init__(
        self, ledger: Ledger, terms: Terms, health: Health, teller: Teller, worker: type[Worker] = Worker
    ) -> None:
        self._ledger, self._terms, self._teller, self._worker = ledger, terms, teller, worker
        self.health = health
        self.members: list[Member] = []
        self.setup_error: BaseException | None = None
        self._nodes: list[Node] = []
        self._devices: list[Device] = []
        self._files: list[Any] | None = None
        self._unlike: dict[str, str] = {}
        self._alone_since = time.monotonic()

    # --- who is there ------------------------------------------------------------------------------------------

    def look_around(self, jobs_left: int) -> None:
        """See which nodes have come and gone, and hire for what is left. Raises ClusterError when nobody is to come."""
        known = {device.node.node_id for device in self._devices}
        self._nodes = pool.live_nodes()
        terms = self._terms
        self._devices = pool.devices(
            self._nodes, self._ledger.run.target, workers_per_node=terms.per_node, device=terms.device
        )
        present = {device.node.node_id: device.node for device in self._devices}
        for node_id in present.keys() - known:
            self._teller.events.event("node joined", node=present[node_id].name, node_id=node_id)
        for node_id in known - present.keys():
            self._teller.events.event("node left", node_id=node_id)
        for member in [one for one in self.members if one.arriving is not None]:
            if member.device.node.node_id not in present:
                self.dismiss(member, "its node left before it was there")
        self._hire(jobs_left)
        self._check_patience()

    def usable(self, member: Member) -> bool:
        """Whether this worker's node may have work now."""
        return self.health.usable(member.device.node.node_id, time.monotonic())

    def _hire(self, jobs_left: int) -> None:
        taken = {member.device.key for member in self.members}
        # Loading workers count: no more are hired than there are jobs left.
        room = min(self._terms.workers or len(self._devices), max(1, jobs_left)) - len(self.members)
        for device in self._devices:
            if room <= 0:
                return
            if device.key not in taken and self.health.usable(device.node.node_id, time.monotonic()):
                if self._files is None:
                    self._files = pool.ship(self._ledger.run.arms)
                member = pool.hire(device, self._ledger.run.target, self._worker, self._files)
                self.members.append(member)
                self._teller.events.event("worker hired", worker=member.worker_id, node=member.node)
                room -= 1

    # --- nobody is there ---------------------------------------------------------------------------------------

    def _check_patience(self) -> None:
        """Give up when nobody is there to work, and say why."""
        patient = self._terms.patience_s is None  # for a device that is in use: others will be done
        if any(patient or not member.waiting for member in self.members):
            self._alone_since = time.monotonic()
            return
        poisoned = self.health.poisoned()
        if self._devices and all(device.node.node_id in poisoned for device in self._devices):
            if isinstance(self.setup_error, UsageError):
                raise self.setup_error
            if self._terms.device is None or not self._unlike.keys() >= {d.node.node_id for d in self._devices}:
                reasons = "; ".join(sorted({*poisoned.values()}))
                raise ClusterError(f"every node is set aside ({reasons}): see log/driver.jsonl in the run directory.")
            self._no_such_device()
        elif self._terms.device is not None and not self._devices:
            self._no_such_device()
        waited = time.monotonic() - self._alone_since
        if waited > (PATIENCE_S if self._terms.patience_s is None else self._terms.patience_s):
            why = (
                "all are in use, see `dfbench nodes`"
                if self.members
                else "`dfbench nodes` says what is wrong with each"
            )
            wanted = f" '{self._terms.device}'" if self._terms.device is not None else ""
            raise ClusterError(f"no device{wanted} could be had for {waited:.0f} s: {why}.")

    def _no_such_device(self) -> None:
        """Every device that is there is another one than was asked for: no use to wait, unless that is wanted."""
        wanted = str(self._terms.device)
        there = {self._unlike.get(node.node_id) or device_of(node.labels) for node in self._nodes} - {""}
        if self._terms.patience_s is not None or not there or any(pool.is_device(wanted, name) for name in there):
            return
        raise UsageError(
            f"no node has a device '{wanted}', only {', '.join(sorted(there))}: write "
            "--device with one of these, or --patience with the seconds to wait for another to join."
        )

    # --- coming and going --------------------------------------------------------------------------------------

    def welcome(self, member: Member) -> bool:
        """A worker has its target. Whether it stays: its device must be one of those wanted."""
        ready, wanted = member.ready, self._terms.device
        if ready is None:
            return False
        device = f"{ready.info.get('device_kind', 'cpu')} {ready.facts.device}"
        if wanted and not pool.is_device(wanted, device):
            self._unlike[member.device.node.node_id] = ready.facts.device
            self.health.set_aside(member.device.node.node_id, f"its device is a {ready.facts.device}")
            self.dismiss(member, f"its device is a {ready.facts.device}")
            return False
        self._ledger.add_worker(member.worker_id, member.node, ready.facts.device, ready.info)
        self._teller.events.event("worker ready", worker=member.worker_id, node=member.node, device=ready.facts.device)
        return True

    def lost(self, member: Member, kind: str, message: str, error: BaseException | None) -> str:
        """A worker is gone; returns the kind of failure, `setup` where it never had its target.

        Raises what it raised when the request itself is wrong and nobody else is there to do better.
        """
        if member.loading is not None:
            self.setup_error = getattr(error, "cause", None) or error
            kind = "setup" if kind == "error" else kind
            if isinstance(self.setup_error, UsageError) and len(self.members) == 1:
                raise self.setup_error
        self._teller.events.event("worker lost", worker=member.worker_id, node=member.node, kind=kind, message=message)
        if member.row is None:
            self._ledger.fail_attempt(Failure(None, None, 0, kind, message, member.node, member.worker_id))
        return kind

    def blame(self, member: Member, kind: str, culprit: str) -> None:
        """Work was lost on this worker's node."""
        node_id = member.device.node.node_id
        already = node_id in self.health.poisoned()
        reason = self.health.bad(node_id, kind, culprit, time.monotonic())
        if reason and not already:
            self._teller.note(f"node {member.node} is set aside: {reason}.")
            self._teller.events.event("node set aside", node=member.node, reason=reason)

    def dismiss(self, member: Member, why: str) -> None:
        """The worker goes; its device may get another one."""
        member.kill()
        if member in self.members:
            self.members.remove(member)
        if member.ready is not None:
            self._ledger.worker_left(member.worker_id)
        self._teller.events.event("worker left", worker=member.worker_id, why=why)

    def close(self) -> None:
        """End all workers."""
        for member in self.members:
            member.kill()
        self.members = []


def placed(members: Sequence[Member]) -> dict[str, str]:
    """Which shard is on which worker now."""
    return {member.row.shard_id: member.worker_id for member in members if member.row is not None}

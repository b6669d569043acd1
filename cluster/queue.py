"""The driver's queue, without Ray: which shard next, what after a failure, which node to leave alone for now.

The ledger holds every shard; the queue reads a window of those that are left, so its memory does not grow with the
plan. A shard that must run again is read again from the ledger, which knows what is left of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from dfbench.cluster.runspec import ShardRow

Source = Callable[[int, int], list[ShardRow]]
"""(limit, after position) → shards with work left, in plan order: `Ledger.pending`."""


class Queue:
    """Shards to dispatch, in plan order; those that failed on a node go elsewhere while there is an elsewhere."""

    def __init__(self, source: Source, *, max_attempts: int = 3, window: int = 256) -> None:
        self._source = source
        self._max_attempts = max_attempts
        self._window = window
        self._waiting: deque[ShardRow] = deque()
        self._busy: set[str] = set()
        self._avoid: dict[str, set[str]] = {}
        self._after = -1
        self._exhausted = False

    @property
    def busy(self) -> frozenset[str]:
        """Shards that are out: dispatched, or finished and not yet committed."""
        return frozenset(self._busy)

    def take(self, node: str, nodes: Collection[str] = ()) -> ShardRow | None:
        """The next shard for a worker on `node`; None when there is none for it now.

        `nodes` are those with workers. A shard that failed on this node waits for another, unless it failed on all.
        """
        for _ in range(2):
            for place, row in enumerate(self._waiting):
                avoid = self._avoid.get(row.shard_id, set())
                if node not in avoid or avoid.issuperset(nodes):
                    del self._waiting[place]
                    self._busy.add(row.shard_id)
                    return row
            if not self._refill():
                return None
        return None

    def settled(self, shard_id: str) -> None:
        """The ledger knows how this shard's attempt ended; what is left of it can be read again."""
        self._busy.discard(shard_id)
        self._avoid.pop(shard_id, None)
        self.wake()

    def lost(self, row: ShardRow, node: str) -> bool:
        """An attempt was lost through no fault of the shard. Whether that was the last one it may have."""
        self._busy.discard(row.shard_id)
        self._avoid.setdefault(row.shard_id, set()).add(node)
        self.wake()
        return row.strikes + 1 >= self._max_attempts

    def wake(self) -> None:
        """The ledger has changed: look for work again."""
        self._exhausted = False

    def clear(self) -> None:
        """Forget what was not dispatched yet: the ledger no longer wants it."""
        self._waiting.clear()
        self._after = -1
        self.wake()

    def empty(self) -> bool:
        """Whether there is nothing to dispatch now."""
        return not self._waiting and not self._refill()

    def finished(self) -> bool:
        """Whether nothing is out and nothing is left."""
        return not self._busy and self.empty()

    def _refill(self) -> bool:
        """Read on in the ledger, at most once around, until there is something new; whether there was."""
        if self._exhausted:
            return False
        start, wrapped = self._after, self._after < 0
        known = self._busy | {row.shard_id for row in self._waiting}
        while True:
            rows = self._source(self._window, self._after)
            if rows:
                self._after = rows[-1].position
                new = [row for row in rows if row.shard_id not in known]
                self._waiting.extend(new)
                if new:
                    return True
            if wrapped and (not rows or self._after >= start >= 0):
                self._after, self._exhausted = -1, True
                return False
            if not rows:
                self._after, wrapped = -1, True


@dataclass
class NodeHealth:
    """A node's failures in a row. `until`: left alone up to this time; `poisoned`: why it is set aside."""

    failures: int = 0
    culprits: set[str] = field(default_factory=set)
    until: float = 0.0
    poisoned: str = ""


@dataclass
class Health:
    """Which nodes may have work: a failing one rests, and `poison_after` failures in a row set it aside.

    Failures of one and the same shard count once: a shard that kills every worker is not the node's fault.
    """

    poison_after: int = 3
    cooldown_s: float = 70.0
    nodes: dict[str, NodeHealth] = field(default_factory=dict)

    def usable(self, node: str, now: float) -> bool:
        health = self.nodes.get(node)
        return health is None or (not health.poisoned and now >= health.until)

    def good(self, node: str) -> None:
        """A shard came back from this node."""
        health = self.nodes.get(node)
        if health is not None:
            health.failures, health.culprits = 0, set()

    def bad(self, node: str, kind: str, culprit: str, now: float) -> str:
        """An attempt was lost on this node. Returns why it is set aside from now on, or "".

        A node that died may still look alive for a minute, so it rests that long; a worker that died comes back
        after a pause that doubles.
        """
        health = self.nodes.setdefault(node, NodeHealth())
        health.failures += 1
        health.culprits.add(culprit)
        rest = self.cooldown_s if kind == "node" else min(0.25 * 2 ** (health.failures - 1), self.cooldown_s)
        health.until = now + rest
        if len(health.culprits) >= self.poison_after:
            health.poisoned = f"{health.failures} failures in a row, the last of kind '{kind}'"
        return health.poisoned

    def set_aside(self, node: str, reason: str) -> None:
        """This node gets no work, for a reason that is no failure of it."""
        self.nodes.setdefault(node, NodeHealth()).poisoned = reason

    def poisoned(self) -> dict[str, str]:
        """The nodes that are set aside, and why."""
        return {node: health.poisoned for node, health in self.nodes.items() if health.poisoned}

"""The driver's queue and its view of nodes, without Ray and without a ledger."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dfbench.cluster.queue import Health, Queue
from dfbench.cluster.runspec import ShardRow


class Shards:
    """A stand-in for the ledger: which shards are left, and how often each was lost."""

    def __init__(self, count: int) -> None:
        self.left = {f"s{i}": i for i in range(count)}
        self.strikes = dict.fromkeys(self.left, 0)
        self.asked = 0

    def pending(self, limit: int, after: int) -> list[ShardRow]:
        self.asked += 1
        rows = [(place, name) for name, place in self.left.items() if place > after]
        return [
            ShardRow(name, place, "w", (), 8, self.strikes[name] + 1, self.strikes[name], ())
            for place, name in sorted(rows)[:limit]
        ]


def test_shards_come_in_plan_order_once_each() -> None:
    shards = Shards(10)
    queue = Queue(shards.pending, window=3)
    taken = [queue.take("n") for _ in range(10)]
    assert [row.shard_id for row in taken if row] == [f"s{i}" for i in range(10)]
    assert queue.take("n") is None
    assert not queue.finished()
    shards.left.clear()
    for i in range(10):
        queue.settled(f"s{i}")
    assert queue.finished()


def test_an_empty_queue_asks_the_ledger_no_more_until_woken() -> None:
    shards = Shards(0)
    queue = Queue(shards.pending)
    assert queue.take("n") is None
    asked = shards.asked
    assert queue.take("n") is None
    assert shards.asked == asked
    shards.left["new"] = 3
    shards.strikes["new"] = 0
    queue.wake()
    row = queue.take("n")
    assert row is not None
    assert row.shard_id == "new"


def test_a_lost_shard_goes_elsewhere_while_there_is_an_elsewhere() -> None:
    shards = Shards(1)
    queue = Queue(shards.pending, max_attempts=3)
    row = queue.take("a", {"a", "b"})
    assert row is not None
    assert not queue.lost(row, "a")
    assert queue.take("a", {"a", "b"}) is None
    row = queue.take("b", {"a", "b"})
    assert row is not None
    assert not queue.lost(row, "b")
    assert queue.take("a", {"a", "b"}) is not None


def test_a_shard_may_be_lost_so_many_times() -> None:
    shards = Shards(1)
    queue = Queue(shards.pending, max_attempts=2)
    for last in (False, True):
        row = queue.take("a")
        assert row is not None
        assert queue.lost(row, "a") is last
        shards.strikes["s0"] += 1


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 7), st.lists(st.sampled_from(["take", "settle", "lose"]), max_size=200))
def test_nothing_is_out_twice_and_nothing_is_forgotten(count: int, window: int, moves: list[str]) -> None:
    shards = Shards(count)
    queue = Queue(shards.pending, max_attempts=10**9, window=window)
    out: list[ShardRow] = []
    done: set[str] = set()
    for move in [*moves, *["take", "settle"] * count * 2]:
        if move == "take":
            row = queue.take("n", {"n"})
            if row is not None:
                assert row.shard_id not in {other.shard_id for other in out} | done
                out.append(row)
        elif out:
            row = out.pop(0)
            if move == "settle":
                del shards.left[row.shard_id]
                done.add(row.shard_id)
                queue.settled(row.shard_id)
            else:
                queue.lost(row, "n")
    assert len(done) == count
    assert queue.finished()


def test_a_node_that_died_rests() -> None:
    health = Health(cooldown_s=70)
    assert health.usable("a", 0.0)
    assert health.bad("a", "node", "s1", 100.0) == ""
    assert not health.usable("a", 169.0)
    assert health.usable("a", 170.0)


def test_failures_in_a_row_set_a_node_aside() -> None:
    health = Health(poison_after=3, cooldown_s=70)
    assert not health.bad("a", "worker", "s1", 0.0)
    assert not health.bad("a", "worker", "s2", 0.0)
    health.good("a")
    assert not health.bad("a", "worker", "s1", 0.0)
    assert not health.bad("a", "worker", "s2", 0.0)
    assert "3 failures in a row" in health.bad("a", "memory", "s3", 0.0)
    assert not health.usable("a", 1e9)
    assert list(health.poisoned()) == ["a"]


def test_a_shard_that_kills_every_worker_is_not_the_nodes_fault() -> None:
    health = Health(poison_after=3)
    assert not any(health.bad("a", "worker", "s1", 0.0) for _ in range(10))

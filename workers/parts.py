"""What a worker hands over: how jobs ended, and their records, gathered into parts that are worth sending."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from dfbench.workers.faults import reach
from dfbench.workers.records import JobRows
from dfbench.workers.spec import ShardSpec

if TYPE_CHECKING:
    from dfbench.workers.fastpath import Replayed

HAND_OVER_S = 1.0
"""Records of quick jobs are gathered for this long before they are handed over."""


class JobOutcome(NamedTuple):
    """How one job ended: `kind` is "" for a job that has rows, else one of the ledger's kinds of failure."""

    job_id: str
    arm: str
    kind: str = ""
    message: str = ""
    pair_only: bool = False
    warmup: bool = False


@dataclass(frozen=True)
class Part:
    """Some finished jobs of a shard, tables without rows left out.

    `unusable`: the device is in no state to go on; replace the worker.
    """

    shard_id: str
    attempt: int
    outcomes: tuple[JobOutcome, ...]
    tables: dict[str, pa.Table]
    unusable: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        # One buffer a table: pickled as they are, small tables cost a buffer a column, which is most of a quick job.
        streams = {name: _stream(table) for name, table in self.tables.items()}
        return _unpacked, (self.shard_id, self.attempt, tuple(map(tuple, self.outcomes)), streams, self.unusable)


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _unpacked(
    shard_id: str, attempt: int, outcomes: Sequence[tuple[Any, ...]], streams: dict[str, bytes], unusable: bool
) -> Part:
    tables = {name: pa.ipc.open_stream(stream).read_all() for name, stream in streams.items()}
    return Part(shard_id, attempt, tuple(JobOutcome(*outcome) for outcome in outcomes), tables, unusable)


class Gatherer:
    """Gathers the records of quick jobs, so that a part is worth sending."""

    def __init__(self, shard: ShardSpec, join: Callable[[Sequence[Any]], dict[str, pa.Table]]) -> None:
        self._shard = shard
        self._join = join
        self._clear()

    def _clear(self) -> None:
        self._since = time.monotonic()
        self._outcomes: list[JobOutcome] = []
        self._records: list[JobRows | Replayed] = []

    def add(self, outcome: JobOutcome, record: JobRows | Replayed | None) -> None:
        self._outcomes.append(outcome)
        if record is not None:
            self._records.append(record)

    def due(self) -> bool:
        return time.monotonic() - self._since >= HAND_OVER_S

    def take(self, unusable: bool) -> Part:
        reach("worker.part")
        tables = self._join(self._records) if self._records else {}
        filled = {name: table for name, table in tables.items() if table.num_rows}
        part = Part(self._shard.shard_id, self._shard.attempt, tuple(self._outcomes), filled, unusable)
        self._clear()
        return part

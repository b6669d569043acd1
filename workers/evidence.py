"""The two highest logits behind every emitted token, gathered on the device and copied once a job."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dfbench.workers.host_rows import HostRows
from dfbench.workers.target import Evidence
from dfbench.workers.timing import to_device
from dfbench.workers.tree import is_prefix


def top_two(device: torch.device) -> TopTwo:
    """An empty table for logits on this device."""
    return HostTopTwo(device) if device.type == "cpu" else TopTwo(device)


class TopTwo:
    """A growing table on the device: ids, logits and number of ties of the emitted tokens' rows.

    The maximum and its id are those of the pass itself (`look`); the second is the maximum of the rest. `topk` is not
    used: which of two equal entries it puts first is unspecified. On a device that works while the host does, every row
    is looked at before the host learns which ones it needs, so that nothing waits for that (`ahead`).
    """

    def __init__(self, device: torch.device, capacity: int = 1024, ahead: bool | None = None) -> None:
        self._device = device
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._ids = torch.empty((capacity, 2), dtype=torch.int64, device=device)
        self._logits = torch.empty((capacity, 2), dtype=torch.float32, device=device)
        self._ties = torch.empty(capacity, dtype=torch.int32, device=device)
        self._count = 0
        self._maxima = self._argmax = torch.empty(0, device=device)
        self._columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def clear(self) -> None:
        """Begin a new job."""
        self._count = 0

    def look(self, rows: torch.Tensor) -> torch.Tensor:
        """Ids int64 [n] of the highest entry of every row of a pass's logits [n, vocabulary], the first where several
        are. Where the table works ahead, `rows` is spoilt for other uses."""
        maxima, argmax = rows.max(-1)
        self.hold(maxima, argmax, rows)
        return argmax

    def hold(self, maxima: torch.Tensor, argmax: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Maximum and its id for every row of the pass that `add` will choose from; `rows`, its logits, to look at
        now if that is how this table works, which spoils them for other uses."""
        self._maxima, self._argmax = maxima, argmax
        self._columns = _columns(rows, maxima, argmax) if self._ahead and rows is not None else None

    def add(self, rows: torch.Tensor, chosen: Sequence[int]) -> None:
        """Append the rows `chosen` of the pass's logits [n + 1, vocabulary]; `rows` is spoilt for other uses."""
        count = len(chosen)
        index = None if is_prefix(chosen) else to_device(torch.tensor(chosen), self._device)

        def pick(held: torch.Tensor) -> torch.Tensor:
            return held[:count] if index is None else held[index]

        if self._columns is None:
            columns = _columns(pick(rows), pick(self._maxima), pick(self._argmax))
        else:
            columns = tuple(pick(column) for column in self._columns)  # type: ignore[assignment]
        at = self._reserve(count)
        self._ids[at], self._logits[at], self._ties[at] = columns

    def read(self) -> Evidence:
        """Everything added since `clear`, as numpy arrays on the host."""
        ids, logits, ties = (table[: self._count].cpu() for table in (self._ids, self._logits, self._ties))
        # Copies: on the CPU these would be views of the table, which the next job overwrites.
        columns = (ids[:, 0], logits[:, 0], ids[:, 1], logits[:, 1], ties)
        return Evidence(*(column.numpy().copy() for column in columns))

    def _reserve(self, count: int) -> slice:
        """Places for this many rows more."""
        if self._count + count > self._ties.shape[0]:
            self._grow(count)
        at = slice(self._count, self._count + count)
        self._count += count
        return at

    def _grow(self, count: int) -> None:
        more = max(count, self._ties.shape[0])
        self._ids, self._logits, self._ties = (
            torch.cat([table, table.new_empty((more, *table.shape[1:]))])
            for table in (self._ids, self._logits, self._ties)
        )


class HostTopTwo(TopTwo):
    """The same table for logits on the CPU, where only the rows that count are looked at, after the pass."""

    def look(self, rows: torch.Tensor) -> torch.Tensor:
        entries = HostRows(rows)
        argmax = np.fromiter((entries.highest(row) for row in range(len(entries))), np.int64, len(entries))
        self._argmax = torch.from_numpy(argmax)
        return self._argmax

    def add(self, rows: torch.Tensor, chosen: Sequence[int]) -> None:
        at = self._reserve(len(chosen))
        ids, logits, ties = (table[at].numpy() for table in (self._ids, self._logits, self._ties))
        entries, argmax = HostRows(rows), self._argmax.tolist()
        for place, row in enumerate(chosen):
            ids[place], logits[place], ties[place] = _beside(entries, row, argmax[row])


def _beside(entries: HostRows, row: int, first: int) -> tuple[tuple[int, int], tuple[float, float], int]:
    """Ids and values of a row's highest entry, which is given, and its next, and how many tie at the top; blanks the
    first."""
    highest = entries.value(row, first)
    entries.blank(row, first)
    second = entries.highest(row)
    value = entries.value(row, second)
    if highest != highest:
        ties = 0  # NaN equals nothing.
    elif value < highest:
        ties = 1
    else:
        blank_counts = highest == -np.inf
        ties = entries.count(row, second) + (not blank_counts)
    return (first, second), (highest, value), ties


def _columns(
    rows: torch.Tensor, maxima: torch.Tensor, argmax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids [n, 2] and logits [n, 2] of each row's highest and next, and how many entries tie at the top; spoils
    `rows`."""
    ties = (rows == maxima[:, None]).sum(-1, dtype=torch.int32)
    second, second_ids = rows.scatter_(1, argmax[:, None], float("-inf")).max(-1)
    return torch.stack((argmax, second_ids), -1), torch.stack((maxima, second), -1), ties

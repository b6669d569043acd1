"""The two highest logits behind every emitted token, gathered on the device and copied once a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dfbench.workers.target import Evidence
from dfbench.workers.timing import to_device
from dfbench.workers.tree import is_prefix

if TYPE_CHECKING:
    from dfbench.workers.host_rows import HostTopTwo


def top_two(device: torch.device, dtype: torch.dtype) -> TopTwo | HostTopTwo:
    """An empty table for logits of this type on this device."""
    if device.type != "cpu":
        return TopTwo(device)
    from dfbench.workers.host_rows import HostTopTwo  # Brings numba, which a GPU has no use for.

    return HostTopTwo(dtype)


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
        self._maxima, self._argmax = rows.max(-1)
        self._columns = _columns(rows, self._maxima, self._argmax) if self._ahead else None
        return self._argmax

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
        if self._count + count > self._ties.shape[0]:
            self._grow(count)
        at = slice(self._count, self._count + count)
        self._ids[at], self._logits[at], self._ties[at] = columns
        self._count += count

    def read(self) -> Evidence:
        """Everything added since `clear`, as numpy arrays on the host."""
        ids, logits, ties = (table[: self._count].cpu() for table in (self._ids, self._logits, self._ties))
        # Copies: on the CPU these would be views of the table, which the next job overwrites.
        columns = (ids[:, 0], logits[:, 0], ids[:, 1], logits[:, 1], ties)
        return Evidence(*(column.numpy().copy() for column in columns))

    def _grow(self, count: int) -> None:
        more = max(count, self._ties.shape[0])
        self._ids, self._logits, self._ties = (
            torch.cat([table, table.new_empty((more, *table.shape[1:]))])
            for table in (self._ids, self._logits, self._ties)
        )


def _columns(
    rows: torch.Tensor, maxima: torch.Tensor, argmax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids [n, 2] and logits [n, 2] of each row's highest and next, and how many entries tie at the top; spoils
    `rows`."""
    ties = (rows == maxima[:, None]).sum(-1, dtype=torch.int32)
    second, second_ids = rows.scatter_(1, argmax[:, None], float("-inf")).max(-1)
    return torch.stack((argmax, second_ids), -1), torch.stack((maxima, second), -1), ties

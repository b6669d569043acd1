"""The two highest logits behind every emitted token, gathered on the device and copied once a job."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dfbench.workers.target import Evidence
from dfbench.workers.tree import is_prefix


class TopTwo:
    """A growing table on the device: ids, logits and number of ties of the emitted tokens' rows.

    The maximum and its id are those of the pass itself (`hold`); the second is the maximum of the rest. `topk` is not
    used: which of two equal entries it puts first is unspecified.
    """

    def __init__(self, device: torch.device, capacity: int = 1024) -> None:
        self._ids = torch.empty((2, capacity), dtype=torch.int64, device=device)
        self._logits = torch.empty((2, capacity), dtype=torch.float32, device=device)
        self._ties = torch.empty(capacity, dtype=torch.int32, device=device)
        self._count = 0
        self._maxima = self._argmax = torch.empty(0, device=device)

    def clear(self) -> None:
        """Begin a new job."""
        self._count = 0

    def hold(self, maxima: torch.Tensor, argmax: torch.Tensor) -> None:
        """Maximum and its id for every row of the pass that `add` will choose from."""
        self._maxima, self._argmax = maxima, argmax

    def add(self, rows: torch.Tensor, chosen: Sequence[int]) -> None:
        """Append the rows `chosen` of the pass's logits [n + 1, vocabulary]; `rows` is spoilt for other uses."""
        count = len(chosen)
        if is_prefix(chosen):
            logits, top, ids = rows[:count], self._maxima[:count], self._argmax[:count]
        else:
            index = torch.tensor(chosen, device=rows.device)
            logits, top, ids = rows[index], self._maxima[index], self._argmax[index]
        if self._count + count > self._ties.shape[0]:
            self._grow(count)
        at = slice(self._count, self._count + count)
        self._ties[at] = (logits == top[:, None]).sum(-1)
        second, second_ids = logits.scatter_(1, ids[:, None], float("-inf")).max(-1)
        self._ids[0, at], self._ids[1, at] = ids, second_ids
        self._logits[0, at], self._logits[1, at] = top, second
        self._count += count

    def read(self) -> Evidence:
        """Everything added since `clear`, as numpy arrays on the host."""
        ids, logits, ties = (table[..., : self._count].cpu() for table in (self._ids, self._logits, self._ties))
        # Copies: on the CPU these would be views of the table, which the next job overwrites.
        return Evidence(*(column.numpy().copy() for column in (ids[0], logits[0], ids[1], logits[1], ties)))

    def _grow(self, count: int) -> None:
        more = max(count, self._ties.shape[0])
        self._ids, self._logits, self._ties = (
            torch.cat([table, table.new_empty((*table.shape[:-1], more))], -1)
            for table in (self._ids, self._logits, self._ties)
        )

"""A frozen n-gram table: which tokens follow which in a corpus, commonest first. Built once, read-only ever after.

Method: Cacheback's frozen table. The corpus is tokenised with the target's tokenizer; the leaders that open most
windows are kept, and for each its commonest followers. A table in LRU order that was filled from rarest to commonest
answers a read with the commonest first; that order is what the file holds, so a shorter table is a prefix.

File: a magic line, one line of JSON (`Header`), then the arrays, zstd-compressed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zstandard

from dfbench.drafters.base import DrafterContext
from dfbench.errors import OptionError

Gram = tuple[int, ...]
Ids = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]

MAGIC = b"dfbench frozen table 1\n"
CHUNK = 1_000_000
"""Windows gathered before they are merged into the counts."""
KEPT = 4
"""Tables that stay unpacked in this process."""


@dataclass(frozen=True)
class Header:
    """What a table is made of; `payload_sha256` covers the uncompressed arrays."""

    tokenizer_hash: str
    corpus: str
    corpus_sha256: str
    texts: int
    tokens: int
    leader: int
    follower: int
    leaders: int
    entries: int
    payload_sha256: str


@dataclass(frozen=True)
class FrozenTable:
    """Arrays of one table. `leaders`: [N, leader], commonest first. The followers of leader i, commonest first, are
    rows `starts[i]` to `starts[i + 1]` of `followers`: [M, follower]. `starts`: [N + 1].
    """

    header: Header
    leaders: Ids
    starts: Counts
    followers: Ids

    def save(self, path: Path) -> str:
        """Write the file in one move; returns its SHA-256, by which workers find it."""
        data = MAGIC + json.dumps(asdict(self.header)).encode() + b"\n" + zstandard.compress(self._payload())
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        scratch.write_bytes(data)
        scratch.replace(path)
        return hashlib.sha256(data).hexdigest()

    def _payload(self) -> bytes:
        return self.leaders.tobytes() + self.starts.tobytes() + self.followers.tobytes()


class FrozenIndex:
    """A table made ready for look-ups: `get(leader)` gives at most `limit` followers, commonest first."""

    def __init__(self, table: FrozenTable, limit: int, leaders: int) -> None:
        keys = table.leaders[:leaders].tolist()
        self._row = {(key[0] if len(key) == 1 else tuple(key)): row for row, key in enumerate(keys)}
        self._table = table
        self._limit = limit
        self._ready: dict[int, list[Gram]] = {}

    def get(self, leader: int | Gram) -> Sequence[Gram]:
        """Followers of this leader; none where the table does not have it. One token is written without a tuple."""
        row = self._row.get(leader)
        if row is None:
            return ()
        ready = self._ready.get(row)
        if ready is None:
            begin, end = self._table.starts[row : row + 2].tolist()
            rows = self._table.followers[begin : min(end, begin + self._limit)]
            ready = self._ready[row] = [tuple(follower) for follower in rows.tolist()]
        return ready


def build(
    texts: Iterable[str],
    encode: Callable[[str], Sequence[int]],
    *,
    tokenizer_hash: str,
    corpus: str,
    leader: int = 1,
    follower: int = 3,
    leaders: int = 1_048_576,
    followers: int = 128,
    max_windows: int = 20_000_000,
) -> FrozenTable:
    """Count a corpus. `encode` gives a text's ids without special tokens; no window spans two texts.

    `corpus` is its name, for people. At most `max_windows` distinct windows are held at a time: beyond that the rarest
    are dropped, which can only lower the counts of rare ones. Raises OptionError for lengths below 1 and for a corpus
    without a single window.
    """
    sizes = {"leader": leader, "follower": follower, "leaders": leaders, "followers": followers}
    for name, value in (sizes | {"max_windows": max_windows}).items():
        if value < 1:
            raise OptionError(f"a frozen table cannot be built with {name} {value}: write 1 or more.")
    counter = _Counter(leader + follower, max_windows)
    digest, number, tokens = counter.read(texts, encode)
    windows, counts = counter.total()
    if not len(windows):
        raise OptionError(
            f"the corpus '{corpus}' has no text of {leader + follower} tokens or more: give a longer one, or lower "
            "leader and follower."
        )
    kept, starts, rows = _commonest(windows, counts, leader, leaders, followers)
    payload = hashlib.sha256(kept.tobytes() + starts.tobytes() + rows.tobytes()).hexdigest()
    header = Header(tokenizer_hash, corpus, digest, number, tokens, leader, follower, len(kept), len(rows), payload)
    return FrozenTable(header, kept, starts, rows)


class _Counter:
    """Counts of windows in bounded memory: distinct windows in lexicographic order, and a buffer of new ones."""

    def __init__(self, width: int, limit: int) -> None:
        self._width, self._limit = width, limit
        self._windows: Ids = np.empty((0, width), np.int32)
        self._counts: Counts = np.empty(0, np.int64)
        self._buffer: list[Ids] = []
        self._buffered = 0

    def read(self, texts: Iterable[str], encode: Callable[[str], Sequence[int]]) -> tuple[str, int, int]:
        """Count texts; returns the SHA-256 of them all, their number and that of their tokens."""
        digest = hashlib.sha256()
        number = tokens = 0
        for text in texts:
            raw = text.encode()
            digest.update(len(raw).to_bytes(8, "little") + raw)
            ids = np.asarray(encode(text), dtype=np.int32)
            self.add(ids)
            number, tokens = number + 1, tokens + len(ids)
        return digest.hexdigest(), number, tokens

    def add(self, ids: Ids) -> None:
        if len(ids) < self._width:
            return
        self._buffer.append(np.lib.stride_tricks.sliding_window_view(ids, self._width))
        self._buffered += len(ids) - self._width + 1
        if self._buffered >= max(CHUNK, len(self._windows) // 2):
            self._merge()

    def total(self) -> tuple[Ids, Counts]:
        """Distinct windows in lexicographic order and how often each was seen."""
        self._merge()
        return self._windows, self._counts

    def _merge(self) -> None:
        if not self._buffer:
            return
        windows = np.concatenate([self._windows, *self._buffer])
        counts = np.concatenate([self._counts, np.ones(self._buffered, np.int64)])
        self._buffer, self._buffered = [], 0
        order = np.lexsort(windows.T[::-1])
        windows, counts = windows[order], counts[order]
        first = _first_of_each(windows)
        self._windows, self._counts = windows[first], np.add.reduceat(counts, first)
        if len(self._windows) > self._limit:
            kept = np.sort(np.argsort(-self._counts, kind="stable")[: self._limit])
            self._windows, self._counts = self._windows[kept], self._counts[kept]


def _first_of_each(rows: Ids) -> npt.NDArray[np.intp]:
    """Where each run of equal rows begins."""
    changed = np.any(rows[1:] != rows[:-1], axis=1)
    return np.concatenate([np.zeros(1, np.intp), np.flatnonzero(changed) + 1])


def _commonest(windows: Ids, counts: Counts, leader: int, leaders: int, followers: int) -> tuple[Ids, Counts, Ids]:
    """The `leaders` commonest leaders with their `followers` commonest followers; ties in order of token ids."""
    first = _first_of_each(windows[:, :leader])
    sizes = np.diff(np.append(first, len(windows)))
    ranking = np.argsort(-np.add.reduceat(counts, first), kind="stable")[:leaders]
    rank = np.full(len(first), len(ranking), np.int64)
    rank[ranking] = np.arange(len(ranking))
    of_window = np.repeat(rank, sizes)
    order = np.lexsort((-counts, of_window))
    order = order[of_window[order] < len(ranking)]
    ranks = of_window[order]
    begins = np.searchsorted(ranks, np.arange(len(ranking)))
    kept = order[np.arange(len(order)) - begins[ranks] < followers]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.minimum(sizes[ranking], followers))])
    return (
        np.ascontiguousarray(windows[first[ranking], :leader]),
        starts,
        np.ascontiguousarray(windows[kept, leader:]),
    )


def load(path: str | None, sha256: str | None, context: DrafterContext, *, leader: int, follower: int) -> FrozenTable:
    """The table that a drafter's options name, by content where this worker was sent it, else by path, for this target
    and these lengths.

    Raises OptionError, in one sentence, for a file that is missing, foreign, damaged or not the one meant, and for a
    table of another tokenizer or of other lengths. A target whose tokenizer is unknown is held to its vocabulary alone.
    """
    place, data = context.read("frozen table", "frozen", path, sha256)
    table = _unpacked(data, place)
    header = table.header
    if context.tokenizer_hash not in (None, header.tokenizer_hash):
        raise OptionError(
            f"the frozen table {place} was built with another tokenizer ({header.tokenizer_hash[:12]}, the target has "
            f"{str(context.tokenizer_hash)[:12]}): build one for this model with `dfbench corpus build`."
        )
    if (header.leader, header.follower) != (leader, follower):
        raise OptionError(
            f"the frozen table {place} has leaders of {header.leader} and followers of {header.follower} tokens: "
            f"write leader: {header.leader} and follower: {header.follower}, or build another table."
        )
    largest = max(int(table.leaders.max()), int(table.followers.max()))
    if largest >= context.vocab_size:
        raise OptionError(
            f"the frozen table {place} holds the token id {largest}, which the target's vocabulary of "
            f"{context.vocab_size} does not have: build one for this model with `dfbench corpus build`."
        )
    return table


_tables: dict[str, FrozenTable] = {}


def _unpacked(data: bytes, place: Path) -> FrozenTable:
    """The table in a file's bytes, unpacked once however many drafters use it. It is known by the bytes' SHA-256, and
    outlives them: the tables used last are kept, the files they came from are not."""
    digest = hashlib.sha256(data).hexdigest()
    table = _tables.pop(digest, None) or _parse(data, place)
    _tables[digest] = table
    while len(_tables) > KEPT:
        del _tables[next(iter(_tables))]
    return table


def _parse(data: bytes, place: Path) -> FrozenTable:
    if not data.startswith(MAGIC):
        raise OptionError(f"{place} is not a frozen table: give a file that `dfbench corpus build` wrote.")
    try:
        line, _, packed = data[len(MAGIC) :].partition(b"\n")
        header = Header(**json.loads(line))
        payload = zstandard.decompress(packed)
        if hashlib.sha256(payload).hexdigest() != header.payload_sha256:
            raise ValueError("checksum")
        table = _arrays(header, payload)
        if not table.leaders.size or min(table.leaders.min(), table.followers.min(initial=0)) < 0:
            raise ValueError("no leaders, or ids below 0")
        return table
    except (ValueError, TypeError, OverflowError, RecursionError, zstandard.ZstdError) as error:
        raise OptionError(
            f"the frozen table {place} is truncated or damaged: copy it again, or build it again with "
            "`dfbench corpus build`."
        ) from error


def _arrays(header: Header, payload: bytes) -> FrozenTable:
    wide, rows = header.leaders * header.leader, header.entries * header.follower
    leaders = np.frombuffer(payload, np.int32, wide)
    starts = np.frombuffer(payload, np.int64, header.leaders + 1, wide * 4)
    followers = np.frombuffer(payload, np.int32, rows, wide * 4 + (header.leaders + 1) * 8)
    return FrozenTable(header, leaders.reshape(-1, header.leader), starts, followers.reshape(-1, header.follower))

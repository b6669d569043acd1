"""A static 2-gram table: how often each token followed each other in a corpus. Built once, read-only ever after.

File: a magic line, one line of JSON, then [3, N] int32 (first, second, count), zstd-compressed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import zstandard

from dfbench.drafters.base import DrafterContext
from dfbench.errors import OptionError

MAGIC = b"dfbench bigrams 1\n"


@dataclass(frozen=True)
class Bigrams:
    """`follow[a]` maps each token seen after token a to its count."""

    tokenizer_hash: str
    corpus: str
    follow: dict[int, dict[int, int]]

    def save(self, path: Path) -> str:
        """Write the file; returns its SHA-256, by which a worker finds it."""
        rows = [(a, b, count) for a, seconds in self.follow.items() for b, count in seconds.items()]
        payload = np.asarray(rows, np.int32).reshape(-1, 3).T.tobytes()
        header = {
            "tokenizer_hash": self.tokenizer_hash,
            "corpus": self.corpus,
            "entries": len(rows),
            "payload_sha256": hashlib.sha256(payload).hexdigest(),
        }
        data = MAGIC + json.dumps(header).encode() + b"\n" + zstandard.compress(payload)
        path.write_bytes(data)
        return hashlib.sha256(data).hexdigest()


def build(texts: Iterable[Sequence[int]], *, tokenizer_hash: str, corpus: str, min_count: int = 1) -> Bigrams:
    """Count the 2-grams of tokenised texts; those rarer than `min_count` are left out. No 2-gram spans two texts."""
    if min_count < 1:
        raise OptionError(f"a 2-gram table cannot be built with min_count {min_count}: write 1 or more.")
    pairs: Counter[tuple[int, int]] = Counter()
    for ids in texts:
        pairs.update(pairwise(ids))
    follow: dict[int, dict[int, int]] = {}
    for (first, second), count in pairs.items():
        if count >= min_count:
            follow.setdefault(first, {})[second] = count
    if not follow:
        raise OptionError(f"the corpus '{corpus}' has no 2-gram seen {min_count} times: give a longer one.")
    return Bigrams(tokenizer_hash, corpus, follow)


def load(path: str | None, sha256: str | None, context: DrafterContext) -> Bigrams | None:
    """The table that a drafter's options name, by content where this worker was sent it, else by path; None for none.

    Raises OptionError for a file that is missing, foreign, damaged, not the one meant, or of another tokenizer.
    """
    if path is None and sha256 is None:
        return None
    place, data = context.read("2-gram table", "static", path, sha256)
    table = _parse(data, place)
    if context.tokenizer_hash is not None and table.tokenizer_hash != context.tokenizer_hash:
        raise OptionError(f"the 2-gram table {place} was built with another tokenizer: build one for this model.")
    largest = max(max(first, *seconds) for first, seconds in table.follow.items())
    if largest >= context.vocab_size:
        raise OptionError(
            f"the 2-gram table {place} holds the token id {largest}, which a vocabulary of {context.vocab_size} does "
            "not have: build one for this model."
        )
    return table


def _parse(data: bytes, place: Path) -> Bigrams:
    if not data.startswith(MAGIC):
        raise OptionError(f"{place} is not a 2-gram table: give a file that dfbench.drafters.bigrams wrote.")
    line, _, packed = data[len(MAGIC) :].partition(b"\n")
    try:
        header = json.loads(line)
        payload = zstandard.decompress(packed)
        if hashlib.sha256(payload).hexdigest() != header["payload_sha256"]:
            raise ValueError("checksum")
        columns = np.frombuffer(payload, np.int32).reshape(3, header["entries"]).tolist()
        follow: dict[int, dict[int, int]] = {}
        if not columns[0] or min(map(min, columns)) < 0:
            raise ValueError("no 2-grams, or numbers below 0")
        for first, second, count in zip(*columns, strict=True):
            follow.setdefault(first, {})[second] = count
        return Bigrams(str(header["tokenizer_hash"]), str(header["corpus"]), follow)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, zstandard.ZstdError) as error:
        raise OptionError(f"the 2-gram table {place} is truncated or damaged: copy or build it again.") from error

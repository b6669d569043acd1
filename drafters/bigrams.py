"""A static 2-gram table: how often each token followed each two in a corpus. Built once, read-only ever after.

File: a magic line, one line of JSON, then [4, N] int32 (first, second, next, count), zstd-compressed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard

from dfbench.drafters.base import DrafterContext
from dfbench.errors import OptionError

MAGIC = b"dfbench bigrams 2\n"
"""1 counted what followed one token; llama.cpp's static table is of what follows two."""


@dataclass(frozen=True)
class Bigrams:
    """`follow[as_key(a, b)]` maps each token seen after a and b to its count."""

    tokenizer_hash: str
    corpus: str
    follow: dict[int, dict[int, int]]

    def save(self, path: Path) -> str:
        """Write the file; returns its SHA-256, by which a worker finds it."""
        rows = [(*from_key(pair), token, n) for pair, nexts in self.follow.items() for token, n in nexts.items()]
        payload = np.asarray(rows, np.int32).reshape(-1, 4).T.tobytes()
        header = {
            "tokenizer_hash": self.tokenizer_hash,
            "corpus": self.corpus,
            "entries": len(rows),
            "payload_sha256": hashlib.sha256(payload).hexdigest(),
        }
        data = MAGIC + json.dumps(header).encode() + b"\n" + zstandard.compress(payload)
        path.write_bytes(data)
        return hashlib.sha256(data).hexdigest()


def as_key(first: int, second: int) -> int:
    """Two tokens as one number, by which tables of what follows them are looked up."""
    return first << 32 | second


def from_key(pair: int) -> tuple[int, int]:
    """The two tokens again."""
    return pair >> 32, pair & 0xFFFFFFFF


def build(texts: Iterable[Sequence[int]], *, tokenizer_hash: str, corpus: str, min_count: int = 1) -> Bigrams:
    """Count what follows each 2-gram of tokenised texts; what is rarer than `min_count` is left out. No window spans
    two texts."""
    if min_count < 1:
        raise OptionError(f"a 2-gram table cannot be built with min_count {min_count}: write 1 or more.")
    windows: Counter[tuple[int, int, int]] = Counter()
    for ids in texts:
        windows.update(zip(ids, ids[1:], ids[2:], strict=False))
    follow: dict[int, dict[int, int]] = {}
    for (first, second, token), count in windows.items():
        if count >= min_count:
            follow.setdefault(as_key(first, second), {})[token] = count
    if not follow:
        raise OptionError(
            f"the corpus '{corpus}' has no 2-gram that a token follows {min_count} times: give a longer one."
        )
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
    largest = max(max(*from_key(pair), *nexts) for pair, nexts in table.follow.items())
    if largest >= context.vocab_size:
        raise OptionError(
            f"the 2-gram table {place} holds the token id {largest}, which a vocabulary of {context.vocab_size} does "
            "not have: build one for this model."
        )
    return table


def _parse(data: bytes, place: Path) -> Bigrams:
    if not data.startswith(MAGIC):
        raise OptionError(
            f"{place} is not a 2-gram table as this dfbench reads it: write one with `dfbench corpus bigrams`."
        )
    line, _, packed = data[len(MAGIC) :].partition(b"\n")
    try:
        header = json.loads(line)
        payload = zstandard.decompress(packed)
        if hashlib.sha256(payload).hexdigest() != header["payload_sha256"]:
            raise ValueError("checksum")
        columns = np.frombuffer(payload, np.int32).reshape(4, header["entries"]).tolist()
        follow: dict[int, dict[int, int]] = {}
        if not columns[0] or min(map(min, columns)) < 0:
            raise ValueError("no 2-grams, or numbers below 0")
        for first, second, token, count in zip(*columns, strict=True):
            follow.setdefault(as_key(first, second), {})[token] = count
        return Bigrams(str(header["tokenizer_hash"]), str(header["corpus"]), follow)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, zstandard.ZstdError) as error:
        raise OptionError(f"the 2-gram table {place} is truncated or damaged: copy or build it again.") from error

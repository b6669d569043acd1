"""Frozen tables: counted like a plain counter would, and every unusable file refused in one sentence."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfbench.drafters import frozen
from dfbench.drafters.base import DrafterContext
from dfbench.drafters.frozen import FrozenIndex, FrozenTable, build, load
from dfbench.drafters.registry import create
from dfbench.errors import OptionError

corpora = st.lists(st.lists(st.integers(0, 4), max_size=30), min_size=1, max_size=6)


def encode(text: str) -> Sequence[int]:
    return [ord(letter) - ord("a") for letter in text]


def words(corpus: list[list[int]]) -> list[str]:
    return ["".join(chr(ord("a") + i) for i in ids) for ids in corpus]


def small(texts: Sequence[str] = ("abcabdabc",), **given_sizes: Any) -> FrozenTable:
    sizes = {"leader": 1, "follower": 2} | given_sizes
    return build(texts, encode, tokenizer_hash="tok", corpus="letters", **sizes)


def counted(corpus: list[list[int]], leader: int, follower: int) -> dict[tuple[int, ...], Counter[tuple[int, ...]]]:
    found: dict[tuple[int, ...], Counter[tuple[int, ...]]] = {}
    for ids in corpus:
        for i in range(len(ids) - leader - follower + 1):
            window = tuple(ids[i : i + leader + follower])
            found.setdefault(window[:leader], Counter())[window[leader:]] += 1
    return found


@settings(deadline=None)
@given(
    corpus=corpora,
    leader=st.integers(1, 3),
    follower=st.integers(1, 3),
    leaders=st.integers(1, 6),
    followers=st.integers(1, 4),
    chunk=st.integers(1, 40),
)
def test_keeps_the_commonest_commonest_first(
    corpus: list[list[int]], leader: int, follower: int, leaders: int, followers: int, chunk: int
) -> None:
    """Whatever the size of the pieces that are counted; ties in order of token ids; no window spans two texts."""
    found = counted(corpus, leader, follower)
    sizes = {"leader": leader, "follower": follower, "leaders": leaders, "followers": followers}
    before, frozen.CHUNK = frozen.CHUNK, chunk
    try:
        if not found:
            with pytest.raises(OptionError, match="has no text of"):
                small(words(corpus), **sizes)
            return
        table = small(words(corpus), **sizes)
    finally:
        frozen.CHUNK = before
    kept = sorted(found, key=lambda key: (-found[key].total(), key))[:leaders]
    assert [tuple(row) for row in table.leaders.tolist()] == kept
    index = FrozenIndex(table, limit=followers, leaders=leaders)
    for key in found:
        wanted = sorted(found[key], key=lambda f: (-found[key][f], f))[:followers] if key in kept else []
        assert list(index.get(key[0] if leader == 1 else key)) == wanted


def test_a_shorter_index_is_a_prefix() -> None:
    table = small()
    whole, short = FrozenIndex(table, limit=9, leaders=9), FrozenIndex(table, limit=1, leaders=2)
    assert list(short.get(0)) == list(whole.get(0))[:1]
    assert len(whole.get(0)) == 2
    assert short.get(3) == ()
    assert len(whole.get(3)) == 1


def test_memory_is_bounded_and_the_common_windows_survive() -> None:
    """At most four windows are held between pieces: the window of a thousand repeats outlives all rare ones."""
    rare = ["".join(chr(ord("d") + (i * k) % 20) for i in range(3)) for k in range(1, 60)]
    before, frozen.CHUNK = frozen.CHUNK, 5
    try:
        table = small(["abc"] * 20 + rare + ["abc"] * 20, max_windows=4)
    finally:
        frozen.CHUNK = before
    assert len(table.followers) <= 4
    assert table.leaders[0].tolist() == [0]


def test_header_says_what_it_is_made_of() -> None:
    header = small(["abcabd", "ab"]).header
    assert (header.tokenizer_hash, header.corpus, header.texts, header.tokens) == ("tok", "letters", 2, 8)
    assert header.corpus_sha256 == small(["abcabd", "ab"]).header.corpus_sha256
    assert header.corpus_sha256 != small(["abcabda", "b"]).header.corpus_sha256


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "letters.dft"


def read(
    path: Path, tokenizer_hash: str | None = "tok", vocab_size: int = 26, leader: int = 1, follower: int = 2
) -> FrozenTable:
    context = DrafterContext(vocab_size=vocab_size, tokenizer_hash=tokenizer_hash)
    return load(str(path), None, context, leader=leader, follower=follower)


def test_saved_and_loaded(path: Path) -> None:
    table = small()
    assert table.save(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    again = read(path)
    assert again.header == table.header
    assert again.leaders.tolist() == table.leaders.tolist()
    assert again.starts.tolist() == table.starts.tolist()
    assert again.followers.tolist() == table.followers.tolist()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_read_again_when_the_file_changes(path: Path) -> None:
    small().save(path)
    assert len(read(path).leaders) == 4
    small(["zzzzzzzz"]).save(path)
    assert len(read(path).leaders) == 1


def test_unpacked_once_and_without_keeping_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = []

    class Watched(bytes):
        def __del__(self) -> None:
            gone.append(len(self))

    small(["abcabdabcde"]).save(path)
    size = path.stat().st_size
    plain = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: Watched(plain(self)))
    table = read(path)
    assert gone == [size]
    assert read(path) is table


def test_the_tables_used_last_stay_unpacked(path: Path) -> None:
    def table(number: int) -> FrozenTable:
        small(["abc" + chr(ord("d") + number) * 3]).save(path)
        return read(path)

    first, second = table(0), table(1)
    for number in range(2, frozen.KEPT):
        table(number)
    assert table(0) is first
    table(frozen.KEPT)
    assert table(0) is first
    assert table(1) is not second


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_hash": "other"}, "built with another tokenizer"),
        ({"leader": 2}, "write leader: 1 and follower: 2"),
        ({"follower": 3}, "write leader: 1 and follower: 2"),
        ({"vocab_size": 3}, "holds the token id 3"),
    ],
)
def test_a_table_for_something_else_is_refused(path: Path, changes: dict[str, Any], message: str) -> None:
    small().save(path)
    with pytest.raises(OptionError, match=message):
        read(path, **changes)


def test_an_unknown_tokenizer_is_held_to_the_vocabulary(path: Path) -> None:
    small().save(path)
    assert len(read(path, tokenizer_hash=None).leaders) == 4


def test_truncated_and_damaged_files_are_refused(path: Path) -> None:
    small().save(path)
    whole = path.read_bytes()
    for length in range(len(frozen.MAGIC), len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(OptionError, match="truncated or damaged"):
            read(path)
    for at in range(len(frozen.MAGIC), len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        try:
            table = read(path)
        except OptionError:
            continue
        assert table.followers.tolist() == small().followers.tolist()  # the flip was in a name


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04 something else"])
def test_foreign_files_are_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(OptionError, match="is not a frozen table"):
        read(path)


def test_a_header_that_lies_about_sizes_is_refused(path: Path) -> None:
    small().save(path)
    magic, line, packed = path.read_bytes().split(b"\n", 2)
    header = json.loads(line) | {"entries": 10_000}
    path.write_bytes(b"\n".join([magic, json.dumps(header).encode(), packed]))
    with pytest.raises(OptionError, match="truncated or damaged"):
        read(path)


def test_a_missing_file_is_refused(path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read(path)
    with pytest.raises(OptionError, match="cannot be read"):
        read(path.parent)


@pytest.mark.parametrize("size", ["leader", "follower", "leaders", "followers", "max_windows"])
@pytest.mark.parametrize("value", [0, -3])
def test_lengths_below_one_are_refused(size: str, value: int) -> None:
    with pytest.raises(OptionError, match=f"with {size} {value}: write 1 or more"):
        small(**{size: value})


def test_a_worker_finds_the_file_by_its_content(path: Path) -> None:
    sha = small().save(path)
    context = DrafterContext(vocab_size=26, tokenizer_hash="tok", files={sha: path})
    options = {"follower": 2, "draft_len": 2, "frozen": "/not/on/this/machine", "frozen_sha256": sha}
    drafter = create("cacheback", options, context)
    drafter.start([3])
    assert list(drafter.propose(9).tokens) == [0, 1]
    with pytest.raises(OptionError, match="cannot be read"):
        create("cacheback", options, DrafterContext())
    with pytest.raises(OptionError, match="no frozen table with SHA-256"):
        create("cacheback", options | {"frozen": None}, DrafterContext())
    with pytest.raises(OptionError, match="does not have the SHA-256"):
        create("cacheback", options | {"frozen": str(path), "frozen_sha256": "0" * 64}, DrafterContext())


def test_another_tokenizer_is_refused_by_the_drafter(path: Path) -> None:
    small().save(path)
    with pytest.raises(OptionError, match="another tokenizer"):
        create("cacheback", {"follower": 2, "frozen": str(path)}, DrafterContext(tokenizer_hash="mine"))

"""llama.cpp's lookup: the incremental counts against a recount from scratch, the sources, and the static file."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfbench.drafters import bigrams
from dfbench.drafters.base import DrafterContext
from dfbench.drafters.registry import create
from dfbench.errors import OptionError

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)
THRESHOLDS = {
    "context": {1: (2, 66), 2: (2, 50), 3: (1, 50), 4: (1, 50)},
    "dynamic": {1: (4, 75), 2: (3, 66), 3: (2, 66), 4: (2, 66)},
}


def followers(sequences: Sequence[Sequence[int]], gram: tuple[int, ...]) -> Counter[int]:
    n = len(gram)
    return Counter(s[i + n] for s in sequences for i in range(len(s) - n) if tuple(s[i : i + n]) == gram)


def acceptable(
    sequences: Sequence[Sequence[int]], text: Sequence[int], kind: str, corpus: Sequence[Sequence[int]] = ()
) -> set[int] | None:
    """Tokens that the published rule may draft next (several where weights tie); None where it drafts none."""
    static = followers(corpus, tuple(text[-2:])) if len(text) > 1 else Counter[int]()
    for n in range(min(4, len(text)), 0, -1):
        counts = followers(sequences, tuple(text[-n:]))
        weights = {t: c * (100 * static[t] or 1) for t, c in counts.items()}
        samples, percent = THRESHOLDS[kind][n]
        if sum(counts.values()) < samples:
            continue
        best = {t for t in counts if weights[t] == max(weights.values())}
        decided = {t for t in best if 100 * counts[t] >= percent * sum(counts.values())}
        if decided and decided == best:
            return decided
        if decided:  # a tie between a decided and an undecided candidate: either outcome is the rule's
            return None
    return None


@settings(max_examples=150, deadline=None)
@given(texts, st.lists(st.integers(1, 4), max_size=8))
def test_counts_are_those_of_the_whole_text(text: list[int], steps: list[int]) -> None:
    drafter = create("ngram-cache", {})
    at = max(1, len(text) // 2)
    drafter.start(text[:at])
    for step in [*steps, 0]:
        so_far = text[:at]
        for token in drafter.propose(8).tokens:
            allowed = acceptable([text[:at]], so_far, "context")
            assert allowed is None or token in allowed
            so_far = [*so_far, token]
        if len(so_far) - at < 8:
            assert acceptable([text[:at]], so_far, "context") is None
        drafter.observe(text[at : at + step])
        at = min(at + step, len(text))


@settings(max_examples=100, deadline=None)
@given(st.lists(texts, min_size=2, max_size=4))
def test_dynamic_counts_come_from_earlier_requests(requests: list[list[int]]) -> None:
    drafter = create("ngram-cache", {"dynamic": True, "draft_len": 1})
    for text in requests:
        drafter.start(text)
    *past, text = requests
    draft = drafter.propose(8)
    allowed = acceptable([text], text, "context") or acceptable(past, text, "dynamic")
    if draft.tokens and allowed:
        assert set(draft.tokens) <= allowed
    if allowed is not None:
        assert draft.tokens


def test_thresholds_decide() -> None:
    drafter = create("ngram-cache", {"max_ngram": 1})
    drafter.start([1, 2, 9, 1])
    assert not drafter.propose(8).tokens  # seen once after one token: too few
    drafter.start([1, 2, 9, 1, 2, 8, 1])
    draft = drafter.propose(8)
    assert list(draft.tokens) == [2]  # 9 and 8 share what follows 2: undecided
    assert (draft.match_len, draft.score) == (1, 1.0)
    drafter.start([1, 2, 1, 2, 1, 3, 1])
    assert list(drafter.propose(1).tokens) == [2]  # two of three reach 66 %
    drafter.start([1, 2, 1, 2, 1, 3, 1, 3, 1])
    assert not drafter.propose(1).tokens


def test_the_server_learns_only_within_a_step() -> None:
    drafter = create("ngram-cache", {"preset": "server"})
    drafter.start([7])
    for token in [1, 2, 3, 1, 2, 3, 1, 2]:
        drafter.observe([token])
    assert not drafter.propose(8).tokens
    drafter.observe([1, 2, 3, 4])
    drafter.observe([1, 2, 3])
    assert list(drafter.propose(1).tokens) == [4]


def table(tmp_path: Path, **changes: object) -> tuple[str, str]:
    built = bigrams.build([[1, 2, 1, 2, 1, 2, 1, 3], [5, 5, 5]], tokenizer_hash="t", corpus="c")
    path = tmp_path / "table.bin"
    return str(path), built.save(path)


def test_a_static_table_drafts_where_nothing_else_does(tmp_path: Path) -> None:
    path, sha256 = table(tmp_path)
    drafter = create("ngram-cache", {"static": path, "max_ngram": 1})
    drafter.start([2, 1])
    draft = drafter.propose(2)
    assert (list(draft.tokens), draft.match_len) == ([2, 1], 2)
    drafter.start([9, 1])
    assert not drafter.propose(2).tokens
    drafter.start([1])
    assert not drafter.propose(2).tokens
    by_hash = create("ngram-cache", {"static_sha256": sha256}, DrafterContext(files={sha256: Path(path)}))
    by_hash.start([2, 1])
    assert list(by_hash.propose(2).tokens) == [2, 1]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=40), min_size=1, max_size=3), st.permutations(range(4))
)
def test_the_static_table_counts_what_follows_two_tokens(corpus: list[list[int]], text: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.bin"
        bigrams.build(corpus, tokenizer_hash="t", corpus="c").save(path)
        drafter = create("ngram-cache", {"static": str(path)})
    drafter.start(text)
    counts = followers(corpus, tuple(text[-2:]))
    most = max(counts.values(), default=0)
    decided = counts.total() >= 2 and 2 * most >= counts.total()
    draft = drafter.propose(1)
    assert bool(draft.tokens) == decided
    if decided:
        assert counts[draft.tokens[0]] == most


def test_static_counts_weigh_equal_candidates(tmp_path: Path) -> None:
    path, _ = table(tmp_path)
    text = [2, 1, 3, 4, 2, 1, 2, 4, 2, 1]
    plain = create("ngram-cache", {"max_ngram": 2})
    weighed = create("ngram-cache", {"max_ngram": 2, "static": path})
    for drafter in (plain, weighed):
        drafter.start(text)
    assert list(plain.propose(1).tokens) == [3]
    assert list(weighed.propose(1).tokens) == [2]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"{}" + data, "is not a 2-gram table"),
        (lambda data: data[:-5], "truncated or damaged"),
        (lambda data: data.replace(b'"entries": 4', b'"entries": 3'), "truncated or damaged"),
    ],
)
def test_a_bad_static_file_is_refused(tmp_path: Path, damage: object, message: str) -> None:
    path, _ = table(tmp_path)
    Path(path).write_bytes(damage(Path(path).read_bytes()))  # type: ignore[operator]
    with pytest.raises(OptionError, match=message):
        create("ngram-cache", {"static": path})


def test_a_static_table_must_be_the_one_meant(tmp_path: Path) -> None:
    path, sha256 = table(tmp_path)
    with pytest.raises(OptionError, match="another tokenizer"):
        create("ngram-cache", {"static": path}, DrafterContext(tokenizer_hash="other"))
    with pytest.raises(OptionError, match="token id 5"):
        create("ngram-cache", {"static": path}, DrafterContext(vocab_size=5))
    with pytest.raises(OptionError, match="does not have the SHA-256"):
        create("ngram-cache", {"static": path, "static_sha256": "0" * 64})
    with pytest.raises(OptionError, match="cannot be read"):
        create("ngram-cache", {"static": path + ".gone"})
    with pytest.raises(OptionError, match="is on this machine"):
        create("ngram-cache", {"static_sha256": sha256})
    with pytest.raises(OptionError, match="min_count 0"):
        bigrams.build([[1, 2]], tokenizer_hash="t", corpus="c", min_count=0)
    with pytest.raises(OptionError, match="no 2-gram"):
        bigrams.build([[1]], tokenizer_hash="t", corpus="c")

"""Drafters' files travel by content."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from dfbench.errors import DfbenchError
from dfbench.workers import shipped
from dfbench.workers.actor import drafter_context
from dfbench.workers.shipped import Shipped
from dfbench.workers.spec import ArmSpec
from dfbench.workers.target import RecordedTarget


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_what_arms_name_is_found_once(tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_bytes(b"t")
    options = {"frozen": str(table), "frozen_sha256": digest(b"t")}
    arms = [ArmSpec("a", "cacheback", options), ArmSpec("b", "cacheback", options), ArmSpec("ar", "ar")]
    gone = ArmSpec("c", "cacheback", {"frozen": str(tmp_path / "gone"), "frozen_sha256": "0" * 64})
    unknown = ArmSpec("d", "no-such-drafter")
    assert list(shipped.named([*arms, gone, unknown])) == [(digest(b"t"), table)]


def test_drafters_find_by_content_what_the_machine_was_sent() -> None:
    assert drafter_context(RecordedTarget()).files == {}
    shipped.keep([Shipped(digest(b"one"), b"one"), Shipped(digest(b"two"), b"two")])
    shipped.keep([Shipped(digest(b"one"), b"one")])
    files = drafter_context(RecordedTarget()).files
    assert {name: path.read_bytes() for name, path in files.items()} == {digest(b"one"): b"one", digest(b"two"): b"two"}


def test_a_damaged_file_is_refused() -> None:
    with pytest.raises(DfbenchError, match="not what it was"):
        shipped.keep([Shipped(digest(b"one"), b"other")])
    assert shipped.here() == {}

"""Temporary folders that have no room: they are named, and not the files that were read or the run."""

from __future__ import annotations

import errno
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest

from dfbench.cluster import bundle
from dfbench.cluster.scratch import scratch
from dfbench.cluster.sources_batch import BatchJoin
from dfbench.cluster.sweep import validate
from dfbench.errors import DfbenchError


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_has_no_room_is_the_temporary_folder(place: Path) -> None:
    with pytest.raises(DfbenchError, match=f"{place}, for temporary files, has no room .*TMPDIR"), scratch() as folder:
        assert folder.parent == place
        full()
    with pytest.raises(FileNotFoundError), scratch() as folder:
        (folder / "nosuch").read_text()
    place.rmdir()  # empty again
    with pytest.raises(DfbenchError, match="no folder for temporary files"), scratch():
        pass


def test_a_sweeps_file_is_not_blamed(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    rows = {"name": "w", "file": str(tmp_path / "rows.jsonl")}
    sweep = validate({"name": "s", "workloads": [rows], "arms": ["ar"]})
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(DfbenchError, match=f"{place}, for temporary files"), scratch() as folder:
        bundle.pack(sweep, folder)


def test_batch_lines_that_find_no_room(place: Path) -> None:
    with pytest.raises(DfbenchError, match=f"{place}, for temporary files"), BatchJoin() as batch:
        batch._db.execute("pragma max_page_count = 4")
        batch.add({"custom_id": "a", "body": {"messages": ["x" * 50_000]}}, "here")
    assert list(place.iterdir()) == []
    with pytest.raises(sqlite3.OperationalError), BatchJoin() as batch:
        batch._db.execute("no SQL")

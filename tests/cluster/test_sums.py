"""Sums at the commit and after it: what is stored, what is found when it lies, and what is made again."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runkit import make_run, work

from dfbench.cluster import upkeep
from dfbench.cluster.commit import Committer, encode
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.sums_upkeep import add_sums
from dfbench.workers.records import SUMS

EOS = frozenset({2})


def committed(tmp_path: Path, shards: int = 4, groups: int = 2) -> Ledger:
    """A finished run in this many commits."""
    ledger = make_run(tmp_path, shards, eos_at=9)
    committer = Committer(ledger, EOS)
    size = -(-shards // groups)
    for number, shard in enumerate(work(ledger)):
        committer.add(shard)
        if (number + 1) % size == 0:
            committer.flush()
    committer.flush()
    return ledger


def sums(ledger: Ledger) -> list[dict[str, Any]]:
    tables = [pq.read_table(ledger.run_dir / file.name) for file in ledger.files("sums")]
    rows = pa.concat_tables(tables).to_pylist() if tables else []
    return sorted(rows, key=lambda row: (row["job_id"], row["attempt"]))


def lie(ledger: Ledger, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Other rows in the first file of sums, with a checksum and a size that fit."""
    file = ledger.files("sums")[0]
    rows = pq.read_table(ledger.run_dir / file.name).to_pylist()
    data = encode(pa.Table.from_pylist(change(rows), schema=SUMS)).to_pybytes()
    replace(ledger.run_dir, file.name, data, len(change(rows)))


def replace(run_dir: Path, name: str, data: bytes, rows: int | None = None) -> None:
    """Other contents of a file, which the ledger takes for the true ones."""
    (run_dir / name).write_bytes(data)
    with closing(sqlite3.connect(run_dir / "ledger.db")) as db, db:
        db.execute(
            "update files set bytes = ?, sha256 = ?, rows = coalesce(?, rows) where name = ?",
            (len(data), hashlib.sha256(data).hexdigest(), rows, name),
        )


def test_every_job_has_its_sums(tmp_path: Path) -> None:
    with committed(tmp_path) as ledger:
        found = sums(ledger)
        jobs = pa.concat_tables([pq.read_table(tmp_path / file.name) for file in ledger.files("jobs")]).to_pylist()
        assert {(row["job_id"], row["attempt"]) for row in found} == {(row["job_id"], row["attempt"]) for row in jobs}
        assert all(row["emitted"] == row["accepted"] + row["steps"] for row in found)
        pairs = {row["job_id"]: row["ar_job_id"] for row in found if not row["warmup"]}
        assert pairs == {f"j{n}-{arm}": f"j{n}-ar" for n in range(4) for arm in ("ar", "pld")}
        assert upkeep.verify(tmp_path) == []


LIES: dict[str, tuple[Any, str]] = {
    "steps": (99, "its sums say steps 99, its rows say "),
    "drafted_steps": (77, "its sums say drafted_steps 77"),
    "proposed": (77, "its sums say proposed 77"),
    "accepted": (77, "its sums say accepted 77"),
    "emitted": (77, "its sums say emitted 77"),
    "step_ns": (None, "its sums say step_ns None"),
    "draft_ns": (1, "its sums say draft_ns 1"),
    "forward_ns": (1, "its sums say forward_ns 1"),
    "ar_job_id": ("j1-ar", "its sums say ar_job_id j1-ar, its rows say j0-ar"),
    "passes_past_ar": (5, "its sums say passes_past_ar 5, its rows say 0"),
    "ar_pass_ns": (1, "its sums say ar_pass_ns 1"),
    "arm": ("ar", "its sums say arm ar, its rows say pld"),
}


@pytest.mark.parametrize("column", LIES)
def test_a_sum_that_lies_is_named(tmp_path: Path, column: str) -> None:
    value, says = LIES[column]
    with committed(tmp_path) as ledger:
        lie(ledger, lambda rows: [row | {column: value} if row["job_id"] == "j0-pld" else row for row in rows])
    [finding] = upkeep.verify(tmp_path)
    assert finding.startswith(f"job j0-pld: {says}")


def test_a_row_of_sums_too_many_is_named(tmp_path: Path) -> None:
    with committed(tmp_path) as ledger:
        lie(ledger, lambda rows: [*rows, rows[-1], rows[0] | {"job_id": "nobody"}, rows[-1] | {"attempt": 9}])
    attempt, twice, nobody = upkeep.verify(tmp_path)
    assert attempt.endswith("it has sums of attempt 9, but no rows of it.")
    assert twice.endswith("it has 2 rows of sums.")
    assert nobody == "rows of sums that are of no job: 1."


def test_files_that_are_none_of_their_table_are_named(tmp_path: Path) -> None:
    """However right their checksums."""
    with committed(tmp_path) as ledger:
        steps, (first, second) = ledger.files("steps")[0].name, (file.name for file in ledger.files("sums"))
    replace(tmp_path, first, (tmp_path / steps).read_bytes())
    replace(tmp_path, second, b"no table at all")
    other, none = upkeep.verify(tmp_path)
    assert other.startswith(f"{first}: no rows of sums, without steps, drafted_steps, ")
    assert none == f"{second}: no readable Parquet file."


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
@pytest.mark.parametrize("compacted", [False, True], ids=["small", "compacted"])
def test_broken_sums_are_made_again_and_no_job_is(tmp_path: Path, harm: str, compacted: bool) -> None:
    with committed(tmp_path) as ledger:
        if compacted:
            assert upkeep.compact(ledger, at_least=2)
        due = sums(ledger)
        victim = tmp_path / ledger.files("sums")[0].name
        data = bytearray(victim.read_bytes())
        data[len(data) // 3] ^= 0x40
        if harm == "remove":
            victim.unlink()
        else:
            victim.write_bytes(data if harm == "flip" else data[:40])
        assert upkeep.verify(tmp_path)
        [note] = upkeep.recover(ledger)
        assert "were added up again, since they cannot be trusted" in note
        assert sums(ledger) == due
        assert ledger.counts().pending == 0
        assert upkeep.verify(tmp_path) == []
        assert upkeep.recover(ledger) == []


def test_sums_broken_beside_records_are_made_again_for_the_shards_that_stay(tmp_path: Path) -> None:
    with committed(tmp_path) as ledger:
        assert upkeep.compact(ledger, at_least=2)
        committer = Committer(ledger, EOS)
        due = sums(ledger)
        upkeep.drop_shards(ledger, {"s3"}, ())
        for shard in work(ledger):
            committer.add(shard)
        committer.flush()
        for file in (*ledger.files("sums"), ledger.files("steps")[-1]):
            (tmp_path / file.name).unlink()
        again, added = upkeep.recover(ledger)
        assert again.startswith("1 shards will run again")
        assert added.startswith("the sums of 8 jobs were added up again")  # two of them warm-up
        assert {row["job_id"] for row in sums(ledger) if not row["warmup"]} == {
            row["job_id"] for row in due if not row["warmup"] and not row["job_id"].startswith("j3-")
        }
        assert upkeep.verify(tmp_path) == []


def test_a_run_without_sums_is_given_them(tmp_path: Path) -> None:
    """One of schema 1, or a commit of it that goes on under schema 2."""
    with committed(tmp_path) as ledger:
        due = sums(ledger)
        file = ledger.files("sums")[0]
        ledger.replace_files([], {}, [file.name])
        assert 0 < len(sums(ledger)) < len(due)
        assert upkeep.verify(tmp_path) == []
        assert add_sums(ledger) == file.rows
        assert sums(ledger) == due
        assert add_sums(ledger) == 0
        assert upkeep.verify(tmp_path) == []

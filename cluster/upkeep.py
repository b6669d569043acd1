"""Keeping a run's files in order: recovery when a driver begins, compaction, and the check behind `dfbench verify`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dfbench.cluster.commit import RECORDS, next_number, sha256, write_files
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.ledger_schema import RecordFile
from dfbench.cluster.record_rows import ROWS, read_rows
from dfbench.cluster.sums_upkeep import add_sums, verify_sums
from dfbench.workers.actor import WARMUP_PREFIX
from dfbench.workers.checks import breaches
from dfbench.workers.faults import reach
from dfbench.workers.records import SCHEMAS

COMPACT_AT = 500
"""Live files from which a run is compacted while it goes on."""
COMPACT_AT_END = 12
"""Live files from which it is compacted when it ends: fewer are read just as fast."""
ROWS_PER_FILE = 500_000
KEEP_RETIRED_S = 3600.0
"""How long files that compaction replaced stay: a reader may have opened their list just before."""


def recover(ledger: Ledger) -> list[str]:
    """Make disk and ledger agree: files that no commit names are removed, shards of broken ones run again.

    Returns what a person should know, one sentence each.
    """
    notes = []
    orphans = remove_orphans(ledger)
    if orphans:
        notes.append(f"removed {len(orphans)} files of a commit that never happened.")
    broken = {file: reason for file in ledger.files() if (reason := damage(ledger.run_dir, file))}
    sums = {file.name: reason for file, reason in broken.items() if file.table == "sums"}
    others = {file.name: reason for file, reason in broken.items() if file.name not in sums}
    if others:
        again = set().union(*(ledger.shards_of(name) for name in others))
        drop_shards(ledger, again, others.keys() | sums.keys())
        notes.append(f"{len(again)} shards will run again, since their records cannot be trusted: {_listed(others)}.")
    if sums:
        count = add_sums(ledger, instead=() if others else sums)
        if count:
            notes.append(
                f"the sums of {count} jobs were added up again, since they cannot be trusted: {_listed(sums)}."
            )
    redo(ledger)
    return notes


def _listed(broken: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({reason})" for name, reason in sorted(broken.items()))


def redo(ledger: Ledger, busy: Collection[str] = ()) -> bool:
    """Clear what is done of the shards that `retry` marked, but for busy ones; whether some are still marked."""
    marked = ledger.redo()
    if ready := marked - set(busy):
        drop_shards(ledger, ready, ())
    return ready != marked


def remove_orphans(ledger: Ledger) -> list[Path]:
    """Remove record files that the ledger does not name, half-written ones, and retired ones after a while."""
    root = ledger.run_dir / RECORDS
    live = {file.name for file in ledger.files()}
    retired = {file.name for file in ledger.files(live=False)}
    removed, gone = [], []
    for path in sorted(root.rglob("*")) if root.is_dir() else ():
        name = path.relative_to(ledger.run_dir).as_posix()
        if not path.is_file() or name in live:
            continue
        if name in retired:
            if abs(time.time() - path.stat().st_mtime) > KEEP_RETIRED_S:
                path.unlink()
                gone.append(name)
        else:
            path.unlink()
            removed.append(path)
    gone += [name for name in retired if not (ledger.run_dir / name).exists()]
    if gone:
        ledger.forget_files(gone)
    return removed


def damage(run_dir: Path, file: RecordFile) -> str:
    """What is wrong with a committed file: missing, of another size, or of another checksum; "" when it is whole."""
    path = run_dir / file.name
    if not path.is_file():
        return "missing"
    if path.stat().st_size != file.bytes:
        return f"{path.stat().st_size} bytes instead of {file.bytes}"
    return "" if sha256(path) == file.sha256 else "checksum"


def misfit(run_dir: Path, file: RecordFile) -> str:
    """Why a file that is as it was committed cannot be checked against others all the same; "" when it can."""
    try:
        there = pq.read_schema(run_dir / file.name).names
    except pa.ArrowInvalid:
        return "no readable Parquet file"
    wanted = SCHEMAS[file.table].names if file.table in ("jobs", "steps", "tokens", "sums") else ()
    absent = [name for name in wanted if name not in there]
    return f"no rows of {file.table}, without {', '.join(absent)}" if absent else ""


def drop_shards(ledger: Ledger, shards: set[str], broken: Collection[str]) -> None:
    """Take these shards' rows out of every live file, and make them pending, in one switch of generations."""
    gone = set(broken)
    touched = ledger.files_of(shards) - gone
    jobs = ledger.jobs_of(shards)
    generation, number = ledger.next_generation(), next_number(ledger)
    new: list[RecordFile] = []
    holds: dict[str, set[str]] = {}
    for file in ledger.files():
        if file.name not in touched:
            continue
        kept = _without_shards(pq.read_table(ledger.run_dir / file.name), shards, jobs)
        for written in write_files(ledger.run_dir, {file.table: kept}, generation=generation, number=number):
            new.append(written)
            holds[written.name] = ledger.shards_of(file.name) - shards
        number += 1
    _switch(ledger, new, holds, touched | gone, shards)


def _without_shards(table: pa.Table, shards: set[str], jobs: set[str]) -> pa.Table:
    """Warm-up rows belong to the shard in their job id; all others to the shard of their job."""
    if "job_id" not in table.schema.names:
        return table
    names = table["job_id"].to_pylist()
    keep = [name.split(":")[1] not in shards if name.startswith(WARMUP_PREFIX) else name not in jobs for name in names]
    return table.filter(pa.array(keep, pa.bool_()))


def compact(ledger: Ledger, *, at_least: int = COMPACT_AT) -> bool:
    """Merge small files when there are this many, into a new generation; whether anything changed.

    Jobs of a run of schema 1 get their sums.
    """
    if ledger.file_count() < at_least:
        return False
    added = add_sums(ledger)
    generation, number = ledger.next_generation(), next_number(ledger)
    new: list[RecordFile] = []
    holds: dict[str, set[str]] = {}
    retired: set[str] = set()
    for name in SCHEMAS:
        small = [file for file in ledger.files(name) if file.rows < ROWS_PER_FILE]
        if len(small) < 2:
            continue
        for group in _groups(small):
            table = pa.concat_tables([pq.read_table(ledger.run_dir / file.name) for file in group])
            merged = table.cast(SCHEMAS[name]).sort_by(_order(name))
            written = write_files(ledger.run_dir, {name: merged}, generation=generation, number=number)
            number += 1
            new += written
            for file in written:
                holds[file.name] = set().union(*(ledger.shards_of(old.name) for old in group))
            retired |= {file.name for file in group}
    if new:
        _switch(ledger, new, holds, retired)
    return bool(new or added)


def _switch(
    ledger: Ledger, new: list[RecordFile], holds: dict[str, set[str]], retired: set[str], redo: set[str] | None = None
) -> None:
    reach("compact.before_switch")
    ledger.replace_files(new, holds, sorted(retired), redo or ())
    reach("compact.after_switch")
    for name in retired:
        path = ledger.run_dir / name
        if path.exists():
            os.utime(path)


def _groups(files: list[RecordFile]) -> Iterator[list[RecordFile]]:
    group: list[RecordFile] = []
    rows = 0
    for file in files:
        group.append(file)
        rows += file.rows
        if rows >= ROWS_PER_FILE:
            yield group
            group, rows = [], 0
    if len(group) > 1:
        yield group


def _order(table: str) -> list[tuple[str, str]]:
    """Rows of one job lie together and in order, so that a query for one job reads one row group."""
    names = SCHEMAS[table].names
    wanted = ("job_id", "attempt", "kind", "step" if table == "steps" else "position", "sample")
    return [(name, "ascending") for name in wanted if name in names]


def verify(run_dir: Path) -> list[str]:
    """Everything that is wrong with a run's records, one sentence each: files, checksums, row identities, the plan."""
    with Ledger.open(run_dir, readonly=True) as ledger:
        files = ledger.files()
        findings = [f"{file.name}: {reason}." for file in files if (reason := damage(run_dir, file))]
        if findings:
            return findings
        if findings := [f"{file.name}: {fault}." for file in files if (fault := misfit(run_dir, file))]:
            return findings
        for file in files:
            rows = pq.read_metadata(run_dir / file.name).num_rows
            if rows != file.rows:
                findings.append(f"{file.name}: {rows} rows, the ledger says {file.rows}.")
        eos_ids: set[int] = set()
        if not ledger.run.ignore_eos:
            for worker in ledger.workers():
                eos_ids.update(worker.facts.get("eos_ids", ()))
        for tables in _portions(ledger):
            found = breaches(tables["jobs"], tables["steps"], tables["tokens"], eos_ids)
            findings += found.values()
        findings += verify_sums(ledger)
        findings += _check_plan(ledger)
    return findings


def _portions(ledger: Ledger, rows: int = ROWS) -> Iterator[dict[str, pa.Table]]:
    """The records in portions of whole jobs, each small enough for memory."""
    files = {name: ledger.files(name) for name in ("jobs", "steps", "tokens")}
    largest = max(sum(file.rows for file in files[name]) for name in files)
    names = sorted(set(_column(ledger, files["jobs"], "job_id")))
    count = max(1, min(-(-largest // rows), len(names)))
    size = -(-len(names) // count) if names else 1
    bounds = [names[start] for start in range(0, len(names), size)] or [""]
    for low, high in zip(bounds, [*bounds[1:], None], strict=True):
        condition = pc.field("job_id") >= low
        if high is not None:
            condition &= pc.field("job_id") < high
        if low == bounds[0]:
            condition |= pc.field("job_id") < low
        yield {name: read_rows(ledger, files[name], name, condition) for name in files}


def _column(ledger: Ledger, files: list[RecordFile], name: str) -> Iterator[str]:
    for file in files:
        yield from pq.read_table(ledger.run_dir / file.name, columns=[name])[name].to_pylist()


def _check_plan(ledger: Ledger) -> Iterator[str]:
    """Every done job has exactly one row of its own, of the attempt that the ledger names, and no other job has any."""
    due = dict(ledger.done_jobs())
    seen: dict[str, int] = {}
    for file in ledger.files("jobs"):
        table = pq.read_table(ledger.run_dir / file.name, columns=["job_id", "attempt", "warmup", "pair_only"])
        for job_id, attempt, warmup, pair_only in zip(*(column.to_pylist() for column in table.columns), strict=True):
            if warmup or pair_only:
                continue
            if job_id in seen:
                yield f"job {job_id} has rows twice."
            seen[job_id] = attempt
    for job_id in due.keys() - seen.keys():
        yield f"job {job_id} is done but has no rows."
    for job_id in seen.keys() - due.keys():
        yield f"job {job_id} has rows but is not done."
    for job_id in due.keys() & seen.keys():
        if due[job_id] != seen[job_id]:
            yield f"job {job_id} has rows of attempt {seen[job_id]}, the ledger says {due[job_id]}."


def describe(run_dir: Path) -> str:
    """One line about a run's files: how many, rows, bytes."""
    with Ledger.open(run_dir, readonly=True) as ledger:
        files = ledger.files()
    rows = {name: sum(file.rows for file in files if file.table == name) for name in SCHEMAS}
    return json.dumps({"files": len(files), "bytes": sum(file.bytes for file in files), "rows": rows})

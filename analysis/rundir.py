"""A run directory as found: which committed files are there and whole, and what is missing."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dfbench.analysis.schema import LEDGER, PROMPTS, RECORDS, SCHEMA_VERSION
from dfbench.errors import RunError

RUNS = Path("runs")
LEDGER_FILE = "ledger.db"
PROMPTS_FILE = "prompts.parquet"
SUMS = "sums"
_MAGIC = b"PAR1"
_NO_SETTINGS = "what the run was begun with cannot be read (its ledger's entry 'run' is not JSON)"
_LEFT_OUT = {
    False: "its shards are left out (submit the sweep again to run them anew)",
    True: "step rows are added up in their place",
}
_FOLDERS = ("records", "log")
_FILES = (LEDGER_FILE, PROMPTS_FILE, "sweep.yaml", "driver.lock", "run.sql")


class Problem(NamedTuple):
    """Something that a reader of the run must know: `kind` is a short name, `detail` a sentence."""

    kind: str
    detail: str


class Source(NamedTuple):
    """The readable Parquet files of one table and which of its known columns they have."""

    files: tuple[str, ...]
    columns: frozenset[str]
    mixed: bool


@dataclass
class RunDir:
    """What `inspect` found. File names are relative to `path`."""

    path: Path
    meta: dict[str, str]
    sources: dict[str, Source] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        return [name for source in self.sources.values() for name in source.files]


def find_run(path: str | Path | None = None, runs: Path = RUNS) -> Path:
    """The run directory that `path` means; without one the newest under `runs/`. Raises RunError."""
    if path is not None:
        given = Path(path)
        if (given / LEDGER_FILE).is_file():
            return given
        if not given.is_dir() and (runs / given / LEDGER_FILE).is_file():
            return runs / given
        if not given.exists():
            raise RunError(f"there is no run at '{given}': write the path of a folder that `dfbench submit` made.")
        raise RunError(f"'{given}' is not a run, it has no {LEDGER_FILE}: write the folder that `dfbench submit` made.")
    latest = runs / "latest"
    if (latest / LEDGER_FILE).is_file():
        return runs / latest.readlink() if latest.is_symlink() else latest
    found = [entry.parent for entry in runs.glob(f"*/{LEDGER_FILE}")]
    if not found:
        raise RunError(f"there is no run under '{runs}/': name a run directory, or make one with `dfbench submit`.")
    return max(found, key=lambda run: (run / LEDGER_FILE).stat().st_mtime)


def run_settings(meta: Mapping[str, str]) -> dict[str, Any]:
    """What the run was begun with, as its ledger keeps it; empty where it keeps nothing. Raises RunError."""
    try:
        found: Any = json.loads(meta.get("run", "{}"))
    except ValueError as error:
        raise RunError(f"{_NO_SETTINGS}: submit the sweep again to a new directory.") from error
    return dict(found) if isinstance(found, dict) else {}


def require_not_own(file: Path) -> None:
    """Raise RunError where writing `file` would replace a part of a run: its ledger, records, prompts or logs."""
    place = file.expanduser().absolute()
    for folder in place.parents:
        if (folder / LEDGER_FILE).is_file():
            part = place.relative_to(folder).parts
            if part[0] in _FOLDERS or (len(part) == 1 and part[0].startswith(_FILES)):
                raise RunError(f"'{file}' is a part of the run in '{folder}': write another file.")


def connect_ledger(run: Path) -> sqlite3.Connection:
    """The ledger, opened read-only beside whoever writes it."""
    uri = f"{(run / LEDGER_FILE).resolve().as_uri()}?mode=ro"
    return sqlite3.connect(uri, uri=True, timeout=10, check_same_thread=False)


def ledger_table(run: Path, name: str, schema: pa.Schema) -> pa.Table:
    """One ledger table of `schema.LEDGER` as Arrow."""
    query, _ = LEDGER[name]
    ledger = connect_ledger(run)
    try:
        rows = ledger.execute(query).fetchall()
    finally:
        ledger.close()  # at once: an open reader holds back the writer's checkpoints
    return pa.Table.from_arrays(
        [pa.array([row[i] for row in rows], entry.type) for i, entry in enumerate(schema)], schema=schema
    )


def inspect(run: Path) -> RunDir:
    """Read the ledger and look at every file that it names; nothing is opened but footers. Raises RunError."""
    try:
        ledger = connect_ledger(run)
        try:
            meta = dict(ledger.execute("select key, value from meta").fetchall())
            files = ledger.execute("select name, tbl, bytes from files where live order by rowid").fetchall()
            states = dict(ledger.execute("select state, count(*) from jobs group by state").fetchall())
            begun = ledger.execute("select exists (select 1 from workers)").fetchone()[0] == 1
            unread = ledger.execute(
                "select worker_id from workers where facts <> '' and not json_valid(facts)"
            ).fetchall()
            broken = _broken(run, files)
            sums = {name for name, table, _ in files if table == SUMS}
            lost = _same_commit(ledger, broken, sums) if broken else set()
        finally:
            ledger.close()
    except sqlite3.Error as error:
        raise RunError(
            f"the ledger of '{run}' cannot be read ({error}): submit the sweep again to a new directory."
        ) from error
    found = RunDir(run, meta)
    try:
        run_settings(meta)
    except RunError:
        found.problems.append(Problem("settings", f"{_NO_SETTINGS}: its settings are not shown."))
    if unread:
        who = ", ".join(worker for (worker,) in unread)
        found.problems.append(Problem("workers", f"what worker {who} said of itself is no JSON: figures lack it."))
    found.problems += _file_problems(broken, lost, sums) + _job_problems(states, meta.get("state", ""), begun)
    names: dict[str, list[str]] = {table: [] for table in RECORDS}
    for name, table, _ in files:
        if table in names and name not in lost:
            names[table].append(name)
    for table, listed in names.items():
        found.sources[table] = _source(found, table, listed, RECORDS[table])
    present = [PROMPTS_FILE] if (run / PROMPTS_FILE).is_file() else []
    if not present:
        found.problems.append(Problem("prompts", f"{PROMPTS_FILE} is missing: no prompt texts can be shown."))
    found.sources["prompts"] = _source(found, "prompts", present, PROMPTS)
    return found


def _broken(run: Path, files: Iterable[tuple[str, str, int]]) -> dict[str, str]:
    """Committed files that are missing, not as long as the ledger says, or without the end that Parquet has."""
    broken = {}
    for name, _, size in files:
        try:
            with (run / name).open("rb") as handle:
                actual = handle.seek(0, os.SEEK_END)
                handle.seek(max(actual - len(_MAGIC), 0))
                end = handle.read()
        except OSError:
            broken[name] = "is missing"
            continue
        if actual != size:
            broken[name] = f"has {actual} of {size} bytes"
        elif end != _MAGIC:
            broken[name] = "is not a readable Parquet file"
    return broken


def _same_commit(ledger: sqlite3.Connection, broken: Iterable[str], sums: Collection[str]) -> set[str]:
    """Every live file that shares a shard with a broken one: half of a shard's tables would give wrong figures.

    Broken `sums` go alone: what they lack is added up from the step rows.
    """
    lost = {name for name in broken if name in sums}
    for name in set(broken) - lost:
        rows = ledger.execute(
            "select distinct other.name from file_shards mine join file_shards other using (shard_id) "
            "where mine.name = ?",
            (name,),
        )
        lost |= {name, *(row[0] for row in rows)}
    return lost


def _file_problems(broken: dict[str, str], lost: set[str], sums: Collection[str]) -> list[Problem]:
    problems = [Problem("file", f"{name} {state}; {_LEFT_OUT[name in sums]}.") for name, state in broken.items()]
    others = len(lost) - len(broken)
    if others > 0:
        problems.append(Problem("file", f"{others} whole files of the same commits are left out with them."))
    return problems


def _job_problems(states: dict[str, int], state: str, begun: bool) -> list[Problem]:
    total = sum(states.values())
    if not total:
        return [Problem("plan", "the plan is empty: the run was not fully prepared; submit the sweep again.")]
    missing = [f"{count} {state}" for state, count in sorted(states.items()) if state != "done"]
    if not missing:
        return []
    done = states.get("done", 0)
    return [Problem("unfinished", f"{standing(state, begun)}: {done} of {total} jobs are done ({', '.join(missing)}).")]


def standing(state: str, begun: bool) -> str:
    """What the ledger's `state` means for a reader who does not know whether a driver is at work.

    A run that stopped before its end is planned anew, and `running` outlives a driver that died.
    """
    if state == "planned":
        return "stopped" if begun else "planned, not begun"
    return {"running": "running, or its driver died", "done": "ended"}.get(state, state or "of unknown state")


def _source(found: RunDir, table: str, files: list[str], known: Iterable[str]) -> Source:
    """Which known columns the files have. Versions only grow while a run is written, so its two ends tell of all."""
    readable = list(files)
    schemas = []
    for name in dict.fromkeys([*files[:1], *files[-1:]]):
        try:
            schemas.append(pq.read_schema(found.path / name))
        except (pa.ArrowInvalid, OSError):
            readable.remove(name)
            found.problems.append(Problem("file", f"{name} is not a readable Parquet file and is left out."))
    versions = [_version(schema) for schema in schemas]
    if versions and max(versions) > SCHEMA_VERSION:
        found.problems.append(
            Problem(
                "version",
                f"{table} has schema version {max(versions)}, this dfbench knows {SCHEMA_VERSION}: columns it does not "
                "know are left out; update dfbench to see them.",
            )
        )
    columns = {column for schema in schemas for column in schema.names}
    absent = [column for column in known if column not in columns]
    if schemas and absent:
        instead = _LEFT_OUT[True] if table == SUMS else "they read as NULL"
        found.problems.append(Problem("columns", f"{table} has no {', '.join(absent)}: {instead}."))
        if table == SUMS:
            return Source((), frozenset(), mixed=False)
    mixed = any(schema.names != schemas[0].names for schema in schemas)
    return Source(tuple(readable), frozenset(columns.intersection(known)), mixed)


def _version(schema: pa.Schema) -> int:
    value = (schema.metadata or {}).get(b"dfbench.schema_version", b"1")
    return int(value) if value.isdigit() else 1


def as_rows(problems: Iterable[Problem]) -> dict[str, list[Any]]:
    """Problems by column."""
    listed = list(problems)
    return {"kind": [problem.kind for problem in listed], "detail": [problem.detail for problem in listed]}

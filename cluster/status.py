"""Where a run stands, read from its directory alone: jobs by arm and node, rate, time left, what failed and its log."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dfbench.cluster import progress
from dfbench.cluster.events import LOG_FOLDER, shard_log
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.ledger_schema import LEDGER_FILE, Counts
from dfbench.cluster.run_place import driver_alive

SHOWN_FAILURES = 10
_WORDS = ("begin", "worker ready", "stopped")


@dataclass(frozen=True)
class NodeStanding:
    """One node: its devices, workers that are there now, finished shards, and the shards it works on."""

    node: str
    devices: tuple[str, ...]
    workers: int
    shards_done: int
    running: tuple[str, ...]


@dataclass(frozen=True)
class FailedJob:
    """One failed job and why its last attempt failed; `log` is the shard's log file."""

    shard_id: str
    job_id: str
    arm: str
    prompt_id: str
    kind: str
    message: str
    node: str | None
    log: str


@dataclass(frozen=True)
class Status:
    """A run at one moment. `rate` is jobs a second since work began, None while no driver is at it.

    `stopped`: why the last driver gave up, "" while one is at work and where it came to its end.
    """

    run_dir: str
    sweep: str
    state: str
    driver: bool
    jobs: dict[str, int]
    arms: dict[str, dict[str, int]]
    nodes: tuple[NodeStanding, ...]
    rate: float | None
    eta_s: float | None
    failed: tuple[FailedJob, ...]
    stopped: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def read(run_dir: Path) -> Status:
    """Where this run stands. Raises RunError where there is none."""
    alive = driver_alive(run_dir)
    said = _last_words(run_dir / LOG_FOLDER / "driver.jsonl")
    with Ledger.open(run_dir, readonly=True) as ledger:
        counts = ledger.counts()
        rate, eta = _pace(said, counts) if alive else (None, None)
        state = ledger.state
        return Status(
            run_dir=str(run_dir),
            sweep=ledger.run.sweep,
            state=_shown(state, alive, begun=bool(ledger.workers())),
            driver=alive,
            jobs=_plain(counts),
            arms={arm: _plain(part) for arm, part in ledger.counts_by_arm().items()},
            nodes=_nodes(run_dir, ledger),
            rate=rate,
            eta_s=eta,
            failed=_failed(run_dir) if counts.failed else (),
            stopped="" if alive else _why(said),
        )


def _shown(state: str, alive: bool, *, begun: bool) -> str:
    """The ledger's state in a person's words: `running` outlives a driver that died; stopped, it plans anew."""
    if alive or state not in ("running", "planned"):
        return state
    return "stopped" if begun or state == "running" else "planned"


def _plain(counts: Counts) -> dict[str, int]:
    states = {name: getattr(counts, name) for name in ("done", "failed", "pending", "cancelled")}
    return {**states, "total": counts.total}


def _pace(said: dict[str, dict[str, Any]], counts: Counts) -> tuple[float | None, float | None]:
    """Jobs a second since the driver's first worker was ready, and the seconds left at that rate."""
    if "begin" not in said or "worker ready" not in said:
        return None, None
    seconds = (datetime.now(UTC) - datetime.fromisoformat(said["worker ready"]["at"])).total_seconds()
    settled = int(said["begin"]["left"]) - counts.pending
    if seconds <= 0 or settled <= 0:
        return None, None
    return settled / seconds, counts.pending * seconds / settled


def _why(said: dict[str, dict[str, Any]]) -> str:
    """What ended the last driver, in the words that it raised."""
    kind, _, message = str(said.get("stopped", {}).get("error", "")).partition(": ")
    return "it was interrupted" if kind == "KeyboardInterrupt" else message or kind


def _last_words(log: Path) -> dict[str, dict[str, Any]]:
    """Of the last driver: how it began, its first ready worker, and why it stopped; what a full disk has torn is left
    out."""
    said: dict[str, dict[str, Any]] = {}
    if not log.is_file():
        return said
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name = next((name for name in _WORDS if f'"event": "{name}"' in line), None)
            if name is None:
                continue
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if name == "begin":
                said = {}
            said.setdefault(name, event)
    return said


def _nodes(run_dir: Path, ledger: Ledger) -> tuple[NodeStanding, ...]:
    workers = ledger.workers()
    running = ledger.running()
    done = dict(_query(run_dir, "select worker_id, count(*) from shards where state = 'done' group by worker_id"))
    by_node: dict[str, list[Any]] = {}
    for worker in workers:
        by_node.setdefault(worker.node, []).append(worker)
    return tuple(
        NodeStanding(
            node=node,
            devices=tuple(sorted({worker.device for worker in here})),
            workers=sum(worker.left_at is None for worker in here),
            shards_done=sum(done.get(worker.worker_id, 0) for worker in here),
            running=tuple(shard for shard, who in running.items() if who in {worker.worker_id for worker in here}),
        )
        for node, here in by_node.items()
    )


def _failed(run_dir: Path) -> tuple[FailedJob, ...]:
    rows = _query(
        run_dir,
        """
        select j.shard_id, j.job_id, j.arm, j.prompt_id, a.kind, a.message, a.node
        from jobs j left join attempts a on a.rowid = (
            select max(b.rowid) from attempts b
            where b.shard_id = j.shard_id and (b.job_id = j.job_id or b.job_id is null))
        where j.state = 'failed' order by j.rowid
        """,
    )
    return tuple(
        FailedJob(shard, job, arm, prompt, kind or "unknown", message or "", node, str(shard_log(run_dir, shard)))
        for shard, job, arm, prompt, kind, message, node in rows
    )


def _query(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    ledger = sqlite3.connect(f"{(run_dir / LEDGER_FILE).resolve().as_uri()}?mode=ro", uri=True, timeout=10)
    try:
        return ledger.execute(query).fetchall()
    finally:
        ledger.close()


def line(status: Status) -> str:
    """The status in one line."""
    jobs = status.jobs
    failed = f", {jobs['failed']} failed" if jobs["failed"] else ""
    return f"{status.sweep}, {status.state}, {jobs['done']} of {jobs['total']} jobs done{failed}"


def render(status: Status) -> RenderableType:
    """The status as tables for a terminal."""
    parts: list[RenderableType] = [Text(f"{status.run_dir}: {line(status)}"), _arm_table(status)]
    if status.stopped:
        parts.append(Text(f"the last driver stopped: {status.stopped}"))
    if status.rate is not None:
        parts.append(Text(f"{progress.rate(status.rate)}, {progress.duration(status.eta_s)} left"))
    if status.nodes:
        parts.append(_node_table(status))
    if status.failed:
        parts.append(_failure_table(status))
        more = len(status.failed) - SHOWN_FAILURES
        parts.append(
            Text((f"and {more} more; " if more > 0 else "") + f"run them again: dfbench retry {status.run_dir}")
        )
    return Group(*parts)


def _arm_table(status: Status) -> Table:
    table = Table("arm", *(_right(name) for name in ("done", "failed", "left")), box=None)
    for arm, counts in status.arms.items():
        table.add_row(arm, str(counts["done"]), str(counts["failed"]), str(counts["pending"] + counts["cancelled"]))
    return table


def _node_table(status: Status) -> Table:
    table = Table("node", "device", _right("workers"), _right("shards done"), "at work on", box=None)
    for node in status.nodes:
        shards = ", ".join(node.running) if status.driver else ""
        row = (node.node, ", ".join(node.devices), str(node.workers), str(node.shards_done), shards)
        table.add_row(*map(Text, row))
    return table


def _failure_table(status: Status) -> Table:
    table = Table("shard", "arm", "prompt", "kind", "message", "log", box=None)
    for failed in status.failed[:SHOWN_FAILURES]:
        what = (failed.message.splitlines() or [""])[0][:120]
        # As text: rich reads markup in plain strings, and a prompt's id or a path may hold brackets.
        row = (failed.shard_id, failed.arm, failed.prompt_id, failed.kind, what, failed.log)
        table.add_row(*map(Text, row))
    return table


def _right(name: str) -> Any:
    from rich.table import Column

    return Column(name, justify="right")

"""`dfbench nodes`: the cluster, node by node: device, memory, versions, what it works on, and what is wrong with it.

Put together from what can be read without joining: the head's list of nodes, the readings that Ray's dashboard collects
from each machine, and the ledgers of the runs whose drivers are at work here.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dfbench.cluster import stack
from dfbench.cluster.events import LOG_FOLDER
from dfbench.cluster.head import Head, Node, auth_token, is_loopback
from dfbench.cluster.join import head_versions
from dfbench.cluster.ledger import Ledger, driver_alive, exists
from dfbench.workers.telemetry import HOT_CELSIUS

DASHBOARD_TIMEOUT_S = 5.0
LOW_MEMORY = 2 * 10**9
LOW_DISK = 5 * 10**9
_GB = 1e9


@dataclass(frozen=True)
class NodeReport:
    """One node. Bytes of memory; `shards` it works on now; `rate` jobs a second so far; `problems` in words."""

    name: str
    node_id: str
    role: str
    state: str
    device: str
    devices: int
    memory_free: int | None
    memory_total: int | None
    device_memory_free: int | None
    device_memory_total: int | None
    versions: Mapping[str, str]
    shards: list[str] = field(default_factory=list)
    rate: float | None = None
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class _Work:
    """What the runs at work here say about one node."""

    shards: list[str] = field(default_factory=list)
    done: int = 0
    seconds: float = 0.0
    aside: str = ""


def report(head: Head, runs: Sequence[Path] = (), token: str | None = None) -> list[NodeReport]:
    """Every node, the head first, the dead last. `runs`: folders whose live runs tell who works on what."""
    readings = dashboard(head, token)
    work = _work(runs)
    wanted = head_versions(head)
    alive_names = {node.name for node in head.alive}
    # A node that came back is a new node to Ray; the corpse of its former life is of no interest.
    dead = [node for node in head.nodes if not node.alive and node.name not in alive_names]
    latest = {node.name: node for node in dead}
    return [
        _report(node, wanted, readings.get(node.node_id, {}), work.get(node.name, _Work()))
        for node in [*head.alive, *latest.values()]
    ]


def warnings(head: Head) -> list[str]:
    """What is wrong with the cluster as a whole."""
    found = []
    if head.open and not _only_here(head):
        found.append(
            f"the head at {head.address} asks for no token: whoever reaches it can run code on every node. End it and "
            "start it again with RAY_AUTH_MODE=token (`dfbench up`)."
        )
    if "dfbench/dfbench" not in head_versions(head):
        found.append("the head does not say which versions it has: run `dfbench nodes --announce` on it.")
    return found


def _only_here(head: Head) -> bool:
    """Ray's head listens on every interface, so only its node's own address tells whether others can reach it."""
    return is_loopback(head.address) and (head.node is None or is_loopback(f"{head.node.address}:0"))


def dashboard(head: Head, token: str | None = None) -> dict[str, dict[str, Any]]:
    """Ray's own readings by node id, empty where there is no dashboard to ask."""
    if not head.dashboard:
        return {}
    request = urllib.request.Request(f"http://{head.dashboard}/nodes?view=summary")
    if not head.open and (secret := token or auth_token()):
        request.add_header("Authorization", f"Bearer {secret}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=DASHBOARD_TIMEOUT_S) as answer:
            summary = json.load(answer)["data"]["summary"]
    except (OSError, ValueError, KeyError, urllib.error.URLError):
        return {}
    return {entry["raylet"]["nodeId"]: entry for entry in summary if entry.get("raylet", {}).get("nodeId")}


def _report(node: Node, wanted: Mapping[str, str], reading: Mapping[str, Any], work: _Work) -> NodeReport:
    memory = reading.get("mem") or (None, None)
    gpus = reading.get("gpus") or []
    mine = stack.versions(node.labels)
    return NodeReport(
        name=node.name,
        node_id=node.node_id,
        role="head" if node.is_head else "node",
        state=("busy" if work.shards else "idle") if node.alive else "dead",
        device=node.labels.get(stack.DEVICE_LABEL) or (gpus[0]["name"] if gpus else "unknown"),
        devices=int(node.resources.get("GPU", 0)) or 1,
        memory_total=memory[0],
        memory_free=memory[1],
        device_memory_total=sum(gpu["memory_total"] for gpu in gpus) * 2**20 if gpus else None,
        device_memory_free=sum(gpu["memory_total"] - gpu["memory_used"] for gpu in gpus) * 2**20 if gpus else None,
        versions=mine,
        shards=work.shards,
        rate=work.done / work.seconds if work.seconds > 0 else None,
        problems=list(_problems(node, wanted, mine, reading, work)),
    )


def _problems(
    node: Node, wanted: Mapping[str, str], mine: Mapping[str, str], reading: Mapping[str, Any], work: _Work
) -> Iterator[str]:
    if not node.alive:
        yield f"gone: {node.reason or 'no reason given'}"
        return
    if "dfbench/dfbench" not in mine and not node.is_head:
        yield "started without dfbench's labels: leave and use `dfbench join`"
    elif not node.is_head and "dfbench/dfbench" in wanted:
        yield from stack.differences(mine, wanted, here="there")
    if not reading:
        yield "no readings: Ray's dashboard has none of it yet"
    yield from _machine_problems(reading)
    for gpu in reading.get("gpus") or []:
        if (gpu.get("temperature_c") or 0) >= HOT_CELSIUS:
            yield f"GPU {gpu['index']} is {gpu['temperature_c']} °C hot"
        if not work.shards and (gpu.get("utilization_gpu") or 0) > 10:
            yield f"GPU {gpu['index']} is {gpu['utilization_gpu']} % busy with something else"
    if work.aside:
        yield f"set aside by the driver: {work.aside}"


def _machine_problems(reading: Mapping[str, Any]) -> Iterator[str]:
    memory = reading.get("mem")
    if memory and memory[1] < LOW_MEMORY:
        yield f"only {memory[1] / _GB:.1f} GB of memory are free"
    for mount, disk in (reading.get("disk") or {}).items():
        if disk["free"] < LOW_DISK:
            yield f"only {disk['free'] / _GB:.1f} GB are free on {mount}"
            return


def _work(runs: Sequence[Path]) -> dict[str, _Work]:
    """By node name, over every run in `runs` that has a driver at work now."""
    found: dict[str, _Work] = {}
    for run_dir in sorted({path.resolve() for folder in runs if folder.is_dir() for path in folder.iterdir()}):
        if not exists(run_dir) or not driver_alive(run_dir):
            continue
        with Ledger.open(run_dir, readonly=True) as ledger:
            for name, work in _work_of(ledger).items():
                found[name] = _add(found.get(name, _Work()), work)
        for name, reason in _set_aside(run_dir).items():
            found[name] = _add(found.get(name, _Work()), _Work(aside=reason))
    return found


def _work_of(ledger: Ledger) -> dict[str, _Work]:
    workers = {worker.worker_id: worker for worker in ledger.workers()}
    done = ledger.done_by_worker()
    found: dict[str, _Work] = {}
    for worker in workers.values():
        seconds = (_time(worker.left_at) - _time(worker.joined_at)).total_seconds()
        found[worker.node] = _add(found.get(worker.node, _Work()), _Work([], done.get(worker.worker_id, 0), seconds))
    for shard, worker_id in ledger.running().items():
        if worker_id in workers:
            name = workers[worker_id].node
            found[name] = _add(found[name], _Work([shard]))
    return found


def _set_aside(run_dir: Path) -> dict[str, str]:
    """The nodes that the driver at work has set aside, and why, from its log."""
    found: dict[str, str] = {}
    file = run_dir / LOG_FOLDER / "driver.jsonl"
    if not file.is_file():
        return found
    with file.open(encoding="utf-8") as log:
        for line in log:
            if '"begin"' in line or '"node set aside"' in line:
                event = json.loads(line)
                if event["event"] == "begin":
                    found = {}  # Another driver, which judges afresh.
                elif event["event"] == "node set aside":
                    found[event["node"]] = event["reason"]
    return found


def _add(one: _Work, other: _Work) -> _Work:
    return _Work(
        one.shards + other.shards,
        one.done + other.done,
        one.seconds + other.seconds,
        other.aside or one.aside,
    )


def _time(text: str | None) -> datetime:
    return datetime.fromisoformat(text) if text else datetime.now(UTC)

"""`dfbench nodes`: the cluster, node by node: device, memory, versions, what it works on, and what is wrong with it.

Put together from what can be read without joining: the head's list of nodes, the readings that Ray's dashboard collects
from each machine, and what the drivers at work, wherever they run, write on the head.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dfbench.cluster import notice, stack
from dfbench.cluster.head import Head, Node, auth_token, is_loopback
from dfbench.cluster.join import head_versions
from dfbench.cluster.notice import Work
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
        return {**asdict(self), "versions": stack.as_written(self.versions)}


def report(head: Head, token: str | None = None) -> list[NodeReport]:
    """Every node, the head first, the dead last."""
    readings = dashboard(head, token)
    work = notice.read(head)
    wanted = head_versions(head)
    alive_names = {node.name for node in head.alive}
    # A node that came back is a new node to Ray; the corpse of its former life is of no interest.
    dead = [node for node in head.nodes if not node.alive and node.name not in alive_names]
    latest = {node.name: node for node in dead}
    listed = [*head.alive, *latest.values()]
    return [
        _report(node, name, wanted, readings.get(node.node_id, {}), work.get(node.node_id, Work()))
        for node, name in zip(listed, _names(listed), strict=True)
    ]


def _names(nodes: Sequence[Node]) -> list[str]:
    """What to call each node: its name, and where several nodes of one machine share one, the port they differ in."""
    count = Counter(node.name for node in nodes)
    return [node.name if count[node.name] == 1 else f"{node.name}:{node.port}" for node in nodes]


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


def _report(node: Node, name: str, wanted: Mapping[str, str], reading: Mapping[str, Any], work: Work) -> NodeReport:
    memory = reading.get("mem") or (None, None)
    gpus = reading.get("gpus") or []
    mine = stack.versions(node.labels)
    return NodeReport(
        name=name,
        node_id=node.node_id,
        role="head" if node.is_head else "node",
        state=("busy" if work.shards else "idle") if node.alive else "dead",
        device=stack.device(node.labels) or (gpus[0]["name"] if gpus else "unknown"),
        devices=int(node.resources.get("GPU", 0)) or 1,
        memory_total=memory[0],
        memory_free=memory[1],
        device_memory_total=sum(gpu["memory_total"] for gpu in gpus) * 2**20 if gpus else None,
        device_memory_free=sum(gpu["memory_total"] - gpu["memory_used"] for gpu in gpus) * 2**20 if gpus else None,
        versions=mine,
        shards=work.shards,
        rate=work.rate,
        problems=list(_problems(node, wanted, mine, reading, work)),
    )


def _problems(
    node: Node, wanted: Mapping[str, str], mine: Mapping[str, str], reading: Mapping[str, Any], work: Work
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

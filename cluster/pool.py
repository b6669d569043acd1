"""Ray as the driver sees it: connecting, nodes and their devices, and one remote worker a device.

All of Ray's objects stay in this module and in `driver`, where they are waited for.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from dfbench.cluster import session
from dfbench.cluster.commit import FinishedShard
from dfbench.cluster.head import own_cluster, parse_address
from dfbench.cluster.runspec import ShardRow
from dfbench.cluster.stack import DEVICE_LABEL
from dfbench.errors import ClusterError
from dfbench.workers.actor import Pulse, Ready, Worker
from dfbench.workers.shipped import Shipped, named
from dfbench.workers.spec import ArmSpec, TargetSpec

BACKPRESSURE = 8
"""Parts that a worker may be ahead of the driver."""
FREE_WITHIN_S = 10.0
"""Seconds in which a worker's process starts, where its device is free; afterwards it is said to wait for it."""


class Node(NamedTuple):
    """A live member of the cluster."""

    node_id: str
    name: str
    cpus: int
    gpus: int
    labels: dict[str, str]


class Device(NamedTuple):
    """One place for a worker: the n-th of its node, with the resources it asks for."""

    node: Node
    number: int
    cpus: float
    gpus: float

    @property
    def key(self) -> tuple[str, int]:
        return (self.node.node_id, self.number)


def connect(address: str = "local", *, workers: int | None = None, labels: Mapping[str, str] | None = None) -> None:
    """Join a Ray cluster, or start one on this machine. Raises ClusterError where there is none to join.

    `workers` is for how many a local one must have room, `labels` what its node says of itself.

    A local one listens on loopback only and asks for a token that lives as long as this process: other users of the
    machine cannot reach it, and no token file is left behind for `ray start` to trip over.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Whatever logging it is told, Ray prints what its nodes complain of: pages when one dies. They log it themselves.
    ray._private.worker.listen_error_messages = lambda *_: None
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "dfbench"}
    quiet["job_config"] = _job_config()
    if address == "local":
        authenticate("token", os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32))
        # Ray starts workers at a lower priority than everything else; what is measured should not wait behind it.
        os.environ.setdefault("RAY_worker_niceness", "0")
        cpus = max(os.cpu_count() or 1, workers or 0)
        local: dict[str, Any] = {"_node_ip_address": "127.0.0.1", "_node_name": platform.node() or "localhost"}
        _init_local(
            {
                "address": "local",
                "include_dashboard": False,
                "num_cpus": cpus,
                "labels": dict(labels or {}),
                **local,
                **quiet,
            }
        )
        return
    if address == "auto":
        address = own_cluster()
    if address != "auto":
        address = parse_address(address)
    _require_answer(address)
    authenticate(os.environ.get("RAY_AUTH_MODE") or ("token" if has_token() else "disabled"))
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        raise ClusterError(
            f"no Ray cluster answers at {address} ({type(error).__name__}): start one with `dfbench up`, "
            "or write --address with that of its head."
        ) from error


class _PathsOfOurs(list[str]):
    """What Ray tells workers to import from, without the current folder: a folder in it that is named like one of our
    packages would be imported in place of it."""

    def extend(self, paths: Iterable[str]) -> None:
        here = str(Path.cwd())
        super().extend(path for path in paths if path != here)


def _job_config() -> ray.job_config.JobConfig:
    config = ray.job_config.JobConfig()
    config._py_driver_sys_path = _PathsOfOurs()
    return config


def _init_local(settings: dict[str, Any]) -> None:
    """Start Ray here. It gives itself 30 s, which a busy machine can exceed once; the second try finds files cached."""
    session.require_room()
    for last in (False, True):
        before = session.folders()
        try:
            ray.init(**settings)
            return
        except OSError as error:
            raise session.unusable(Path(error.filename or session.temp_folder()), error) from error
        except Exception as error:  # Ray raises a bare Exception for a node that did not come up in time.
            if "timed out" not in str(error).lower():
                raise
            ray.shutdown()
            logs = " ".join(str(folder) for folder in session.folders() - before)
            if last:
                raise ClusterError(
                    "Ray did not start within its time limit, twice: wait until this machine is less busy,"
                    f" then run the same command again; its logs are in {logs or session.temp_folder()}."
                ) from error


def _require_answer(address: str) -> None:
    """Raise ClusterError at once where nobody listens: Ray itself would try for minutes, then end the process."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise ClusterError(
            f"nobody answers at {address} ({error}): start a cluster with `dfbench up`, or write --address with that "
            "of its head."
        ) from error


def authenticate(mode: str, token: str | None = None) -> None:
    """Say explicitly whether Ray asks for a token, to this process and its children; Ray reads it once, at import."""
    os.environ["RAY_AUTH_MODE"] = mode
    if token is not None:
        os.environ["RAY_AUTH_TOKEN"] = token
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def has_token() -> bool:
    """Whether this user has a Ray token to show."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or Path(named).expanduser().is_file()


def live_nodes() -> list[Node]:
    """Every node that Ray believes to be alive."""
    return [
        Node(
            entry["NodeID"],
            entry["NodeName"],
            int(entry["Resources"].get("CPU", 0)),
            int(entry["Resources"].get("GPU", 0)),
            dict(entry.get("Labels") or {}),
        )
        for entry in ray.nodes()  # type: ignore[no-untyped-call]
        if entry["Alive"]
    ]


def devices(
    nodes: list[Node], target: TargetSpec, *, workers_per_node: int | None = None, device: str | None = None
) -> list[Device]:
    """Where workers may live: one a GPU; without GPUs, one a node for a model and one a core for the other targets.

    A model that may choose its device leaves nodes without a GPU alone as soon as one node has one.
    """
    if device is not None:
        nodes = [node for node in nodes if is_device(device, node.labels.get(DEVICE_LABEL, device))]
    on_gpu = target.kind == "torch" and target.device != "cpu"
    if on_gpu and (target.device.startswith("cuda") or any(node.gpus for node in nodes)):
        return [
            Device(node, index, 1, 1.0) for node in nodes for index in range(min(node.gpus, workers_per_node or 99))
        ]
    return [place for node in nodes for place in _on_cores(node, target.kind, workers_per_node)]


def is_device(wanted: str, name: str) -> bool:
    """Whether a device's name, or the label made of it, contains what was asked for: letters and digits count."""
    plain = [re.sub(r"[^a-z0-9]", "", text.lower()) for text in (wanted, name)]
    return plain[0] in plain[1]


def _on_cores(node: Node, kind: str, workers_per_node: int | None) -> Iterator[Device]:
    if node.cpus < 1:
        return
    count = workers_per_node or (1 if kind == "torch" else node.cpus)
    # Ray gives an actor as many threads as it asked for cores; more workers than cores share them.
    share = float(node.cpus // count) if count <= node.cpus else node.cpus / count * 0.99
    for index in range(count):
        yield Device(node, index, share, 0.0)


@dataclass
class Member:
    """A remote worker and what the driver knows about it: arriving, loading, idle, or at work on one shard.

    `arriving`: what it answers first, once its process is there; none is while all of its device is taken.
    """

    device: Device
    worker_id: str
    actor: Any
    loading: Any = None
    arriving: Any = None
    since: float = field(default_factory=time.monotonic)
    ready: Ready | None = None
    row: ShardRow | None = None
    shard: FinishedShard | None = None
    stream: Any = None
    pulse: Any = None
    pulse_sent: float = 0.0
    heard: float = 0.0
    last: Pulse | None = None
    moved: float = 0.0
    stop_sent: float = 0.0

    @property
    def node(self) -> str:
        return self.device.node.name

    @property
    def idle(self) -> bool:
        return self.ready is not None and self.shard is None

    @property
    def waiting(self) -> bool:
        """Whether its device seems to be taken: a process starts within seconds where it is free."""
        return self.arriving is not None and time.monotonic() - self.since > FREE_WITHIN_S

    def waitable(self) -> Any:
        """What Ray reports on next: the end of loading, or the next part of the shard."""
        return self.loading if self.loading is not None else self.stream

    def begin(self, row: ShardRow, shard: FinishedShard) -> None:
        """Send a shard; one call is in flight at a time, and its parts come back as a stream."""
        now = time.monotonic()
        self.row, self.shard, self.since, self.heard, self.moved = row, shard, now, now, now
        self.pulse, self.last, self.stop_sent = None, None, 0.0
        run = self.actor.run.options(num_returns="streaming", _generator_backpressure_num_objects=BACKPRESSURE)
        self.stream = run.remote(shard.spec)

    def end(self) -> None:
        self.row, self.shard, self.stream, self.pulse, self.last = None, None, None, None, None

    def ask_pulse(self) -> None:
        self.pulse = self.actor.pulse.options(concurrency_group="control").remote()
        self.pulse_sent = time.monotonic()

    def stop(self, job_id: str, *, leave: bool = False) -> None:
        """Ask the worker to stop this job at its next step, and with `leave` to begin no other of its shard."""
        self.actor.stop.options(concurrency_group="control").remote(job_id, leave)
        self.stop_sent = time.monotonic()

    def kill(self) -> None:
        ray.kill(self.actor, no_restart=True)


def ship(arms: Iterable[ArmSpec]) -> list[Any]:
    """Put the files that these arms name into Ray's object store, once for all workers."""
    return [ray.put(Shipped(digest, path.read_bytes())) for digest, path in named(arms)]


def hire(device: Device, target: TargetSpec, worker: type[Worker] = Worker, files: Sequence[Any] = ()) -> Member:
    """Start a worker on this device and have it load its target; `files` are what `ship` gave.

    Ray neither restarts it nor repeats its calls: a repeated stream would splice two attempts.
    """
    worker_id = f"{device.node.name}-{device.number}-{secrets.token_hex(3)}"
    remote: Any = ray.remote(concurrency_groups={"control": 2})(worker)  # type: ignore[call-overload]
    selector = {"ray.io/node-id": device.node.node_id}
    options: dict[str, Any] = {"num_cpus": device.cpus, "num_gpus": device.gpus, "label_selector": selector}
    options |= {"max_restarts": 0, "max_task_retries": 0}
    faults = {name: value for name, value in os.environ.items() if name.startswith("DFBENCH_FAULT")}
    if faults:
        options["runtime_env"] = {"env_vars": faults}
    actor = remote.options(**options).remote(target, device.node.name, worker_id)
    first = actor.pulse.options(concurrency_group="control").remote()
    return Member(device, worker_id, actor, loading=actor.load.remote(*files), arriving=first)

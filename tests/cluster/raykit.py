"""A Ray cluster of several nodes on this machine, made to be broken."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import Any

from dfbench.cluster import pool

SPARE = {"prestart_worker_first_driver": False}
"""Workers with a fault to happen in them have another environment than those that Ray would start ahead."""


class Cluster:
    """A head and nodes on this machine, made to be broken. Every process of it is ours and dies with it."""

    def __init__(self, nodes: int = 1, cpus: int = 2, address: str | None = None) -> None:
        """`address`: one of this machine to serve at, where loopback is not wanted."""
        pool.authenticate("token", os.environ.get("RAY_AUTH_TOKEN") or uuid.uuid4().hex * 2)
        from ray.cluster_utils import Cluster as RayCluster

        # A frozen node is noticed in some seconds, so that trials are short.
        self._place = {} if address is None else {"node_ip_address": address}
        health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_timeout_ms": 3000}
        config = {**health, "health_check_failure_threshold": 4, **SPARE}
        head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False, "_system_config": config, **self._place}
        self._ray = RayCluster(initialize_head=True, head_node_args=head)
        self.address = self._ray.address
        self.nodes = [self.add(cpus) for _ in range(nodes)]

    def add(self, cpus: int = 2) -> Any:
        return self._ray.add_node(num_cpus=cpus, **self._place)

    def remove(self, node: Any) -> None:
        """SIGKILL a whole node: raylet, agents and workers."""
        self._ray.remove_node(node, allow_graceful=False)

    def raylet(self, node: Any) -> int:
        """Process id of a node's raylet."""
        (info,) = node.all_processes["raylet"]
        return int(info.process.pid)

    def close(self) -> None:
        self._ray.shutdown()


@contextlib.contextmanager
def cluster(nodes: int = 1, cpus: int = 2) -> Iterator[Cluster]:
    made = Cluster(nodes, cpus)
    try:
        yield made
    finally:
        made.close()

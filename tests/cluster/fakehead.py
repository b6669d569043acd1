"""A head without Ray: the gRPC services that dfbench asks, answered from plain data, with or without a token."""

from __future__ import annotations

import json
from concurrent import futures
from typing import Any

import grpc
from ray.core.generated import (
    gcs_pb2,
    gcs_service_pb2,
    gcs_service_pb2_grpc,
    node_manager_pb2,
    node_manager_pb2_grpc,
)

from dfbench.cluster import stack

OVER = "0f000000"
"""The id of a Ray job that is over."""


class FakeHead:
    """Answers at `address`. `nodes` are Ray's own messages; `keys` its key-value store; `token` None = open."""

    def __init__(self, token: str | None = "secret") -> None:
        self.token = token
        self.nodes: list[Any] = []
        self.keys = {
            (b"cluster", b"CLUSTER_METADATA"): json.dumps(
                {"ray_version": "2.60.0", "python_version": "3.11.7"}
            ).encode()
        }
        self.live_jobs: list[str] = []
        self.seen: list[str | None] = []
        self.shut_down: list[bool] = []
        self.refuses = False
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(_NodeInfo(self), self._server)
        gcs_service_pb2_grpc.add_InternalKVGcsServiceServicer_to_server(_KeyValue(self), self._server)
        gcs_service_pb2_grpc.add_JobInfoGcsServiceServicer_to_server(_Jobs(self), self._server)
        node_manager_pb2_grpc.add_NodeManagerServiceServicer_to_server(_NodeManager(self), self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def add(self, name: str, *, head: bool = False, alive: bool = True, labels: dict[str, str] | None = None) -> str:
        """A node with this machine's versions unless told otherwise; returns its id."""
        node_id = f"{len(self.nodes) + 1:056x}"
        self.nodes.append(
            gcs_pb2.GcsNodeInfo(
                node_id=bytes.fromhex(node_id),
                node_manager_address=name,
                node_manager_hostname=f"host-{name}",
                node_manager_port=int(self.address.rpartition(":")[2]),
                node_name=name,
                state=0 if alive else 1,
                is_head_node=head,
                labels=stack.stack() if labels is None else labels,
                resources_total={"CPU": 2.0},
                start_time_ms=len(self.nodes),
            )
        )
        if not alive:
            self.nodes[-1].death_info.reason_message = "missing too many heartbeats"
        return node_id

    def stop(self) -> None:
        self._server.stop(None)

    def check(self, context: Any) -> None:
        """Refuse whoever does not show the token."""
        shown = dict(context.invocation_metadata()).get("authorization")
        self.seen.append(shown)
        if self.token is not None and shown != f"Bearer {self.token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")


class _NodeInfo(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
    def __init__(self, head: FakeHead) -> None:
        self._head = head

    def GetAllNodeInfo(self, request: Any, context: Any) -> Any:
        self._head.check(context)
        return gcs_service_pb2.GetAllNodeInfoReply(node_info_list=self._head.nodes)


class _KeyValue(gcs_service_pb2_grpc.InternalKVGcsServiceServicer):
    def __init__(self, head: FakeHead) -> None:
        self._head = head

    def InternalKVGet(self, request: Any, context: Any) -> Any:
        self._head.check(context)
        return gcs_service_pb2.InternalKVGetReply(value=self._head.keys.get((request.namespace, request.key), b""))

    def InternalKVKeys(self, request: Any, context: Any) -> Any:
        self._head.check(context)
        found = [key for space, key in self._head.keys if space == request.namespace and key.startswith(request.prefix)]
        return gcs_service_pb2.InternalKVKeysReply(results=found)

    def InternalKVPut(self, request: Any, context: Any) -> Any:
        self._head.check(context)
        self._head.keys[(request.namespace, request.key)] = request.value
        return gcs_service_pb2.InternalKVPutReply(added=True)


class _Jobs(gcs_service_pb2_grpc.JobInfoGcsServiceServicer):
    """Every job there ever was, those at work and one that is over."""

    def __init__(self, head: FakeHead) -> None:
        self._head = head

    def GetAllJobInfo(self, request: Any, context: Any) -> Any:
        self._head.check(context)
        jobs = [gcs_pb2.JobTableData(job_id=bytes.fromhex(job)) for job in self._head.live_jobs]
        jobs.append(gcs_pb2.JobTableData(job_id=bytes.fromhex(OVER), is_dead=True))
        return gcs_service_pb2.GetAllJobInfoReply(job_info_list=jobs)


class _NodeManager(node_manager_pb2_grpc.NodeManagerServiceServicer):
    """Every node of the stand-in that has a loopback address is served by the head's own server."""

    def __init__(self, head: FakeHead) -> None:
        self._head = head

    def ShutdownRaylet(self, request: Any, context: Any) -> Any:
        self._head.check(context)
        if self._head.refuses:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        self._head.shut_down.append(request.graceful)
        return node_manager_pb2.ShutdownRayletReply()

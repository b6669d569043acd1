"""What `dfbench nodes` says of each node, from the head, Ray's readings and the drivers' notices."""

from __future__ import annotations

import importlib.metadata
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from fakehead import OVER, FakeHead
from typer.testing import CliRunner

from dfbench.cluster import cli, notice, stack
from dfbench.cluster.head import NAMESPACE, NOTICES, read_head
from dfbench.cluster.nodes import NodeReport, report
from dfbench.cluster.notice import Work, as_notice
from dfbench.cluster.pool import Device, Member, Node

GB = 10**9


def reading(node_id: str, **changes: Any) -> dict[str, Any]:
    """What Ray's dashboard says of a healthy workstation with one card."""
    card = {"index": 0, "name": "RTX 5090", "utilization_gpu": 0, "memory_used": 1024, "memory_total": 32768}
    card |= {"temperature_c": 50, **changes.pop("gpu", {})}
    return {
        "mem": [64 * GB, 50 * GB, 20.0, 14 * GB],
        "gpus": [card],
        "disk": {"/": {"free": 100 * GB}},
        "raylet": {"nodeId": node_id},
        **changes,
    }


class Dashboard:
    """Serves `summary` to whoever shows the token."""

    def __init__(self) -> None:
        self.summary: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                allowed = self.headers.get("Authorization") == "Bearer secret"
                body = json.dumps({"data": {"summary": outer.summary}}).encode() if allowed else b"no"
                self.send_response(200 if allowed else 401)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def dashboard(fake_head: FakeHead) -> Iterator[Dashboard]:
    board = Dashboard()
    fake_head.keys[(b"dashboard", b"dashboard")] = board.address.encode()
    yield board
    board.stop()


@pytest.fixture
def listed(fake_head: FakeHead, dashboard: Dashboard) -> Callable[..., NodeReport]:
    """The report of the second node, which has these readings and labels."""

    def make(labels: dict[str, str] | None = None, **changes: Any) -> NodeReport:
        node_id = fake_head.add("10.0.0.2", labels=labels)
        dashboard.summary = [reading(f"{1:056x}"), reading(node_id, **changes)]
        found = report(read_head(fake_head.address))
        return next(one for one in found if one.node_id == node_id)

    return make


def test_a_healthy_node_has_everything_but_problems(listed: Callable[..., NodeReport]) -> None:
    one = listed(labels={**stack.stack(), stack.DEVICE_LABEL: "NVIDIA_GeForce_RTX_5090"})
    assert (one.name, one.role, one.state) == ("10.0.0.2", "node", "idle")
    assert one.device == "NVIDIA GeForce RTX 5090"
    assert (one.memory_free, one.memory_total) == (50 * GB, 64 * GB)
    assert (one.device_memory_free, one.device_memory_total) == (31 * 2**30, 32 * 2**30)
    assert one.versions == stack.stack()
    assert one.problems == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mem": [64 * GB, GB, 99.0, 63 * GB]}, "only 1.0 GB of memory are free"),
        ({"disk": {"/": {"free": GB}}}, "only 1.0 GB are free on /"),
        ({"gpu": {"temperature_c": 92}}, "GPU 0 is 92 °C hot"),
        ({"gpu": {"utilization_gpu": 70}}, "GPU 0 is 70 % busy with something else"),
        ({"labels": {}}, "started without dfbench's labels: leave and use `dfbench join`"),
        (
            {"labels": {**stack.stack(), "dfbench/torch": "9.9"}},
            f"torch is 9.9 there and {importlib.metadata.version('torch')} on the head",
        ),
    ],
)
def test_what_is_wrong_is_said(listed: Callable[..., NodeReport], changes: dict[str, Any], problem: str) -> None:
    assert listed(**changes).problems == [problem]


def test_a_dead_node_is_last_and_says_why(fake_head: FakeHead, dashboard: Dashboard) -> None:
    fake_head.add("10.0.0.9", alive=False)
    fake_head.add("10.0.0.2")
    found = report(read_head(fake_head.address))
    assert [one.state for one in found] == ["idle", "idle", "dead"]
    assert found[-1].problems == ["gone: missing too many heartbeats"]


def test_a_node_that_came_back_is_listed_once(fake_head: FakeHead, dashboard: Dashboard) -> None:
    fake_head.add("10.0.0.2", alive=False)
    fake_head.add("10.0.0.2")
    assert [(one.name, one.state) for one in report(read_head(fake_head.address))] == [
        ("10.0.0.1", "idle"),
        ("10.0.0.2", "idle"),
    ]


def test_two_nodes_of_one_machine_are_told_apart(fake_head: FakeHead, dashboard: Dashboard) -> None:
    for port in (6380, 6480):
        fake_head.add("10.0.0.2")
        fake_head.nodes[-1].node_manager_port = port
    names = [one.name for one in report(read_head(fake_head.address))]
    assert names == ["10.0.0.1", "10.0.0.2:6380", "10.0.0.2:6480"]


def test_versions_and_devices_are_shown_as_they_are_written_elsewhere(
    listed: Callable[..., NodeReport], fake_head: FakeHead
) -> None:
    fake_head.nodes[0].labels["dfbench/torch"] = stack.label_value("2.13.0+cu128")
    one = listed(labels={**stack.stack(), "dfbench/torch": stack.label_value("2.13.0+cpu")})
    assert one.problems == ["torch is 2.13.0+cpu there and 2.13.0+cu128 on the head"]
    assert "torch 2.13.0+cpu" in stack.phrases(one.versions)
    assert one.as_json()["versions"]["dfbench/torch"] == "2.13.0+cpu"
    assert stack.device({stack.DEVICE_LABEL: stack.label_value("NVIDIA H200")}) == "NVIDIA H200"


def test_without_a_dashboard_memory_is_unknown(fake_head: FakeHead) -> None:
    (one,) = report(read_head(fake_head.address))
    assert (one.memory_free, one.device_memory_free) == (None, None)
    assert one.problems == ["no readings: Ray's dashboard has none of it yet"]


# --- work ------------------------------------------------------------------------------------------------------------

SECOND = f"{2:056x}"


@pytest.fixture
def says(fake_head: FakeHead) -> Callable[..., None]:
    """Puts up a driver's notice about the second node."""

    def put(job: str = "01000000", **work: Any) -> None:
        if job != OVER:
            fake_head.live_jobs.append(job)
        told = as_notice({SECOND: Work(**work)})
        fake_head.keys[(NAMESPACE, NOTICES + job.encode())] = json.dumps(told).encode()

    return put


def test_a_notice_of_a_newer_dfbench_is_read_as_far_as_it_is_known(
    fake_head: FakeHead, listed: Callable[..., NodeReport], says: Callable[..., None]
) -> None:
    says(shards=["s1"])
    [key] = [key for key in fake_head.keys if NOTICES in key[1]]
    fake_head.keys[key] = json.dumps({SECOND: {"shards": ["s1"], "mood": "fine"}}).encode()
    assert listed().shards == ["s1"]


def test_a_busy_node_shows_its_shard_and_rate(listed: Callable[..., NodeReport], says: Callable[..., None]) -> None:
    says(shards=["s1"], rate=0.5)
    says("02000000", shards=["s7"], rate=0.25)
    one = listed()
    assert (one.state, one.shards, one.rate) == ("busy", ["s1", "s7"], 0.75)
    assert one.problems == []


def test_a_card_that_works_for_us_is_not_busy_with_something_else(
    listed: Callable[..., NodeReport], says: Callable[..., None]
) -> None:
    says(shards=["s1"])
    assert listed(gpu={"utilization_gpu": 99}).problems == []


def test_a_node_that_a_driver_set_aside_says_so(listed: Callable[..., NodeReport], says: Callable[..., None]) -> None:
    says(aside="3 failures in a row")
    assert listed().problems == ["set aside by the driver: 3 failures in a row"]


def test_a_driver_that_is_gone_says_nothing(listed: Callable[..., NodeReport], says: Callable[..., None]) -> None:
    says(OVER, shards=["s1"], rate=1.0)
    one = listed()
    assert (one.state, one.shards, one.rate) == ("idle", [], None)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_fails_when_something_is_wrong(
    fake_head: FakeHead, dashboard: Dashboard
) -> None:
    dashboard.summary = [reading(f"{1:056x}")]
    command = ["nodes", "--address", fake_head.address]
    fine = CliRunner().invoke(cli.app, command)
    assert fine.exit_code == 0, fine.output
    assert "10.0.0.1" in fine.output and "50.0 of 64.0 GB" in fine.output
    assert f"versions: {', '.join(stack.phrases(stack.stack()))}" in fine.output
    fake_head.add("10.0.0.9", alive=False)
    wrong = CliRunner().invoke(cli.app, command)
    assert wrong.exit_code == 1
    assert "10.0.0.9: gone: missing too many heartbeats" in wrong.output


def test_the_command_speaks_json(fake_head: FakeHead, dashboard: Dashboard) -> None:
    dashboard.summary = [reading(f"{1:056x}")]
    done = CliRunner().invoke(cli.app, ["nodes", "--address", fake_head.address, "--json"])
    document = json.loads(done.stdout)
    assert (document["open"], document["warnings"]) == (False, [])
    assert document["nodes"][0]["memory_free"] == 50 * GB


def test_labels_and_announcements(fake_head: FakeHead) -> None:
    done = CliRunner().invoke(cli.app, ["nodes", "--labels"])
    assert f"dfbench/torch={stack.stack()['dfbench/torch']}" in done.output
    fake_head.nodes[0].labels.clear()
    assert CliRunner().invoke(cli.app, ["nodes", "--announce", "--address", fake_head.address]).exit_code == 0
    assert read_head(fake_head.address).announced == stack.stack()


def test_jobs_done_before_a_worker_was_first_shown_count(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    errors = SimpleNamespace(RayError=OSError)
    context = SimpleNamespace(get_job_id=lambda: "01")
    ray = SimpleNamespace(exceptions=errors, get_runtime_context=lambda: context)
    store = SimpleNamespace(_internal_kv_put=lambda key, text, namespace: said.append(json.loads(text)))
    monkeypatch.setattr(notice, "import_module", lambda name: ray if name == "ray" else store)
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(notice.time, "monotonic", lambda: next(clock))
    member = Member(Device(Node("n", "n", 1, 0, {}), 0, 1, 0), "w", None, ready=object(), since=0.0)  # type: ignore[arg-type]
    ours = notice.Notice()
    ours.count("w", 6)
    for _ in range(2):
        ours.post([member], {})
    assert [work["n"]["rate"] for work in said] == [None, 3.0]

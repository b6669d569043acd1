"""Asking a head what it is, against a stand-in that speaks Ray's own protocol."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from fakehead import FakeHead
from hypothesis import given
from hypothesis import strategies as st

from dfbench.cluster import head as heads
from dfbench.cluster import stack
from dfbench.cluster.head import announce, auth_token, is_loopback, parse_address, read_head
from dfbench.errors import ClusterError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1", "10.0.0.1:6379"),
        ("box", "box:6379"),
        (" 10.0.0.1:7000 ", "10.0.0.1:7000"),
        ("[fd00::1]", "[fd00::1]:6379"),
        ("[fd00::1]:7000", "[fd00::1]:7000"),
    ],
)
def test_addresses_get_rays_port(text: str, address: str) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", ":6379", "http://box:6379", "box:port", "box:0", "box:70000", "a/b"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match=r"write host or host:port"):
        parse_address(text)


def test_a_head_tells_its_nodes_and_versions(fake_head: FakeHead) -> None:
    fake_head.add("10.0.0.2")
    fake_head.add("10.0.0.3", alive=False)
    head = read_head(fake_head.address)
    assert not head.open
    assert (head.ray, head.python) == ("2.60.0", "3.11.7")
    assert [node.name for node in head.alive] == ["10.0.0.1", "10.0.0.2"]
    assert head.node is not None and head.node.labels["dfbench/python"] == stack.stack()["dfbench/python"]
    assert head.nodes[2].reason == "missing too many heartbeats"


def test_the_token_is_shown_only_to_a_head_that_asks(fake_head: FakeHead) -> None:
    read_head(fake_head.address)
    assert fake_head.seen[0] is None
    fake_head.token, fake_head.seen = None, []
    assert read_head(fake_head.address).open
    assert set(fake_head.seen) == {None}


def test_without_the_token_the_sentence_says_where_to_put_it(
    fake_head: FakeHead, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "nothing"))
    with pytest.raises(ClusterError, match=r"there is none at .*nothing: copy"):
        read_head(fake_head.address)
    (tmp_path / "nothing").write_text("wrong\n")
    with pytest.raises(ClusterError, match="refuses the token of this machine"):
        read_head(fake_head.address)
    (tmp_path / "nothing").write_text("secret\n")
    assert read_head(fake_head.address).nodes


def test_nobody_there_is_said_at_once() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(ClusterError, match="no Ray head answers"):
            read_head(f"127.0.0.1:{port}")


def test_versions_can_be_announced_to_a_head_without_labels(fake_head: FakeHead) -> None:
    assert read_head(fake_head.address).announced == {}
    announce(fake_head.address, {"dfbench/torch": "2.13.0"})
    assert read_head(fake_head.address).announced == {"dfbench/torch": "2.13.0"}


def test_the_token_is_found_where_ray_looks(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert auth_token({"RAY_AUTH_TOKEN": " a ", "RAY_AUTH_TOKEN_PATH": str(file)}) == "a"
    assert auth_token({"RAY_AUTH_TOKEN_PATH": str(file)}) is None
    file.write_text("b\n")
    assert auth_token({"RAY_AUTH_TOKEN_PATH": str(file)}) == "b"
    file.write_text("\n")
    assert auth_token({"RAY_AUTH_TOKEN_PATH": str(file)}) is None


def test_loopback() -> None:
    assert is_loopback("127.0.0.3:6379")
    assert is_loopback("localhost:6379")
    assert not is_loopback("10.1.2.3:6379")
    assert not is_loopback("no.such.host.invalid:1")


def test_the_default_head_is_rays_address_then_the_node_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "raylets", lambda head, labelled: iter([(None, "10.0.0.9:6379")] if head else []))
    assert heads.default_address({"RAY_ADDRESS": "10.0.0.7:6379"}) == "10.0.0.7:6379"
    assert heads.default_address({"RAY_ADDRESS": "auto"}) == "10.0.0.9:6379"
    assert heads.default_address({}) == "10.0.0.9:6379"
    monkeypatch.setattr(heads, "raylets", lambda head, labelled: iter(()))
    assert heads.default_address({}) == "127.0.0.1"


def test_auto_is_the_one_cluster_that_this_machine_is_a_node_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def running(*found: tuple[str, bool]) -> None:
        """Ray nodes here: the address of each one's head, and whether dfbench started it."""
        monkeypatch.setattr(
            heads,
            "raylets",
            lambda head, labelled: iter([(None, at) for at, ours in found if head and (ours or not labelled)]),
        )

    running()
    assert heads.own_cluster({}) == "auto"
    running(("10.0.0.9:6379", False))
    assert heads.own_cluster({}) == "10.0.0.9:6379"
    running(("10.0.0.9:6379", True), ("127.0.0.1:4000", False))  # the private Ray of some driver is not meant
    assert heads.own_cluster({}) == "10.0.0.9:6379"
    running(("10.0.0.9:6379", True), ("10.0.0.8:6379", True))
    with pytest.raises(ClusterError, match=r"several Ray clusters run on this machine \(10\.0\.0\.8:6379, 10\.0\.0\.9"):
        heads.own_cluster({})
    assert heads.own_cluster({"RAY_ADDRESS": "10.0.0.8:6379"}) == "10.0.0.8:6379"


@given(st.text())
def test_any_text_becomes_a_label_value_that_ray_takes(text: str) -> None:
    from ray._private.label_utils import validate_label_value

    validate_label_value(stack.label_value(text))


def test_labels_are_what_ray_start_takes() -> None:
    from ray._private.label_utils import parse_node_labels_string

    mine = stack.stack()
    assert parse_node_labels_string(stack.format_labels(mine)) == mine
    assert {"dfbench/python", "dfbench/ray", "dfbench/torch", "dfbench/transformers", "dfbench/dfbench"} <= set(mine)


def test_differences_name_both_sides() -> None:
    mine = {"dfbench/torch": "2.13.0", "dfbench/ray": "2.60.0", "dfbench.plugin/extra": "1.0"}
    head = {"dfbench/torch": "2.12.0", "dfbench/ray": "2.60.0"}
    assert stack.differences(mine, head) == [
        "plug-in extra is 1.0 here and not installed on the head",
        "torch is 2.13.0 here and 2.12.0 on the head",
    ]
    assert stack.differences(head, head) == []


def test_facts_about_the_device_are_no_versions() -> None:
    assert stack.versions({stack.DEVICE_LABEL: "cpu", "dfbench/ray": "2.60.0", "ray.io/node-id": "x"}) == {
        "dfbench/ray": "2.60.0"
    }

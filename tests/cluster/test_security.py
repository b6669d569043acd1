"""What must never happen: secrets in logs, names that become paths, foreign code or pickles, an open head unnoticed."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from fakehead import FakeHead
from hypothesis import example, given
from hypothesis import strategies as st

from dfbench.cluster import events, nodes, sweep_file
from dfbench.cluster.failures import classify
from dfbench.cluster.head import read_head
from dfbench.cluster.sweep import validate
from dfbench.errors import ModelError, SweepError
from dfbench.workers import models
from dfbench.workers.failing import describe
from dfbench.workers.redact import HIDDEN, redact
from dfbench.workers.spec import TargetSpec

SECRET = "hunter2-hunter2"


# --- secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "DB_PASSWORD", "my_credential"]
)
def test_values_of_secret_variables_are_hidden(name: str) -> None:
    assert redact(f"401 for {SECRET} at hub", {name: SECRET}) == f"401 for {HIDDEN} at hub"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOME", SECRET),
        ("TOKENIZERS_PARALLELISM", "sometimes"),
        ("RAY_AUTH_TOKEN_PATH", "/home/me/.ray/auth_token"),
        ("HF_TOKEN", "short"),
    ],
)
def test_what_is_no_secret_stays_readable(name: str, value: str) -> None:
    assert redact(f"see {value} here", {name: value}) == f"see {value} here"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("git clone https://me:pa55@host/x", "pa55"),
        ("GET https://oauth-abc@host/x failed", "oauth-abc"),
        ("GET http://h/x?page=1&access_token=abc123&y=2", "abc123"),
        ("https://s3/x?X-Amz-Signature=deadbeef", "deadbeef"),
        ("Authorization: Bearer abcdef0123456789", "abcdef0123456789"),
        ("use hf_abcdefghijklmnopqrst now", "hf_abcdefghijklmnopqrst"),
        ("key sk-abcdefghijklmnopqrst", "sk-abcdefghijklmnopqrst"),
        ("ghp_abcdefghijklmnopqrst", "ghp_abcdefghijklmnopqrst"),
    ],
)
def test_credentials_are_known_by_their_looks(text: str, hidden: str) -> None:
    shown = redact(text, {})
    assert hidden not in shown
    assert HIDDEN in shown


@pytest.mark.parametrize(
    "text", ["https://host/path?page=2", "bearer of news", "ask-me", "10.0.0.1:6379", "a@b.c", "prompt_tokens=12"]
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact(text, {}) == text


@given(st.text(string.ascii_letters + string.digits + "._-", min_size=8, max_size=40), st.text(), st.text())
@example("aaaaaaaa", "a", "a")
def test_no_secret_survives_wherever_it_stands(secret: str, before: str, after: str) -> None:
    assert secret not in redact(f"{before}{secret}{after}", {"X_TOKEN": secret}).replace(HIDDEN, " ")


def test_log_lines_and_attempts_hold_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    log = events.Events(tmp_path)
    log.event("worker lost", message=f"401 with {SECRET}", url=f"https://me:{SECRET}@hub/x")
    log.close()
    (line,) = (tmp_path / "log" / "driver.jsonl").read_text().splitlines()
    assert SECRET not in line
    assert json.loads(line)["event"] == "worker lost"
    assert SECRET not in classify(OSError(f"cannot read with {SECRET}"))[1]
    try:
        raise RuntimeError(f"refused {SECRET}")
    except RuntimeError as error:
        assert SECRET not in describe(error)


# --- names -----------------------------------------------------------------------------------------------------------

ESCAPES = ["../up", "/etc/passwd", "a/b", "..", ".hidden", "a\x00b", "a\nb", "", " ", "C:\\x", "~root", "x" * 300]


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("where", ["sweep", "workload", "arm"])
def test_names_in_a_sweep_cannot_be_paths(name: str, where: str) -> None:
    data = {"name": "fine", "target": "scripted", "workloads": ["fine"], "arms": [{"name": "fine", "drafter": "ar"}]}
    if where == "sweep":
        data["name"] = name
    elif where == "workload":
        data["workloads"] = [{"name": name}]
    else:
        data["arms"] = [{"name": name, "drafter": "ar"}]
    with pytest.raises(SweepError):
        validate(data)


@given(st.text(max_size=80))
@example("../../etc/passwd")
@example("..")
@example("")
def test_a_shards_log_stays_in_the_runs_folder(shard_id: str) -> None:
    folder = Path("/runs/x/log/shards")
    path = events.shard_log(Path("/runs/x"), shard_id)
    assert path.parent == folder
    assert path.name not in ("", ".", "..")
    assert "\x00" not in path.name


def test_yaml_tags_do_not_run_code(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(f"name: !!python/object/apply:os.system ['touch {tmp_path}/owned']\n")
    with pytest.raises(SweepError):
        sweep_file.load(str(path))
    assert not (tmp_path / "owned").exists()


# --- models ----------------------------------------------------------------------------------------------------------


def test_pickled_weights_are_refused_by_default(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 8, "max_position_embeddings": 8}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="pickled weights"):
        models.resolve(TargetSpec(model=str(tmp_path)))


def test_code_from_a_hub_needs_an_explicit_setting() -> None:
    data = {"name": "n", "workloads": ["code"], "arms": ["ar"]}
    assert validate(dict(data)).target_spec().trust_remote_code is False
    asked = validate({**data, "model": {"id": "a/b", "revision": "c", "trust_remote_code": True}})
    assert asked.target_spec().trust_remote_code is True


# --- an open head ----------------------------------------------------------------------------------------------------


def test_an_open_head_is_warned_about_and_a_closed_one_is_not(fake_head: FakeHead) -> None:
    assert nodes.warnings(read_head(fake_head.address)) == []
    fake_head.token = None
    (warning,) = nodes.warnings(read_head(fake_head.address))
    assert "asks for no token: whoever reaches it can run code on every node" in warning


def test_an_open_head_that_only_this_machine_reaches_is_no_worry(fake_head: FakeHead) -> None:
    fake_head.token = None
    fake_head.nodes[0].node_manager_address = "127.0.0.1"
    assert nodes.warnings(read_head(fake_head.address)) == []

"""The commands as a user meets them, where no Ray is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dfbench.cluster import tune
from dfbench.cluster.cli import app
from dfbench.drafters import registry


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    rows = []
    for number in range(24):
        phrase = rng.integers(3, 90, 8).tolist()
        output = [*rng.integers(90, 200, 6).tolist(), *phrase * 3]
        rows.append({"workload": "ab"[number % 2], "prompt_id": number, "prompt_ids": phrase, "output_ids": output})
    file = tmp_path / "traces.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def configs() -> list[tune.Config]:
    given = [("pld", {"draft_len": 8}), ("pld", {"preset": "hf"}), ("suffix", {}), ("ar", {})]
    return [tune.Config(d, registry.parse_options(d, o).model_dump(mode="json"), o) for d, o in given]


def test_tune_prints_the_winner_and_settings(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "grid", lambda: iter(configs()))
    result = CliRunner().invoke(app, ["tune", str(traces), "--verify-cost", "example"])
    assert result.exit_code == 0, result.output
    assert "24 answers of 720 tokens from 1 file (24 token ids)" in result.output
    assert "4 configurations" in result.output and "held-out ones; costs: example curve" in result.output
    assert "best: pld" in result.output
    assert "transformers: pld preset=hf: speedup_model" in result.output
    assert "prompt_lookup_num_tokens=10, max_matching_ngram_size=2" in result.output
    assert "# batch 1 only" in result.output
    assert "SGLang NGRAM: no arm that it can run was searched" in result.output


def test_tune_for_one_workload(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "grid", lambda: iter(configs()))
    result = CliRunner().invoke(app, ["tune", str(traces), "--verify-cost", "example", "--only", "a"])
    assert result.exit_code == 0, result.output
    found = re.search(r"chosen on (\d+) answers, figures from (\d+) held-out", result.output)
    assert found is not None and int(found[1]) + int(found[2]) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "none.jsonl"], "does not exist"),
        (["replay", "traces.jsonl", "--arms", "pdl"], "did you mean 'pld'"),
        (["replay", "traces.jsonl", "--arms", "recycling"], "which no recording has"),
        (["replay", "traces.jsonl", "--verify-cost", "none"], "neither a run nor a file"),
        (["replay", "traces.jsonl", "--tokenizer", "./none"], "there is no tokenizer folder"),
        (["tune", "traces.jsonl", "--verify-cost", "none"], "neither a run nor a file"),
        (["tune", "traces.jsonl", "--verify-cost", "example", "--only", "x"], "has no workload 'x'"),
        (["record", "--endpoint", "here", "--workload", "code", "--out", "l"], "--endpoint must be"),
        (["record", "--endpoint", "http://127.0.0.1:1/v1", "--workload", "cod", "--out", "l"], "'code'"),
    ],
)
def test_bad_requests_write_nothing(
    traces: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(traces.parent)
    result = CliRunner().invoke(app, arguments)
    assert message in str(result.exception), result.output
    assert [path.name for path in traces.parent.iterdir()] == ["traces.jsonl"]

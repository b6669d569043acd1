"""The command `calibrate` on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from dfbench.cluster import verify_cost
from dfbench.cluster.cli_calibrate import calibrate
from dfbench.errors import UsageError
from dfbench.workers import calibrate as calibration
from dfbench.workers import engine
from dfbench.workers.records import CALIBRATION

app = typer.Typer()
app.command()(calibrate)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=256)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    monkeypatch.setitem(calibration.READ_BYTES, "cpu", 1 << 16)
    monkeypatch.setattr(engine, "load_target", lambda spec: engine.TorchTarget(model, spec))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None:
        raise result.exception
    return result.output


def test_it_writes_a_curve_that_predictions_can_use(tmp_path: Path) -> None:
    out = tmp_path / "cost.parquet"
    shown = run("--out", str(out), "--contexts", "16,64,9000", "--samples", "2")
    table = pq.read_table(out)
    assert table.schema.equals(CALIBRATION)
    assert set(table["context"].to_pylist()) == {16, 64, None}
    assert "GB/s" in shown and "95 % interval" in shown and str(out) in shown
    curve = verify_cost.load(str(out))
    assert curve.queries[0] == 1 and curve.queries[-1] == 96


def test_bad_requests_write_nothing(tmp_path: Path) -> None:
    out = tmp_path / "cost.parquet"
    with pytest.raises(UsageError, match="no list of lengths"):
        run("--out", str(out), "--contexts", "many")
    with pytest.raises(UsageError, match="no folder"):
        run("--out", str(tmp_path / "none" / "cost.parquet"))
    with pytest.raises(UsageError, match="write shorter ones"):
        run("--out", str(out), "--contexts", "9000", "--samples", "2")
    assert not out.exists()
    out.touch()
    with pytest.raises(UsageError, match="--force"):
        run("--out", str(out))

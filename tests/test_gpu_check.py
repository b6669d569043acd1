"""`make gpu-check`, as far as it can be told without a GPU: its logic on a tiny model on the CPU, and what it says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dfbench.workers import memory
from dfbench.workers.compiled import CompiledTarget
from dfbench.workers.loop import Step
from dfbench.workers.spec import TargetSpec

ROOT = Path(__file__).resolve().parents[1]


def _load() -> tuple[Any, ...]:
    """The script and its parts, as it finds them when it runs: beside itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return tuple(importlib.import_module(name) for name in ("gpu_check", "gpu_figures", "gpu_models", "gpu_table"))


check, figures, models, page = _load()
TINY = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
}
SETTINGS = models.Settings(
    shape=TINY,
    small=TINY,
    dtype="float32",
    context=32,
    tokens=12,
    rounds=1,
    widths=(1, 4),
    samples=2,
    buckets=(1, 8, 25),
    fused=(),
    read_bytes=1 << 16,
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    measured: dict[str, Any] = check.measure(torch.device("cpu"), SETTINGS)
    return measured


def test_every_figure_is_there(found: dict[str, Any]) -> None:
    assert json.loads(json.dumps(found)) == found
    assert found["equality"]["compared"] == 9
    assert found["equality"]["unequal"] == []
    assert found["equality"]["distinct"] > 3
    assert list(found["engines"]) == ["cached", "compiled"]
    for engine in found["engines"].values():
        assert engine["ms_a_token"] > 0 and engine["read_gb_s"] > 0
        assert 0 < engine["overhead"] < 1
        assert set(engine["verify_cost"]) == {"1", "4"}
        assert engine["verify_cost"]["1"]["ratio"] == 1.0
        assert 0 < engine["clocks"]["forwards"] < 1
        assert 0 < engine["clocks"]["steps"] <= 1
        assert engine["waits"] == {"AR": None, "trees": None}
    assert found["engines"]["compiled"]["built"]["forward"] == "lean"
    assert found["stack"]["torch"] == torch.__version__


def test_the_table_has_a_row_for_all_of_it(found: dict[str, Any]) -> None:
    text = page.table(found)
    assert f"torch {torch.__version__}" in text
    assert "9 of 9 runs give the 12 tokens" in text
    for title, _ in page.ROWS:
        assert title in text
    assert text.count("pass of ") == 2
    assert "UNEQUAL" not in text


def test_goals_are_judged_and_what_failed_is_named(found: dict[str, Any]) -> None:
    engine = found["engines"]["compiled"] | {
        "read_share": 0.81,
        "overhead": 0.031,
        "waits": {"AR": 1.0, "trees": 3.0},
    }
    broken = found | {
        "engines": {"compiled": engine, "compiled, torch.compile": {"failed": "RuntimeError: no compiler"}},
        "equality": found["equality"] | {"unequal": ["trees in compiled"]},
    }
    lines = page.table(broken).splitlines()

    def line(start: str) -> str:
        return next(one for one in lines if one.startswith(start))

    assert line("share of read").endswith("0.81 reached")
    assert line("harness overhead").endswith("3.1% missed")
    assert line("host-device waits a step, AR").endswith("1.00 reached")
    assert line("host-device waits a step, trees").endswith("3.00 missed")
    assert "UNEQUAL: trees in compiled" in line("float32")
    assert "no compiler" in line("compiled, torch.compile")


def test_shares_and_overheads() -> None:
    facts = {"weight_bytes": 1000, "untied_input_embedding_bytes": 200, "kv_bytes_per_token": 2}
    settings = replace(SETTINGS, context=100, tokens=20)
    assert figures.bytes_read(facts, settings) == 800 + 110 * 2
    assert figures.share(1e9, 1e12, 2e6) == pytest.approx(0.5)
    steps = [Step(1, 1, 0, 0, 0, 0, 1, 100, 10, forward, 0, 0) for forward in (80, 70, 85)]
    assert figures.overhead(SimpleNamespace(steps=steps)) == pytest.approx(0.10)


def test_unequal_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = CompiledTarget._run

    def broken(self: CompiledTarget, inputs: Any, rows: int) -> torch.Tensor:
        return run(self, inputs, rows).roll(1, -1) if self._past > 12 and rows > 1 else run(self, inputs, rows)

    monkeypatch.setattr(CompiledTarget, "_run", broken)
    same = figures.equality(torch.device("cpu"), SETTINGS)
    assert same["compared"] == 9
    assert set(same["unequal"]) >= {"chains in compiled", "trees in compiled"}
    assert not any("cached" in name for name in same["unequal"])


def test_waits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def synchronize(self) -> None:
            """As a real one, but for the waiting."""

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    with figures.counted_waits() as seen:
        for _ in range(3):
            torch.cuda.Event().synchronize()
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("of another kind", stacklevel=1)
    torch.cuda.Event().synchronize()
    assert sorted(seen) == ["event", "event", "event", "operation"]


def test_waits_outside_the_steps_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def synchronize(self) -> None:
            """As a real one, but for the waiting."""

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)

    def work(tokens: int) -> SimpleNamespace:
        for _ in range(4 + 2 * (tokens - 1)):  # prefill and evidence, then two a step
            torch.cuda.Event().synchronize()
        return SimpleNamespace(steps=[None] * (tokens - 1))

    gpu, cpu = (SimpleNamespace(device=torch.device(name)) for name in ("cuda", "cpu"))
    assert figures.waits(gpu, work, 11) == 2.0
    assert figures.waits(cpu, work, 11) is None


def test_the_shape_is_qwen3_8b() -> None:
    config = models.QWEN3_8B | {"model_type": "qwen3"}
    assert memory.parameters(config) == 8_190_735_360
    assert memory.footprint(config, TargetSpec(engine="compiled")).total(1024) < check.DEVICE_BYTES


def test_without_a_gpu_it_says_so_and_claims_nothing(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    file = tmp_path / "out.json"
    script = str(ROOT / "benchmarks" / "gpu_check.py")
    done = subprocess.run([sys.executable, script, "--json", str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "no CUDA device" in done.stdout and "Nothing was measured" in done.stdout
    assert not file.exists()


def test_it_runs_from_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None if name == "dfbench" else find(name))
    monkeypatch.setattr(check.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    check.import_from_checkout()
    assert sys.path[0] == str(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import dfbench, dfbench.workers.spec as spec;"
        " print(dfbench.__file__, spec.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(part.startswith(str(tmp_path)) for part in done.stdout.split())

"""The engine benchmark's own machinery: rounds that take turns, and the talk with vLLM's process."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dfbench.workers.loop import Step, Trace

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = """
__version__ = "0.0-stand-in"
print("a banner on stdout, as vLLM has many")
class SamplingParams:
    def __init__(self, **settings):
        assert settings["temperature"] == 0.0 and settings["ignore_eos"]
        self.count = settings["max_tokens"]
class LLM:
    def __init__(self, speculative_config=None, **settings):
        assert settings["max_num_seqs"] == 1 and settings["model"] == "a/folder"
        self.first = speculative_config["num_speculative_tokens"] if speculative_config else 0
    def generate(self, prompts, wanted, use_tqdm):
        ids = [self.first, *prompts[0]["prompt_token_ids"]]
        out = type("Out", (), {"token_ids": (ids * wanted.count)[: wanted.count]})
        return [type("Answer", (), {"outputs": [out]})]
"""


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("bench_engine", ROOT / "benchmarks" / "bench_engine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_engine"] = module
    spec.loader.exec_module(module)
    return module


bench = _load()
GIVEN = {"model": "a/folder", "dtype": "bfloat16", "prompt": [5, 6], "tokens": 4, "draft_len": 9}


def test_vllm_answers_over_the_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    vllm = bench.Vllm(Path(sys.executable), GIVEN)
    try:
        assert vllm.version == "0.0-stand-in"
        plain, drafted = vllm.decode("ar"), vllm.decode("ngram")
        assert (plain.output, drafted.output) == ([0, 5, 6, 0], [9, 5, 6, 9])
        assert plain.wall_ns > 0 and plain.wall_only
    finally:
        vllm.close()


def test_a_vllm_that_does_not_start_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = SimpleNamespace(resolved=SimpleNamespace(path=tmp_path))
    given = argparse.Namespace(dtype="bfloat16", tokens=4)
    monkeypatch.setattr(bench, "VLLM_PYTHON", tmp_path / "nothing")
    assert bench.vllm_contestants(target, [5], given) == (None, {})
    assert "takes no part: there is no" in capsys.readouterr().out
    (tmp_path / "vllm.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(bench, "VLLM_PYTHON", Path(sys.executable))
    assert bench.vllm_contestants(target, [5], given) == (None, {})
    assert "takes no part: vLLM ended with code 1" in capsys.readouterr().out


def test_every_contestant_runs_in_every_round_and_the_first_round_is_not_timed() -> None:
    ran: list[str] = []

    def contestant(name: str, wall_ms: int) -> Any:
        def decode() -> Trace:
            ran.append(name)
            step = Step(1, 1, 0, 0, 0, 0, 1, 100, 10, 80, 0, 0)
            return Trace(output=[1], steps=[step], decode_ns=wall_ms * 1_000_000)

        return decode

    times = bench.race({"slow": contestant("slow", 6), "fast": contestant("fast", 2)}, rounds=4)
    assert sorted(ran) == ["fast"] * 5 + ["slow"] * 5
    assert times.walls == {"slow": [6.0] * 4, "fast": [2.0] * 4}
    assert times.shares["slow"] == pytest.approx([0.10] * 4)
    assert times.ratios("slow", "fast").split()[0] == "3.000"

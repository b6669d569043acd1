"""The engine benchmark's own machinery: rounds and passes that take turns, and the talk with vLLM's process."""

from __future__ import annotations

import argparse
import importlib
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from dfbench.drafters.base import EMPTY, Draft, DrafterContext, Options
from dfbench.drafters.registry import create
from dfbench.workers.engine import TorchTarget
from dfbench.workers.loop import Step, Trace
from dfbench.workers.spec import TargetSpec

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


def _load() -> tuple[Any, ...]:
    """The script and its part, as it finds them when it runs: beside itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return tuple(importlib.import_module(name) for name in ("bench_engine", "turns"))


bench, turns = _load()
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


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=29,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.8,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    return TorchTarget(model, TargetSpec(dtype="float64"))


PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4)


def test_our_loop_and_generate_take_turns_token_by_token(target: TorchTarget) -> None:
    plain = create("ar", {})
    played = turns.against_generate(target, plain, PROMPT, tokens=20)
    assert played.same
    assert list(played.theirs) == list(played.ours) == list(range(1, 20)), "all but prefill, on both sides"
    assert all(made.emitted == 1 and made.ns > 0 for made in (*played.theirs.values(), *played.ours.values()))
    assert played.ratios() == [played.theirs[at].ns / played.ours[at].ns for at in range(1, 20)]


def test_the_time_of_one_loop_is_not_in_the_others(target: TorchTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]

    class Dear(type(create("ar", {}))):  # type: ignore[misc]
        def propose(self, budget: int) -> Draft:
            now[0] += 1000
            return EMPTY

    monkeypatch.setattr(turns, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(turns, "process_time_ns", lambda: 2 * now[0])
    hook = target.model.register_forward_hook(lambda *_: now.__setitem__(0, now[0] + 7))
    try:
        played = turns.against_generate(target, Dear(Options(), DrafterContext()), PROMPT, tokens=10)
    finally:
        hook.remove()
    assert {made.ns for made in played.theirs.values()} == {7}
    assert played.ratios() == played.ratios(busy=True) == [7 / 1007] * 8 + [1.0]
    assert [made.ns for made in played.ours.values()] == [1007] * 8 + [7], "the last token needs no draft"


def test_passes_with_drafts_are_compared_where_they_begin_and_end_alike(target: TorchTarget) -> None:
    lookup = create("pld", {"preset": "hf"}, DrafterContext(vocab_size=29))
    played = turns.against_generate(target, lookup, PROMPT, tokens=60, draft_len=10)
    assert played.same
    for passes, first in ((played.theirs, min(played.theirs)), (played.ours, 1)):
        ends = [first, *(position + made.emitted for position, made in passes.items())]
        assert ends == [*passes, 60], "every pass begins where the one before it ended"
    alike = [at for at, made in played.theirs.items() if at in played.ours and made.emitted == played.ours[at].emitted]
    assert len(played.ratios()) == len(alike) > 5
    assert any(made.emitted > 1 for made in played.ours.values())


def test_a_loop_against_itself(target: TorchTarget) -> None:
    again = TorchTarget(target.model, target.spec)
    played = turns.against_itself(target, again, create("ar", {}), PROMPT, tokens=12)
    assert played.same and len(played.ratios()) == 11


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    dice = random.Random(0)
    held = 0
    for _ in range(400):
        middle, low, high = turns.median_interval([dice.expovariate(1.0) for _ in range(60)])
        assert low <= middle <= high
        held += low <= math.log(2) <= high
    assert held / 400 == pytest.approx(0.96, abs=0.03)
    assert turns.median_interval([2.0, 1.0, 3.0]) == (2.0, 1.0, 3.0)

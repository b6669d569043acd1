"""Whole passes in compiled code, against the layers they stand for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from dfbench.drafters.base import Draft
from dfbench.drafters.registry import create
from dfbench.workers import lean, lean_weights, row_pass, team, tiles, vectors
from dfbench.workers.compiled import CompiledTarget
from dfbench.workers.loop import Trace, decode
from dfbench.workers.spec import TargetSpec

from .conftest import TinyModel


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


BOTH = pytest.mark.parametrize("whole", [False, True], ids=["odd sizes", "whole tiles"])
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@contextmanager
def without(target: CompiledTarget) -> Iterator[None]:
    """The same target by its layers."""
    assert isinstance(target._forward, lean.Lean)
    held, target._forward._rows = target._forward._rows, None
    yield
    target._forward._rows = held


def require_the_layers(target: CompiledTarget, draft: Draft) -> None:
    """A pass gives what the same one by the layers gives, but for roundings."""
    seen = []
    for layers in (True, False):
        target.prefill(PROMPT)
        with without(target) if layers else nullcontext():
            target.verify(draft)
        seen.append(target._rows.float().clone())
    torch.testing.assert_close(seen[1], seen[0], rtol=0.05, atol=0.05 * float(seen[0].abs().max()))


def compiled(model: object, **given: object) -> CompiledTarget:
    return CompiledTarget(model, TargetSpec(engine="compiled", dtype="bfloat16", **given))  # type: ignore[arg-type]


def ar(target: CompiledTarget, tokens: int) -> Trace:
    return decode(target, create("ar", {}), PROMPT, max_new_tokens=tokens)


@BOTH
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_whole_passes_are_the_layers(tiny_model: TinyModel, family: str, whole: bool) -> None:
    """Until the first rounding parts the two, evidence agrees; the buffers grow on the way."""
    target = compiled(tiny_model(family, "sdpa", torch.bfloat16, whole), buckets=(1, 4))
    assert target.engine_facts()["row_kernels"]
    with without(target):
        expected = ar(target, 40)
    rows = ar(target, 40)
    same = next((at for at, (a, b) in enumerate(zip(rows.output, expected.output, strict=True)) if a != b), 40)
    assert rows.evidence is not None and expected.evidence is not None
    near = 0.02 * np.abs(expected.evidence.top1_logit).max()
    if same < 40:
        gaps = [trace.evidence.top1_logit[same] - trace.evidence.top2_logit[same] for trace in (rows, expected)]  # type: ignore[union-attr]
        assert max(gaps) <= near, "only a near tie may part them"
    mine, theirs = (trace.evidence.top1_logit[:same] for trace in (rows, expected))  # type: ignore[union-attr]
    np.testing.assert_allclose(mine, theirs, atol=near)


@BOTH
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_wide_passes_are_the_layers(tiny_model: TinyModel, family: str, whole: bool) -> None:
    """Chains and trees in padded passes, each against the same one by the layers."""
    target = compiled(tiny_model(family, "sdpa", torch.bfloat16, whole), buckets=(1, 4, 12, 40, 96))
    drafts = [Draft((7, 8)), Draft((7, 8, 9, 9, 1), (-1, -1, 0, 1, 3)), Draft(tuple(range(11)))]
    drafts += [Draft(tuple(at % 20 for at in range(39))), Draft(tuple(at % 20 for at in range(95)))]
    for draft in drafts:
        require_the_layers(target, draft)


@BOTH
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_token_is_the_same_bits_alone_and_in_a_draft(tiny_model: TinyModel, family: str, whole: bool) -> None:
    """Where passes are made whole: a chain that is right, and a tree whose right branch is not its first."""
    target = compiled(tiny_model(family, "sdpa", torch.bfloat16, whole), buckets=(1, 3, 8))
    answer = ar(target, 6)
    first, *rest = answer.output
    assert answer.evidence is not None
    wrong = [(token + 1) % target.vocab_size for token in rest]
    tree = Draft((wrong[0], rest[0], wrong[1], rest[1], wrong[2], rest[2]), (-1, -1, 1, 1, 3, 3))
    for draft, path in ((Draft(tuple(rest[:2])), [0, 1]), (tree, [1, 3, 5])):
        assert target.prefill(PROMPT) == first
        target.verify(draft)
        target.commit(path, rest[: len(path) + 1])
        found = target.evidence()
        for mine, theirs in zip(found, answer.evidence, strict=True):
            assert np.array_equal(mine, theirs[: len(mine)])
        # What was moved together goes on to be seen as if it had come token by token.
        assert target.verify(Draft(())).argmax[0] == rest[len(path) + 1]


@BOTH
def test_long_contexts_leave_several_rows_to_torch(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr(row_pass, "WORK", 50 if whole else 25)
    target = compiled(tiny_model("llama", "sdpa", torch.bfloat16, whole), buckets=(1, 4, 8))
    ran: list[int] = []
    as_one = row_pass.RowPass._whole
    monkeypatch.setattr(
        row_pass.RowPass, "_whole", lambda self, rows, threads: ran.append(len(rows)) or as_one(self, rows, threads)
    )
    target.prefill(PROMPT)
    for width in (1, 4, 8):
        target.verify(Draft(tuple(range(width - 1))))
    assert ran == [1, 4]


@pytest.mark.skipif(not tiles.available(), reason="this processor has no tiles")
def test_who_gets_tiles(tiny_model: TinyModel) -> None:
    odd, even = (compiled(tiny_model("llama", "sdpa", torch.bfloat16, whole)) for whole in (False, True))
    layouts = [target._forward._blocks[0].joined.layout for target in (odd, even)]  # type: ignore[union-attr]
    assert layouts == ["onednn", "tiles"]
    eager = compiled(tiny_model("llama", "eager", torch.bfloat16, True))
    assert eager._forward._blocks[0].joined.layout == "onednn", "its passes go by the layers"  # type: ignore[union-attr]


@pytest.mark.skipif(not vectors.pairs_are_multiplied(), reason="this processor has but one way")
def test_processors_without_products_of_pairs(tmp_path: Path) -> None:
    """The same tests over kernels that widen every weight; nothing of what this processor has is in them."""
    names = "products or attention or same_bits or layers or threads"
    script = f"""
import sys, pytest
from dfbench.workers import vectors
vectors.pairs_are_multiplied = lambda: False
from dfbench.workers import pass_kernels
assert not pass_kernels.DOT and not pass_kernels.TILES and pass_kernels.run_segment is None
assert not any(name in pass_kernels.run_pass._library.get_asm_str() for name in ("tdpbf16ps", "vdpbf16ps", "ldtilecfg"))
here = {str(Path(__file__).parent)!r}
files = [here + "/test_row_kernels.py", here + "/test_row_pass.py"]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", {names!r}, *files]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout


@BOTH
def test_any_number_of_threads(tiny_model: TinyModel, threads: Callable[[int], None], whole: bool) -> None:
    target = compiled(tiny_model("qwen3", "sdpa", torch.bfloat16, whole), buckets=(1, 4, 12))
    draft = Draft(tuple(range(11)))
    for passes in (Draft(()), draft):
        seen = []
        for count in (1, 2, 3, 5):
            threads(count)
            target.prefill(PROMPT)
            target.verify(passes)
            seen.append(target._rows.clone())
        if not passes.tokens:
            assert all(torch.equal(rows, seen[0]) for rows in seen)
        for rows in seen:
            torch.testing.assert_close(rows, seen[0], rtol=0.05, atol=0.05 * float(seen[0].abs().max()))


def test_buffers_that_are_replaced_are_seen(tiny_model: TinyModel) -> None:
    target = compiled(tiny_model("llama", "sdpa", torch.bfloat16), buckets=(1, 4))
    first = ar(target, 20).output
    target._grow(len(PROMPT) + 400)
    assert ar(target, 20).output == first


def test_whom_they_serve(tiny_model: TinyModel) -> None:
    sixteen = tiny_model("llama", "sdpa", torch.bfloat16)
    assert compiled(sixteen).engine_facts()["row_kernels"]
    assert not compiled(tiny_model("llama", "eager", torch.bfloat16)).engine_facts()["row_kernels"]
    wide = CompiledTarget(tiny_model("llama"), TargetSpec(engine="compiled", dtype="float64"))
    assert not wide.engine_facts()["row_kernels"]
    traced = compiled(sixteen, options={"compile": "eager"}).engine_facts()
    assert not traced["row_kernels"]
    assert traced["packed_weight_bytes"] == 0, "inductor lays weights out itself, and refuses others"


def test_without_torchs_threads_the_layers_serve(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sixteen = tiny_model("llama", "sdpa", torch.bfloat16)
    expected = ar(compiled(sixteen), 12).output
    monkeypatch.setattr(team, "find", lambda: None)
    target = compiled(sixteen)
    assert not target.engine_facts()["row_kernels"]
    assert ar(target, 12).output == expected


def test_a_cpu_without_products_of_bfloat16_makes_them_all_here(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean_weights, "layout_of", lambda parts, rows: "plain")
    monkeypatch.setattr(lean, "layout_of", lambda parts, rows: "plain")
    target = compiled(tiny_model("llama", "sdpa", torch.bfloat16), buckets=(1, 12))
    draft = Draft((7, 8, 9, 9, 1, 2, 3, 4, 5), (-1, -1, 0, 1, 3, 3, 2, -1, 6))
    require_the_layers(target, draft)


def test_biases_keep_the_layers(tiny_model: TinyModel) -> None:
    target = compiled(tiny_model("llama", "sdpa", torch.bfloat16))
    assert isinstance(target._forward, lean.Lean)
    blocks, sizes = target._forward._blocks, target._forward._sizes
    silu = functional.silu
    bias = torch.zeros(blocks[0].joined.weight.shape[0], dtype=torch.bfloat16)
    blocks = [part for block in blocks for part in (block.joined, block.out, block.gated, block.down)]
    biased = [blocks[0]._replace(bias=bias), *blocks[1:]]
    activation = target._forward._activation
    assert row_pass.fits(blocks, sizes, activation)
    assert not row_pass.fits(biased, sizes, activation)
    assert not row_pass.fits(blocks, sizes, silu), "a plain function could be any"

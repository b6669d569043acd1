"""Joined weights: the model works on as before, nothing is held twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from dfbench.workers import lean_weights, pages, provenance
from dfbench.workers.compiled import CompiledTarget
from dfbench.workers.pages import Pages
from dfbench.workers.spec import TargetSpec

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
COMPILED = TargetSpec(engine="compiled", dtype="float64")


def test_joined_weights_leave_the_model_as_it_was_and_take_no_more_memory(
    tiny_model: Callable[..., PreTrainedModel],
) -> None:
    model = tiny_model("qwen3")
    text = torch.tensor([PROMPT])
    with torch.inference_mode():
        before, size = model(input_ids=text).logits, provenance.weights(model)
    one = CompiledTarget(model, COMPILED)
    joined = one._forward._blocks[0].joined.weight  # type: ignore[attr-defined]
    two = CompiledTarget(model, COMPILED)
    assert two._forward._blocks[0].joined.weight.data_ptr() == joined.data_ptr()  # type: ignore[attr-defined]
    down = [target._forward._blocks[0].down.weight.data_ptr() for target in (one, two)]  # type: ignore[attr-defined]
    assert down[0] == down[1] == model.model.layers[0].mlp.down_proj.weight.data_ptr()
    assert model.model.layers[0].self_attn.q_proj.weight.data_ptr() == joined.data_ptr()
    with torch.inference_mode():
        assert (model(input_ids=text).logits == before).all()
    assert provenance.weights(model) == size


def test_weights_that_happen_to_lie_side_by_side_are_joined_too() -> None:
    block = torch.arange(24.0)
    # Two storages over neighbouring memory, as an allocator may lay them.
    words = block.numpy()
    parts = [torch.nn.Parameter(torch.from_numpy(words[at : at + 12]).view(3, 4)) for at in (0, 12)]
    assert parts[1].data_ptr() == parts[0].data_ptr() + 48
    joined = lean_weights.joined(parts, Pages())
    assert torch.equal(joined.flatten(), block)
    assert all(part.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr() for part in parts)


def test_pages_hand_out_memory_side_by_side_and_by_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_CHUNK", 1 << 22)
    place = Pages()
    first, second = place.empty((3, 5), torch.bfloat16), place.empty((2, 2), torch.float64)
    assert second.data_ptr() - first.data_ptr() == 64
    large = place.empty((1 << 20, 2), torch.float32)
    first.fill_(1), second.fill_(2), large.fill_(3)
    assert (first == 1).all() and (second == 2).all() and (large == 3).all()
    assert large.shape == (1 << 20, 2)
    assert all(Pages.holds(tensor) for tensor in (first, second))
    assert not Pages.holds(torch.empty(4))


def test_without_huge_pages_memory_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pages.mmap, "MADV_HUGEPAGE", raising=False)
    assert Pages().empty((2, 3), torch.bfloat16).shape == (2, 3)

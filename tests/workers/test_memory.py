"""Memory planning against parameter counts of real model classes and the seed report's figures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfbench.errors import ModelError
from dfbench.workers.memory import Footprint, check_fit, check_room, footprint, parameters
from dfbench.workers.spec import TargetSpec

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
TINY = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
BF16 = TargetSpec(model="Qwen/Qwen3-8B", dtype="bfloat16")


def test_qwen3_8b_has_the_published_number_of_weights() -> None:
    assert parameters(QWEN3_8B) == 8_190_735_360


def test_qwen3_8b_in_bf16_is_the_seed_reports_size() -> None:
    need = footprint(QWEN3_8B, BF16)
    assert need.weights == 16_381_470_720
    assert need.kv_per_token == 2 * 36 * 8 * 128 * 2
    assert 16.5e9 < need.total(1024) < 18.5e9  # the report saw 16.5–16.8 GB, without the runtime's own share


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_formula_counts_what_the_model_class_has(family: str, tied: bool) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    given_head = {"head_dim": 8} if family in ("qwen3", "llama") else {}
    config = AutoConfig.for_model(family, **TINY, **given_head, tie_word_embeddings=tied, pad_token_id=None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert parameters(config.to_dict()) == sum(weight.numel() for weight in model.parameters())


def test_other_families_are_counted_on_a_model_without_storage() -> None:
    config = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    hidden = 16
    layer = 4 * hidden + (3 * hidden * hidden + 3 * hidden) + (hidden * hidden + hidden) + 8 * hidden**2 + 5 * hidden
    assert parameters(config) == 50 * hidden + 32 * hidden + 2 * layer + 2 * hidden


def test_an_unknown_architecture_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="'nonesuch'"):
        parameters({"model_type": "nonesuch"})
    with pytest.raises(ModelError, match="num_hidden_layers"):
        footprint({key: value for key, value in QWEN3_8B.items() if key != "num_hidden_layers"}, BF16)


def test_what_fits_passes_and_says_how_much() -> None:
    need = check_fit(QWEN3_8B, BF16, 4096, 32 * 10**9, "RTX 5090")
    assert need.total(4096) <= 32 * 10**9
    assert need.largest_context(32 * 10**9) > 4096


def test_what_does_not_fit_is_refused_with_the_largest_context_that_does() -> None:
    need = footprint(QWEN3_8B, BF16)
    room = need.total(1000)
    with pytest.raises(ModelError, match=r"largest context that fits is 1000 tokens"):
        check_fit(QWEN3_8B, BF16, 8000, room, "this device")
    with pytest.raises(ModelError, match=r"needs .* and RTX 4060 has 8\.0 GB: take a device with more memory"):
        check_fit(QWEN3_8B, BF16, 1, 8 * 10**9, "RTX 4060")


def test_a_context_beyond_the_models_own_is_refused_whatever_the_memory() -> None:
    with pytest.raises(ModelError, match="context of 40960 tokens"):
        check_fit(QWEN3_8B, BF16, 40961, 10**15, "a dream")


def test_switches_that_cost_memory_cost_memory() -> None:
    plain = footprint(QWEN3_8B, BF16)
    assert footprint(QWEN3_8B, replace(BF16, dtype="float32")).weights == 2 * plain.weights
    assert footprint(QWEN3_8B, replace(BF16, engine="recompute")).kv_per_token == 0
    wide_head = footprint(QWEN3_8B, replace(BF16, logits_dtype="float32"))
    assert wide_head.weights - plain.weights == 151936 * 4096 * 2  # four bytes instead of two, not tied
    assert footprint(QWEN3_8B, replace(BF16, max_queries=256)).work_fixed > plain.work_fixed


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ModelError, match="float8"):
        footprint(QWEN3_8B, replace(BF16, dtype="float8"))


@given(
    weights=st.integers(1, 10**11),
    kv=st.integers(0, 10**6),
    work=st.integers(1, 10**6),
    fixed=st.integers(0, 10**9),
    limit=st.integers(1, 10**6),
    device=st.integers(0, 10**12),
)
def test_the_largest_context_is_the_largest(
    weights: int, kv: int, work: int, fixed: int, limit: int, device: int
) -> None:
    need = Footprint(weights, kv, work, fixed, limit)
    largest = need.largest_context(device)
    assert 0 <= largest <= limit
    if largest:
        assert need.total(largest) <= device
    if largest < limit:
        assert need.total(largest + 1) > device


def test_a_model_too_large_for_the_machine_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    here = torch.device("cpu")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8 * 10**9))
    with pytest.raises(ModelError, match=r"is 16\.4 GB of weights and this machine has 8\.0 GB"):
        check_room(QWEN3_8B, BF16, here)
    check_room(QWEN3_8B, replace(BF16, options={"quantization": {"quant_method": "bitsandbytes"}}), here)
    check_room({}, BF16, here)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=17 * 10**9))
    check_room(QWEN3_8B, BF16, here)


def test_a_gpu_must_hold_more_than_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 4090")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(16.5e9), int(24e9)))
    with pytest.raises(ModelError, match=r"and RTX 4090 has 16\.5 GB"):
        check_room(QWEN3_8B, BF16, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(23e9), int(24e9)))
    check_room(QWEN3_8B, BF16, torch.device("cuda"))


def test_static_buffers_count_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    compiled = replace(BF16, engine="compiled")
    need = footprint(QWEN3_8B, compiled)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 4090")

    def has(size: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (size, size))

    has(need.total(1000))
    with pytest.raises(ModelError, match=r"at 1024 tokens of context and RTX 4090 .*largest context that fits is 1000"):
        check_room(QWEN3_8B, compiled, torch.device("cuda"))
    check_room(QWEN3_8B, replace(compiled, options={"context": 1000}), torch.device("cuda"))
    check_room(QWEN3_8B, BF16, torch.device("cuda"))
    has(need.total(40960))
    check_room(QWEN3_8B, replace(compiled, options={"context": 10**6}), torch.device("cuda"))


def test_on_the_cpu_the_second_layout_of_the_weights_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    room = SimpleNamespace(available=footprint(QWEN3_8B, BF16).weights * 3 // 2)
    monkeypatch.setattr("dfbench.workers.memory.psutil.virtual_memory", lambda: room)
    here = torch.device("cpu")
    check_room(QWEN3_8B, BF16, here)
    with pytest.raises(ModelError, match=r"32\.8 GB of weights"):
        check_room(QWEN3_8B, replace(BF16, engine="compiled"), here)

"""Tiny random models, small enough that every engine can be compared with plain greedy decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

VOCAB = 29
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Wide enough that attention matters: with the usual 0.02 a random model hardly looks at its past.
    "initializer_range": 0.8,
}
_WHOLE_TILES = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


TinyModel = Callable[..., PreTrainedModel]


@cache
def _tiny_model(
    family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64, whole_tiles: bool = False
) -> PreTrainedModel:
    """A random model of this family, the same on every call."""
    torch.manual_seed(0)
    config = CONFIGS[family](**_SIZES | (_WHOLE_TILES if whole_tiles else {}))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval()


@pytest.fixture(scope="session")
def tiny_model() -> TinyModel:
    """`tiny_model(family, attention="sdpa", dtype=float64, whole_tiles=False)`: a random model, the same on every call;
    with `whole_tiles`, its sizes are multiples of 16 and 32."""
    return _tiny_model


@pytest.fixture(params=sorted(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)

"""What `gpu_check.py` measures: models of random numbers, the engines on them, and a drafter that knows the answer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from dfbench.workers.engine import TorchTarget
    from dfbench.workers.loop import Trace

QWEN3_8B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    # Wide enough that a random model does not settle on one token.
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class Settings:
    """`shape`, `dtype` of the large model; `context`, `tokens` of its AR runs; `widths` and `samples` of the curve.

    `buckets`: widths of the compiled engine. `fused`: those of it under torch.compile, none leaves that out;
    `start_fused_s`: how far into the check it may still begin.
    """

    shape: Mapping[str, Any] = field(default_factory=lambda: QWEN3_8B)
    small: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    dtype: str = "bfloat16"
    context: int = 256
    tokens: int = 64
    rounds: int = 3
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 48, 64, 96)
    buckets: tuple[int, ...] = ()
    samples: int = 7
    fused: tuple[int, ...] = (1, 16, 96)
    start_fused_s: float = 120.0
    read_bytes: int | None = None


def make_model(shape: Mapping[str, Any], dtype: str, device: torch.device) -> Any:
    """A random Qwen3 of this shape, made on the device: no copy passes through the host."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return model.eval()


def make_target(model: Any, dtype: str, **settings: Any) -> TorchTarget:
    """An engine on a model that is loaded already."""
    from dfbench.workers.compiled import CompiledTarget
    from dfbench.workers.engine import TorchTarget
    from dfbench.workers.spec import TargetSpec

    spec = TargetSpec(model="random", dtype=dtype, **settings)
    return (CompiledTarget if spec.engine == "compiled" else TorchTarget)(model, spec)


def guesser(answer: Sequence[int], vocabulary: int, tree: bool) -> Any:
    """A drafter that drafts around a known answer, right and wrong, as chains or as trees."""
    from dfbench.drafters.base import Draft, Drafter, DrafterContext, Options

    class Guesser(Drafter):
        name = "guesser"
        done = 0

        def start(self, prompt: Sequence[int]) -> None:
            self.done = 0

        def propose(self, budget: int) -> Draft:
            dice = random.Random(self.done)
            nodes = min(dice.choice((0, 1, 3, 7, 15, 24)), budget)
            parents = [dice.randint(max(-1, node - 4), node - 1) if tree else node - 1 for node in range(nodes)]
            places = [self.done + depth - 1 for depth in Draft([0] * nodes, parents).depths()]
            tokens = [
                answer[at] if at < len(answer) and dice.random() < 0.8 else dice.randrange(vocabulary) for at in places
            ]
            return Draft(tokens, parents if tree else None)

        def observe(self, emitted: Sequence[int], verified: Any = None) -> None:
            self.done += len(emitted)

        def reset(self) -> None:
            self.done = 0

    return Guesser(Options(), DrafterContext(vocab_size=vocabulary))


def ids(count: int, vocabulary: int) -> list[int]:
    """Tokens of a prompt that means nothing."""
    dice = random.Random(7)
    return [dice.randrange(vocabulary) for _ in range(count)]


def run(target: TorchTarget, drafter: Any, prompt: Sequence[int], tokens: int) -> Trace:
    """One decode, of exactly `tokens` tokens."""
    from dfbench.workers.loop import decode

    target.top_k = drafter.top_k
    return decode(target, drafter, prompt, max_new_tokens=tokens)

"""Teacher-forced scoring: the logits behind a finished output from one plain causal pass, past the engine's own cache,
masks and positions. What the engine computed step by step must agree with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from dfbench.workers.engine import TorchTarget


class Score(NamedTuple):
    """Arrays with one entry an output token; logits are those that the pass computed, as float32."""

    token_logit: np.ndarray
    top1_id: np.ndarray
    top1_logit: np.ndarray
    top2_id: np.ndarray
    top2_logit: np.ndarray


def score(target: TorchTarget, prompt: Sequence[int], output: Sequence[int]) -> Score:
    """Logits behind every token of `output` after `prompt`, by a call of the model that uses nothing of the engine."""
    import torch

    with torch.inference_mode():
        text = torch.tensor([[*prompt, *output[:-1]]], device=target.device)
        logits = target.model(input_ids=text, use_cache=False, logits_to_keep=len(output)).logits[0]
        tokens = torch.tensor(output, device=target.device)[:, None]
        token_logit = logits.gather(1, tokens)[:, 0].float()
        top1_logit, top1_id = logits.max(-1)
        top2_logit, top2_id = logits.scatter(1, top1_id[:, None], float("-inf")).max(-1)
        columns = (token_logit, top1_id, top1_logit.float(), top2_id, top2_logit.float())
        return Score(*(column.cpu().numpy() for column in columns))

"""transformers' own `generate` as a cross-check: the same model and prompts, another project's decoding loop.

It gives tokens and the time of the whole call; what happens inside is not ours to see, so there are no steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from dfbench.drafters.base import Drafter
from dfbench.workers.loop import Trace
from dfbench.workers.model_cache import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

    from dfbench.workers.engine import TorchTarget


def hf_decode(
    target: TorchTarget,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    draft_len: int | None = 10,
    max_ngram: int = 2,
    trace: Trace | None = None,
    streamer: BaseStreamer | None = None,
) -> Trace:
    """Greedy `generate` with prompt lookup, or plain where `draft_len` is None. Times are in `decode_ns`, prefill too.

    The trace is marked `wall_only`. It cannot be stopped midway. A `streamer` is given the prompt, then what each pass
    emitted.
    """
    trace = Trace() if trace is None else trace
    trace.wall_only = True
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(eos_ids) or None,
        pad_token_id=min(eos_ids, default=0),
        prompt_lookup_num_tokens=draft_len,
        max_matching_ngram_size=max_ngram if draft_len else None,
    )
    ids = torch.tensor([list(prompt)], device=target.device)
    with _generation_config(target.model, settings), torch.inference_mode(), quiet():
        generate: Any = target.model.generate
        began = target.clock()
        answer = generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            use_cache=True,
            streamer=streamer,
        )
        trace.output += answer[0, len(prompt) :].tolist()  # Waits for the device.
        trace.decode_ns = target.clock() - began
    trace.finish_reason = "eos" if trace.output[-1] in eos_ids else "length"
    return trace


def hf_run(
    target: TorchTarget,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    trace: Trace | None = None,
) -> Trace:
    """`hf_decode` in the shape of the loop's `decode`, for the arm `hf-pld`: its options are the drafter's."""
    options = drafter.options
    return hf_decode(
        target,
        prompt,
        max_new_tokens=max_new_tokens,
        eos_ids=eos_ids,
        draft_len=options.draft_len,  # type: ignore[attr-defined]
        max_ngram=options.max_ngram,  # type: ignore[attr-defined]
        trace=trace,
    )


@contextmanager
def _generation_config(model: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """`generate` fills what its settings leave open from the model's own, which would bring an ignored EOS back."""
    kept = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = kept

"""The torch target: a transformers model that verifies drafts, with or without a KV cache.

Every pass feeds the `pending` tokens, those that are decided but not in the cache, the root last, and then the nodes
of the draft. What is pending next tells the engines apart:

    cached, compact   the root alone; the accepted nodes' keys and values are moved together in place
    cached, refeed    the accepted tokens and the root; the draft is cropped whole (what Cacheback's authors do)
    recompute         everything since the first prompt token: no cache at all (the simplest harness, and the slowest)

`compiled` is the same in static buffers and passes of fixed width: see that module.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from dfbench.drafters.base import Draft
from dfbench.errors import EngineError, ModelError
from dfbench.workers import models
from dfbench.workers.evidence import top_two
from dfbench.workers.growing_cache import GrowingCache, growing_cache
from dfbench.workers.loading import load_model, output_head
from dfbench.workers.spec import PromptSpec, TargetSpec
from dfbench.workers.target import Evidence, Verdict
from dfbench.workers.timing import ForwardTimer, forward_timer
from dfbench.workers.tree import Masks, compact, offsets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Attention implementations that take our mask, and whether it is added to the scores.
_MASKED = {"sdpa": False, "eager": True}


def load_target(spec: TargetSpec) -> TorchTarget:
    """Load the model that a spec names, ready to decode. Raises ModelError or EngineError saying what is wrong."""
    resolved = models.resolve(spec)
    kind = _engine(spec)
    if threads := spec.options.get("threads"):
        torch.set_num_threads(int(threads))
    tokenizer = models.load_tokenizer(resolved)
    return kind(
        load_model(resolved, spec),
        spec,
        eos_ids=models.eos_ids(resolved, tokenizer),
        context_limit=resolved.context_limit,
        resolved=resolved,
        tokenizer=tokenizer,
    )


def _engine(spec: TargetSpec) -> type[TorchTarget]:
    if spec.engine != "compiled":
        return TorchTarget
    from dfbench.workers.compiled import CompiledTarget

    return CompiledTarget


class TorchTarget:
    """Greedy decoding of one request at a time (the `Target` protocol) on a causal language model.

    `queries` of a verdict counts the root, the nodes and what was fed again; the prefix that `recompute` runs through
    on every pass is not among them. `top_k` may be set between requests.
    """

    kind = "torch"
    timed = True

    def __init__(
        self,
        model: PreTrainedModel,
        spec: TargetSpec,
        *,
        eos_ids: frozenset[int] = frozenset(),
        context_limit: int | None = None,
        resolved: models.ResolvedModel | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.model = model
        self.spec = spec
        self.resolved = resolved
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.top_k = 0
        embeddings: Any = model.get_input_embeddings()
        self.vocab_size: int = embeddings.num_embeddings
        self.context_limit = context_limit or int(model.config.get_text_config().max_position_embeddings)
        self.device = model.device
        self.attention: str = model.config._attn_implementation
        check_cache(model)
        use_logits_dtype(model, spec.logits_dtype)
        self._recompute = spec.engine == "recompute"
        self._refeed = spec.kv_repair == "refeed"
        self.cache_argument = _cache_argument(model)
        self._masks = Masks(self.device, model.dtype, _MASKED.get(self.attention, False), spec.max_queries)
        self._positions = torch.arange(self.context_limit, device=self.device)[None]
        self.timer: ForwardTimer = forward_timer(self.device)
        self._top_two = top_two(self.device, torch.float32 if spec.logits_dtype else model.dtype)
        self._cache: DynamicCache | None = None
        self._growing = self._cache_in_place()
        self._past = 0
        self._pending: list[int] = []
        self._rows = torch.empty(0)
        self._nodes = 0

    @property
    def max_nodes(self) -> int:
        """Largest draft that the next pass can carry: the query budget, and what the context still holds."""
        refed = 0 if self._recompute else len(self._pending) - 1
        room = self.context_limit - self._past - len(self._pending)
        return max(0, min(self.spec.max_queries - 1 - refed, room))

    def reserve(self, tokens: int) -> None:
        """A request of this many tokens, prompt and answer, comes next: what it needs is prepared untimed."""
        if self._growing is not None:
            self._growing.reserve(min(tokens + self.spec.max_queries, self.context_limit))

    def engine_facts(self) -> dict[str, Any]:
        """What this engine built beside the model, for the worker's record."""
        return {}

    def clock(self) -> int:
        """Host clock, ns."""
        return perf_counter_ns()

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> int:
        """Run the prompt; its keys and values stay (not in `recompute`). Returns the first output token."""
        self._check_prompt(prompt)
        self._past = 0
        self._empty()
        self._pending = list(prompt)
        self._top_two.clear()
        verdict = self._pass(Draft(()))
        first = verdict.argmax[0]
        self._record((), 1)
        self._keep((), (first,))
        return first

    @torch.inference_mode()
    def verify(self, draft: Draft) -> Verdict:
        """One pass over the pending tokens and the draft. Raises DraftError or EngineError for what it cannot carry."""
        draft.check(self.max_nodes, self.vocab_size)
        if self._past + len(self._pending) > self.context_limit:
            raise EngineError(f"the output has reached the end of the model's context of {self.context_limit} tokens.")
        return self._pass(draft)

    @torch.inference_mode()
    def commit(self, path: Sequence[int], emitted: Sequence[int]) -> None:
        """Record what the emitted tokens' rows said, keep the accepted nodes, drop the others."""
        self._record(path, len(emitted))
        # Where the bonus was cut, the last accepted node is the root, and a root is not in the cache.
        self._keep(path[: len(emitted) - 1], emitted)

    def evidence(self) -> Evidence:
        """Top two logits of every token since prefill, copied from the device in one go."""
        return self._top_two.read()

    @torch.inference_mode()
    def probe(self, draft: Draft) -> int:
        """Forward time, ns, of a pass that leaves no trace: for calibration."""
        verdict = self.verify(draft)
        if self._cache is not None:
            self._cache.crop(-(len(self._pending) + self._nodes))
        return verdict.forward_ns

    def next_turn(self, prompt: PromptSpec, answer: Sequence[int], enable_thinking: bool = False) -> PromptSpec:
        """The conversation's next prompt, which holds AR's answer to this one."""
        return models.next_turn(prompt, answer, self.tokenizer, enable_thinking)

    def _pass(self, draft: Draft) -> Verdict:
        fed = len(self._pending)
        inputs = self._inputs(draft)
        self._nodes = len(draft.tokens)
        timer = self.timer
        timer.begin()
        self._rows = rows = self._run(inputs, self._nodes + 1)
        timer.end()
        topk = rows.topk(self.top_k, -1).indices if self.top_k else None
        ids = self._top_two.look(rows)
        argmax, topk_ids, forward_ns, ready = timer.read(ids, topk)
        refed = 0 if self._recompute or self._past == 0 else fed - 1
        return Verdict(argmax, 1 + self._nodes + refed, self._padding(fed + self._nodes), forward_ns, ready, topk_ids)

    def _empty(self) -> None:
        """Forget every key and value."""
        if self._growing is not None:
            self._growing.clear()
            self._cache = self._growing
        elif not self._recompute:
            self._cache = DynamicCache(config=self.model.config)

    def _run(self, inputs: dict[str, Any], rows: int) -> torch.Tensor:
        """The forward: logits [rows, vocabulary] of the last fed tokens."""
        return self.model(**inputs).logits[0, -rows:]  # type: ignore[no-any-return]

    def _padding(self, fed: int) -> int:
        """Filler tokens in a pass that feeds this many."""
        return 0

    def _inputs(self, draft: Draft) -> dict[str, Any]:
        """Arguments of the forward. A chain over no cache, or a lone token, needs neither mask nor positions."""
        lead, past = len(self._pending), self._past
        tokens = [*self._pending, *draft.tokens]
        fed = len(tokens)
        inputs: dict[str, Any] = {
            "input_ids": self.timer.upload(tokens),
            "use_cache": not self._recompute,
            "logits_to_keep": len(draft.tokens) + 1,
        }
        if not self._recompute:
            inputs[self.cache_argument] = self._cache
        if draft.parents is not None and draft.tokens:
            if self.attention not in _MASKED:
                raise EngineError(
                    f"attention '{self.attention}' takes no tree mask: use sdpa or eager, or a chain drafter."
                )
            inputs["attention_mask"] = self._masks.tree(past, draft.parents, lead)
            at = offsets(draft.depths(), lead)
            inputs["position_ids"] = self.timer.upload([past + offset for offset in at])
        elif past:
            inputs["position_ids"] = self._positions[:, past : past + fed]
            if fed > 1 and self.attention in _MASKED:
                inputs["attention_mask"] = self._masks.causal(past, fed)
        return inputs

    def _record(self, path: Sequence[int], count: int) -> None:
        """Top two of the rows that the emitted tokens came from: the root's, then the accepted nodes'."""
        self._top_two.add(self._rows, [0, *(node + 1 for node in path)][:count])

    def _keep(self, path: Sequence[int], emitted: Sequence[int]) -> None:
        if self._recompute:
            self._pending += emitted
            return
        self._past += len(self._pending)
        kept: Sequence[int] = () if self._refeed else path
        self._settle(kept)
        self._past += len(kept)
        self._pending = list(emitted[len(kept) :])

    def _settle(self, kept: Sequence[int]) -> None:
        """Move the kept nodes' keys and values to slot `past` and on, and drop the other nodes'."""
        assert self._cache is not None
        compact(self._cache.layers if self._growing is None else [self._growing], self._past, kept)  # type: ignore[arg-type]
        if (surplus := self._nodes - len(kept)) > 0:
            self._cache.crop(-surplus)

    def _cache_in_place(self) -> GrowingCache | None:
        """The cache of engine `cached`, where it fits; not with attention that would copy keys and values that do not
        lie next to one another, as eager attention's products do."""
        if self.spec.engine != "cached" or self.attention != "sdpa":
            return None
        return growing_cache(self.model, self.cache_argument)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise EngineError("the prompt is empty: give it at least one token.")
        if len(prompt) >= self.context_limit:
            raise EngineError(
                f"the prompt has {len(prompt)} tokens, and the model's context of {self.context_limit} leaves no room"
                " for an answer: shorten it."
            )
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise EngineError(f"the prompt names a token outside the model's vocabulary of {self.vocab_size}.")


def check_cache(model: PreTrainedModel) -> None:
    """Raise EngineError unless every layer keeps all keys and values and can drop the newest.

    With a sliding window our mask would be wrong, and a recurrent state cannot be taken back after a rejected draft.
    """
    for layer in DynamicCache(config=model.config).layers:
        if type(layer) is not DynamicLayer:
            raise EngineError(
                f"the model '{model.config.model_type}' has {type(layer).__name__} layers, whose cache cannot be"
                " cropped after a rejected draft: choose a model with full attention in every layer."
            )


def use_logits_dtype(model: PreTrainedModel, dtype: str | None) -> None:
    """Compute the last projection in float32, which makes exact ties rare. Raises ModelError where that cannot be."""
    if dtype is None:
        return
    head = output_head(model)
    if dtype != "float32":
        raise ModelError(f"logits_dtype '{dtype}' is not offered: write float32, or leave it out.")
    if not isinstance(head, torch.nn.Linear) or not head.weight.is_floating_point():
        raise ModelError("logits_dtype needs a plain last projection, and this model has none: leave it out.")
    model.set_output_embeddings(Float32Head(head))  # type: ignore[no-untyped-call]


class Float32Head(torch.nn.Module):
    """The last projection in float32: the weights keep their values, products and sums do not round to 16 bits."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(head.weight.detach().float(), requires_grad=False)
        self.bias = None if head.bias is None else torch.nn.Parameter(head.bias.detach().float(), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocabulary], float32."""
        return torch.nn.functional.linear(hidden.float(), self.weight, self.bias)


def _cache_argument(model: PreTrainedModel) -> str:
    """transformers 5.24 says `cache`; models with code of their own may still say `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

"""Will a model fit its device? Weights, keys and values, and workspace, from the config alone, before anything loads.

An upper estimate: what the eager engines keep for a context of n tokens is `fixed + n · per_token` bytes. The largest
context that fits follows from it. Figures are of one request at a time, in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from dfbench.errors import ModelError
from dfbench.workers.spec import TargetSpec

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
RUNTIME_BYTES = 700 * 10**6
"""What the CUDA context, library workspaces and loaded kernels take beside tensors."""
STATIC_TOKENS = 1024
"""Length of the first buffers of the engine `compiled`, where nothing else is asked for."""
_GATED = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})
_LIVE_HIDDEN = 6  # hidden-sized tensors alive at once in a layer: residual, normed, queries, output, and copies


@dataclass(frozen=True)
class Footprint:
    """Device memory of one target. `per_token` is split into what stays (`kv`) and what a pass needs for a moment."""

    weights: int
    kv_per_token: int
    work_per_token: int
    work_fixed: int
    context_limit: int

    def total(self, context: int) -> int:
        """Bytes at this many tokens of context."""
        return self.weights + self.work_fixed + context * (self.kv_per_token + self.work_per_token)

    def largest_context(self, device_bytes: int) -> int:
        """The longest context that fits, at most the model's own limit; 0 when not even the weights do."""
        room = device_bytes - self.weights - self.work_fixed
        return max(0, min(self.context_limit, room // (self.kv_per_token + self.work_per_token)))


def footprint(config: Mapping[str, Any], spec: TargetSpec) -> Footprint:
    """Memory of the model with this config.json under this spec. Raises ModelError where the config does not say."""
    shape = _Shape.of(config)
    size = _dtype_bytes(spec)
    weights = parameters(config) * size
    if spec.logits_dtype == "float32" and size < 4:
        tied = bool(_text(config).get("tie_word_embeddings", False))
        weights += shape.vocab * shape.hidden * (4 if tied else 4 - size)
    logits = spec.max_queries * shape.vocab * (size + 4)
    kv = 0 if spec.engine == "recompute" else 2 * shape.layers * shape.kv_heads * shape.head_dim * size
    # A cache that grows copies one layer at a time, as a cache does that is joined anew on each pass; a masked pass
    # spreads keys and values over all query heads. Buffers end a whole pass behind the request.
    grown = 0 if spec.engine == "recompute" else 2 * shape.kv_heads * shape.head_dim * size
    spread = 2 * shape.heads * shape.head_dim * size
    activations = (_LIVE_HIDDEN * shape.hidden + 3 * shape.intermediate) * size
    mask = spec.max_queries * size
    return Footprint(
        weights=weights,
        kv_per_token=kv,
        work_per_token=grown + spread + activations + mask,
        work_fixed=RUNTIME_BYTES + logits + spec.max_queries * kv,
        context_limit=shape.context_limit,
    )


def check_fit(config: Mapping[str, Any], spec: TargetSpec, context: int, device_bytes: int, device: str) -> Footprint:
    """The footprint, once `context` tokens are sure to fit `device_bytes`. Raises ModelError saying what would fit."""
    need = footprint(config, spec)
    if context > need.context_limit:
        raise ModelError(
            f"{spec.model} has a context of {need.context_limit} tokens and the sweep needs {context}: shorten the "
            "prompts or lower max_new_tokens."
        )
    if need.total(context) > device_bytes:
        largest = need.largest_context(device_bytes)
        way_out = (
            f"the largest context that fits is {largest} tokens"
            if largest
            else "take a device with more memory, a smaller model or a narrower dtype"
        )
        raise ModelError(
            f"{spec.model} in {spec.dtype} needs {_gb(need.total(context))} at {context} tokens of context and "
            f"{device} has {_gb(device_bytes)}: {way_out}."
        )
    return need


def check_room(config: Mapping[str, Any], spec: TargetSpec, device: torch.device) -> None:
    """Raise ModelError if the model cannot fit the device as it is now: said at once, not after minutes of loading.

    On a GPU the context that the engine makes room for at the start must fit beside the weights; on the CPU the weights
    must, since memory is shared there and pages can go. Quantised weights are smaller than their dtype tells, and are
    not judged.
    """
    if not config or spec.options.get("quantization") or spec.options.get("gguf") == "packed":
        return
    if device.type == "cuda":
        import torch

        free, name = torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
        check_fit(config, spec, _at_the_start(config, spec), free, name)
        return
    weights, free = footprint(config, spec).weights, psutil.virtual_memory().available
    if spec.engine == "compiled" and spec.dtype == "bfloat16":
        weights *= 2  # The layout that products take lies beside the model's own.
    if weights > free:
        raise ModelError(
            f"{spec.model} in {spec.dtype} is {_gb(weights)} of weights and this machine has {_gb(free)} of memory "
            "free: close something, or take a smaller model or a narrower dtype."
        )


def _at_the_start(config: Mapping[str, Any], spec: TargetSpec) -> int:
    """Tokens that there must be room for once the model is loaded: `compiled` begins with buffers of a fixed length."""
    wanted = int(spec.options.get("context", STATIC_TOKENS)) if spec.engine == "compiled" else 1
    return min(wanted, _Shape.of(config).context_limit)


def parameters(config: Mapping[str, Any]) -> int:
    """Number of weights: by formula for the common gated decoders, else counted on a model without storage (slow)."""
    if _text(config).get("model_type") in _GATED:
        return _gated_parameters(config)
    return _counted_parameters(config)


def _gated_parameters(config: Mapping[str, Any]) -> int:
    """Embeddings, attention with grouped keys and values, a gated MLP, norms; biases where the family has them."""
    text, shape = _text(config), _Shape.of(config)
    family = text["model_type"]
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (queries + 2 * keys) + queries * shape.hidden
    if family == "qwen2":
        attention += queries + 2 * keys
    elif text.get("attention_bias"):
        attention += queries + 2 * keys + shape.hidden
    if family == "qwen3":
        attention += 2 * shape.head_dim
    mlp = 3 * shape.hidden * shape.intermediate
    if text.get("mlp_bias"):
        mlp += 2 * shape.intermediate + shape.hidden
    embeddings = shape.vocab * shape.hidden * (1 if text.get("tie_word_embeddings", False) else 2)
    return embeddings + shape.layers * (attention + mlp + 2 * shape.hidden) + shape.hidden


def _counted_parameters(config: Mapping[str, Any]) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    classes: Any = AutoModelForCausalLM
    try:
        known = AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = classes.from_config(known)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the size of a '{config.get('model_type')}' model cannot be told from its config.") from error
    return sum(weight.numel() for weight in model.parameters())


@dataclass(frozen=True)
class _Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_limit: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Shape:
        text = _text(config)
        try:
            hidden, heads = (
                int(_first(text, "hidden_size", "n_embd")),
                int(_first(text, "num_attention_heads", "n_head")),
            )
            return cls(
                layers=int(_first(text, "num_hidden_layers", "n_layer")),
                hidden=hidden,
                intermediate=int(text.get("intermediate_size") or text.get("n_inner") or 4 * hidden),
                heads=heads,
                kv_heads=int(text.get("num_key_value_heads") or heads),
                head_dim=int(text.get("head_dim") or hidden // heads),
                vocab=int(text["vocab_size"]),
                context_limit=int(_first(text, "max_position_embeddings", "n_positions")),
            )
        except KeyError as error:
            raise ModelError(f"the config of a '{text.get('model_type')}' model does not name its {error}.") from error


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise KeyError(keys[0])


def _dtype_bytes(spec: TargetSpec) -> int:
    try:
        return DTYPE_BYTES[spec.dtype]
    except KeyError:
        raise ModelError(f"dtype '{spec.dtype}' is not known: write one of {', '.join(DTYPE_BYTES)}.") from None


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"

"""Which arm which serving engine can run, and the settings to paste into it.

An engine's own tie rule decides which of our options it is: `pld` with `match: recent` is no arm of vLLM, which copies
from the earliest match. Names and defaults are those of the versions in `Engine.version`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Engine:
    """One way to draft in one engine.

    `wants`: the drafter and the option values that it is bound to; options not named are free. `lines`: settings for
    given options. `exact`: whether our drafter makes the same drafts; where it does not, `limits` says why.
    """

    name: str
    version: str
    drafter: str
    wants: Options
    lines: Callable[[Options], list[str]]
    tie_rule: str
    limits: tuple[str, ...] = ()
    exact: bool = True
    also: Callable[[Options], bool] = lambda options: True

    def runs(self, drafter: str, options: Options) -> bool:
        """Whether the engine can run this arm."""
        return (
            drafter == self.drafter and all(options.get(k) == v for k, v in self.wants.items()) and self.also(options)
        )


def _json_flag(flag: str, values: Options) -> list[str]:
    return [f"{flag} '{json.dumps(dict(values))}'"]


def _transformers(o: Options) -> list[str]:
    return [
        f"model.generate(**inputs, do_sample=False, prompt_lookup_num_tokens={o['draft_len']}, "
        f"max_matching_ngram_size={o['max_ngram']})"
    ]


def _vllm_ngram(o: Options) -> list[str]:
    config = {
        "method": "ngram",
        "num_speculative_tokens": o["draft_len"],
        "prompt_lookup_max": o["max_ngram"],
        "prompt_lookup_min": o["min_ngram"],
    }
    return _json_flag("vllm serve MODEL --speculative-config", config)


def _vllm_suffix(o: Options) -> list[str]:
    config = {
        "method": "suffix",
        "num_speculative_tokens": o["max_draft"],
        "suffix_decoding_max_tree_depth": o["depth"],
        "suffix_decoding_max_spec_factor": o["factor"],
        "suffix_decoding_min_token_prob": o["min_prob"],
        "suffix_decoding_max_cached_requests": o["cached_requests"],
    }
    return _json_flag("vllm serve MODEL --speculative-config", config)


def _sglang(o: Options) -> list[str]:
    kind = {"recency": "BFS", "probability": "PROB"}[o["mode"]]
    return [
        "python -m sglang.launch_server --model-path MODEL --speculative-algorithm NGRAM",
        f"  --speculative-num-draft-tokens {o['draft_tokens']} --speculative-ngram-match-type {kind}",
        f"  --speculative-ngram-min-bfs-breadth {o['min_breadth']}"
        f" --speculative-ngram-max-bfs-breadth {o['max_breadth']}",
        f"  --speculative-ngram-max-trie-depth {o['depth']} --speculative-ngram-capacity {o['capacity']}",
    ]


def _llama_simple(o: Options) -> list[str]:
    return [
        f"llama-server -m MODEL.gguf --spec-type ngram-simple --spec-ngram-simple-size-n {o['max_ngram']}"
        f" --spec-ngram-simple-size-m {o['draft_len']}"
    ]


def _llama_cache(o: Options) -> list[str]:
    return ["llama-server -m MODEL.gguf --spec-type ngram-cache"]


def _tensorrt(o: Options) -> list[str]:
    return [
        "# config.yml for: trtllm-serve MODEL --config config.yml",
        "speculative_config:",
        "  decoding_type: NGram",
        f"  max_draft_len: {o['draft_len']}",
        f"  max_matching_ngram_size: {o['max_ngram']}",
        "  is_keep_all: true",
        "  is_use_oldest: true",
        "  is_public_pool: false",
    ]


_EARLIEST = {"match": "earliest", "full": False}

ENGINES = (
    Engine(
        "transformers",
        "5.24",
        "pld",
        {**_EARLIEST, "min_ngram": 1, "stop_at_eos": True},
        _transformers,
        "longest n-gram first, the earliest match; the draft ends before an end of text",
        ("batch 1 only", "chains only"),
    ),
    Engine(
        "vLLM ngram",
        "0.33",
        "pld",
        {**_EARLIEST, "stop_at_eos": False},
        _vllm_ngram,
        "longest n-gram within [min, max] first, the earliest match",
        ("with neither minimum nor maximum set it takes 5 and 5", "ngram_gpu makes other drafts"),
    ),
    Engine(
        "vLLM suffix",
        "0.33 with arctic-inference",
        "suffix",
        {"mode": "linear", "offset": 0.0},
        _vllm_suffix,
        "the most frequent continuation; of equal scores the longer match",
        (
            "past outputs are kept for 10,000 requests by default, which replays cold as 0",
            "drafts of concurrent requests share the global tree",
        ),
    ),
    Engine(
        "SGLang NGRAM",
        "0.5.23",
        "ngram-trie",
        {"index_prompt": False},
        _sglang,
        "every matching suffix, longest first; most recent continuations first (BFS) or the likeliest (PROB)",
        (
            "the trie is shared by all requests and learns outputs only; it is replayed cold",
            "every pass carries all draft tokens, padded: its passes are wider than replayed",
        ),
        exact=False,
    ),
    Engine(
        "llama.cpp ngram-simple",
        "2026, flags of llama-server",
        "pld",
        {"match": "recent", "full": False, "stop_at_eos": False},
        _llama_simple,
        "one n-gram length, the most recent earlier match",
        ("no draft while the text is shorter than n + m + 2 tokens",),
        exact=False,
        also=lambda o: bool(o["max_ngram"] == o["min_ngram"]),
    ),
    Engine(
        "llama.cpp ngram-cache",
        "2026, flags of llama-server",
        "ngram-cache",
        {"min_ngram": 1, "max_ngram": 4, "draft_len": 8, "dynamic": False, "learn": "within"},
        _llama_cache,
        "the continuation with the highest count; among equals whichever its hash map has first",
        ("the server learns only n-grams inside the tokens of one step", "draft length 8 is fixed"),
        exact=False,
        also=lambda o: not o.get("static"),
    ),
    Engine(
        "TensorRT-LLM NGram",
        "1.x",
        "pld",
        {**_EARLIEST, "min_ngram": 1, "stop_at_eos": False},
        _tensorrt,
        "longest n-gram first, the earliest continuation that is as long as can be",
        (
            "it drops a shorter continuation when a longer one of the same n-gram arrives",
            "its default pool is shared by all requests and never evicted: is_public_pool is false here, as replayed",
        ),
        exact=False,
    ),
)


def engines_for(drafter: str, options: Options) -> list[Engine]:
    """Every engine that can run this arm."""
    return [engine for engine in ENGINES if engine.runs(drafter, options)]


def paste(engine: Engine, options: Options) -> list[str]:
    """Settings to paste, then the engine's tie rule and limits as comments."""
    exact = "" if engine.exact else "; our replay of it is close, not equal"
    notes = [f"# {engine.name} {engine.version}: {engine.tie_rule}{exact}", *(f"# {limit}" for limit in engine.limits)]
    return [*engine.lines(options), *notes]

"""Settings to paste: which engine runs which arm, and that what is printed can be parsed."""

from __future__ import annotations

import inspect
import json
import shlex
from typing import Any

import pytest
import yaml
from transformers import GenerationConfig
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from dfbench.cluster.settings import ENGINES, Engine, engines_for, paste
from dfbench.drafters import registry


def options(drafter: str, **given: Any) -> dict[str, Any]:
    return registry.parse_options(drafter, given).model_dump(mode="json")


def engine(name: str) -> Engine:
    return next(e for e in ENGINES if e.name == name)


def names(drafter: str, **given: Any) -> list[str]:
    return [e.name for e in engines_for(drafter, options(drafter, **given))]


@pytest.mark.parametrize(
    ("drafter", "given", "expected"),
    [
        ("pld", {"preset": "hf"}, ["transformers"]),
        ("pld", {"preset": "vllm"}, ["vLLM ngram"]),
        ("pld", {"match": "earliest", "min_ngram": 1}, ["vLLM ngram", "TensorRT-LLM NGram"]),
        ("pld", {"match": "recent"}, []),
        ("pld", {"match": "recent", "min_ngram": 4, "max_ngram": 4}, ["llama.cpp ngram-simple"]),
        ("pld", {"preset": "original"}, []),
        ("suffix", {}, ["vLLM suffix"]),
        ("suffix", {"offset": 1.0}, []),
        ("suffix", {"mode": "tree"}, []),
        ("ngram-cache", {"preset": "server"}, ["llama.cpp ngram-cache"]),
        ("ngram-cache", {}, []),
        ("cacheback", {}, []),
        ("ar", {}, []),
    ],
)
def test_each_engine_runs_only_its_own_tie_rule(drafter: str, given: dict[str, Any], expected: list[str]) -> None:
    assert names(drafter, **given) == expected


def test_transformers_takes_these_arguments() -> None:
    line = engine("transformers").lines(options("pld", preset="hf", draft_len=7))[0]
    assert "prompt_lookup_num_tokens=7" in line and "max_matching_ngram_size=2" in line
    known = set(GenerationConfig().to_dict())
    assert {"prompt_lookup_num_tokens", "max_matching_ngram_size"} <= known
    assert "max_matching_ngram_size" in inspect.signature(PromptLookupCandidateGenerator).parameters


def flag(lines: list[str], name: str) -> str:
    words = shlex.split(" ".join(lines))
    return words[words.index(name) + 1]


def test_vllm_s_settings_are_json() -> None:
    ngram = json.loads(flag(engine("vLLM ngram").lines(options("pld", preset="vllm")), "--speculative-config"))
    assert ngram == {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_max": 5, "prompt_lookup_min": 5}
    suffix = json.loads(flag(engine("vLLM suffix").lines(options("suffix", depth=16)), "--speculative-config"))
    assert suffix["method"] == "suffix" and suffix["suffix_decoding_max_tree_depth"] == 16


def test_llama_s_settings_are_flags() -> None:
    lines = engine("llama.cpp ngram-simple").lines(options("pld", min_ngram=8, max_ngram=8, draft_len=32))
    assert flag(lines, "--spec-type") == "ngram-simple"
    assert flag(lines, "--spec-ngram-simple-size-n") == "8" and flag(lines, "--spec-ngram-simple-size-m") == "32"


def test_tensorrt_s_settings_are_yaml() -> None:
    made = yaml.safe_load("\n".join(engine("TensorRT-LLM NGram").lines(options("pld", match="earliest"))))
    assert made["speculative_config"]["max_matching_ngram_size"] == 3
    assert made["speculative_config"]["is_public_pool"] is False, "as replayed: cold for each request"


def test_sglang_s_settings_are_flags() -> None:
    given = {
        "mode": "probability",
        "draft_tokens": 8,
        "min_breadth": 1,
        "max_breadth": 4,
        "depth": 12,
        "capacity": 1000,
    }
    lines = engine("SGLang NGRAM").lines(given)
    assert flag(lines, "--speculative-num-draft-tokens") == "8"
    assert flag(lines, "--speculative-ngram-match-type") == "PROB"
    assert flag(lines, "--speculative-ngram-max-trie-depth") == "12"


def test_the_tie_rule_and_limits_are_told() -> None:
    text = "\n".join(paste(engine("transformers"), options("pld", preset="hf")))
    assert "# transformers 5.24: longest n-gram first, the earliest match" in text and "# batch 1 only" in text
    assert "close, not equal" in "\n".join(paste(engine("TensorRT-LLM NGram"), options("pld", match="earliest")))

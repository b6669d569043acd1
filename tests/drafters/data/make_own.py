"""Writes own_trace.jsonl and own_steps.json beside it: a small recorded trace of the project's own, and its counts.

    python tests/drafters/data/make_own.py

The trace comes from a rule, not from a model: texts of made-up phrases whose outputs copy from their prompts, repeat
themselves and change a word now and then. The counts come from the restatements, not from the drafters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from restatements import Nodes, ReleasedCacheback, chain, longest_repeat, prompt_lookup, steps  # noqa: E402

EOS = 2
SHAPES = {"code": (40, 0.05), "copyctx": (120, 0.15), "chat": (20, 0.4)}
"""Workload → words of the prompt, and how often an output word is a new one instead of a copied one."""


def trace(workload: str, number: int) -> dict[str, Any]:
    random = Random(f"{workload} {number}")
    length, novelty = SHAPES[workload]
    phrases = [[random.randrange(3, 60) for _ in range(random.randrange(2, 7))] for _ in range(12)]
    prompt = [1]
    while len(prompt) < length:
        prompt += random.choice(phrases)
    output: list[int] = []
    while len(output) < 70:
        for token in random.choice(phrases):
            output.append(random.randrange(3, 60) if random.random() < novelty else token)
    return {"workload": workload, "prompt_id": number, "prompt_ids": prompt, "output_ids": [*output, EOS]}


def lookup(**options: Any) -> Callable[[list[int]], Callable[[list[int], int], Nodes]]:
    return lambda prompt: lambda seq, last: chain(prompt_lookup(seq, options, {EOS}))


def automaton(position: str) -> Callable[[list[int]], Callable[[list[int], int], Nodes]]:
    def draft(seq: list[int], last: int) -> Nodes:
        match, end = longest_repeat(seq, position == "recent")
        return chain(seq[end + 1 : end + 1 + min(59, 4 * match)] if match else [])

    return lambda prompt: draft


def cacheback(
    leader: int, follower: int, wanted: int | None
) -> Callable[[list[int]], Callable[[list[int], int], Nodes]]:
    def begin(prompt: list[int]) -> Callable[[list[int], int], Nodes]:
        table = ReleasedCacheback(leader, follower)
        table.request(prompt)

        def draft(seq: list[int], last: int) -> Nodes:
            table.learn(seq)
            return table.tree(seq, last) if wanted is None else chain(table.chain(seq, wanted))

        return draft

    return begin


def methods() -> dict[str, dict[str, Callable[[list[int]], Callable[[list[int], int], Nodes]]]]:
    pld = {
        f"pld_{match}_n{n}_k{k}": lookup(match=match, max_ngram=n, draft_len=k)
        for match in ("recent", "earliest")
        for n in (1, 3)
        for k in (3, 10)
    }
    tables = {
        f"tree_l{leader}_f{follower}": cacheback(leader, follower, None) for leader in (1, 2) for follower in (1, 3)
    }
    chains = {f"chain_l{leader}_f1_k10": cacheback(leader, 1, 10) for leader in (1, 2)}
    return {
        "hf": {"hf_n2_k10": lookup(match="earliest", max_ngram=2, stop_at_eos=True)},
        "pld": pld | {"pld_original_n3_k10": lookup(match="earliest", full=True)},
        "cacheback": tables | chains,
        "sam": {f"sam_{position}": automaton(position) for position in ("first", "recent")},
    }


def make_rows() -> list[dict[str, Any]]:
    return [trace(workload, number) for workload in SHAPES for number in range(3)]


def make_counts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts: dict[str, Any] = {"about": " ".join((__doc__ or "").split("\n\n")[-1].split())}
    for group, named in methods().items():
        counts[group] = {}
        for name, begin in named.items():
            found = dict.fromkeys(SHAPES, 0)
            for row in rows:
                found[row["workload"]] += steps(begin(row["prompt_ids"]), row["prompt_ids"], row["output_ids"])
            counts[group][name] = {workload: {"steps": count} for workload, count in found.items()}
    return counts


def main() -> None:
    rows = make_rows()
    (HERE / "own_trace.jsonl").write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    (HERE / "own_steps.json").write_text(json.dumps(make_counts(rows), indent=1) + "\n")


if __name__ == "__main__":
    main()

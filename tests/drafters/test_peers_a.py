"""Step counts of prompt lookup, Cacheback and SAM over recorded outputs: those of other projects' code, and our own.

`peer_steps.json` comes from running transformers' own generator and restatements of the other methods over recorded
SmolLM2 outputs; it lies beside the checkout and is skipped where it is missing. `data/own_steps.json` comes from the
restatements here over a small trace made by a rule (data/make_own.py), and is held everywhere.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from dfbench.drafters.base import DrafterContext
from dfbench.drafters.registry import create
from dfbench.workers.loop import decode
from dfbench.workers.target import RecordedTarget

DATA = Path(__file__).parent / "data"
CONTEXT = DrafterContext(vocab_size=49152, eos_ids=frozenset({2}))
OWN = json.loads((DATA / "own_steps.json").read_text())
GROUPS = ("hf", "pld", "cacheback", "sam")

PEERS = (
    ["hf_n2_k10", "hf_n3_k5"]
    + [f"pld_{m}_n{n}_k{k}" for k in (3, 5, 10) for n in (1, 2, 3) for m in ("recent", "earliest")]
    + ["pld_original_n3_k10"]
    + [f"tree_l{leader}_f{follower}" for leader in (1, 2, 3) for follower in (1, 2, 3)]
    + [f"chain_l{leader}_f1_k{k}" for leader in (1, 2, 3) for k in (3, 5, 10)]
)


def arm(key: str) -> tuple[str, dict[str, Any]]:
    """The drafter and options that a key of the count files stands for."""
    kind, *parts = key.split("_")
    number = {part[0]: int(part[1:]) for part in parts if re.fullmatch(r"[a-z]\d+", part)}
    if kind == "sam":
        return "sam", {"position": parts[0]}
    if kind in ("tree", "chain"):
        length = {"draft_len": number["k"]} if kind == "chain" else {}
        return "cacheback", {"draft": kind, "leader": number["l"], "follower": number["f"], **length}
    sizes = {"max_ngram": number["n"], "draft_len": number["k"]}
    rule = {"preset": kind} if kind == "hf" else {"match": parts[0]}
    return "pld", sizes | ({"preset": "original"} if parts[0] == "original" else rule)


@cache
def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def count_steps(path: Path, key: str) -> dict[str, int]:
    """Decode steps by workload, cold for each prompt; the output must be the recorded one."""
    drafter = create(*arm(key), CONTEXT)
    target = RecordedTarget()
    counts: dict[str, int] = {}
    for row in rows(path):
        drafter.reset()
        target.load(row["output_ids"])
        trace = decode(target, drafter, row["prompt_ids"], max_new_tokens=len(row["output_ids"]))
        assert trace.output == row["output_ids"]
        counts[row["workload"]] = counts.get(row["workload"], 0) + len(trace.steps)
    return counts


def wanted(counts: dict[str, Any]) -> dict[str, int]:
    return {workload: found["steps"] for workload, found in counts.items() if workload != "all"}


@pytest.mark.parametrize(("group", "key"), [(group, key) for group in GROUPS for key in OWN[group]])
def test_own_trace(group: str, key: str) -> None:
    assert count_steps(DATA / "own_trace.jsonl", key) == wanted(OWN[group][key])


def test_own_files_are_what_their_rule_makes() -> None:
    spec = spec_from_file_location("make_own", DATA / "make_own.py")
    assert spec is not None and spec.loader is not None
    make_own = module_from_spec(spec)
    spec.loader.exec_module(make_own)
    made = make_own.make_rows()
    assert made == rows(DATA / "own_trace.jsonl")
    assert make_own.make_counts(made) == OWN


@pytest.mark.parametrize("key", PEERS)
def test_peer_counts(shared_data: Path, key: str) -> None:
    peers = json.loads((shared_data / "peer_steps.json").read_text())
    group = "cacheback" if key.startswith(("tree", "chain")) else key.split("_")[0]
    assert count_steps(shared_data / "traces_smollm2.jsonl", key) == wanted(peers[group][key])


def test_every_peer_is_held(shared_data: Path) -> None:
    peers = json.loads((shared_data / "peer_steps.json").read_text())
    assert {key for group in ("hf", "pld", "cacheback") for key in peers[group]} == set(PEERS)

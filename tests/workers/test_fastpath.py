"""The compiled path of recorded targets equals the loop, row by row, for every drafter that it knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfbench.drafters import registry
from dfbench.drafters.base import DrafterContext
from dfbench.errors import EngineError, WorkloadError
from dfbench.workers import fastpath, loop
from dfbench.workers.actor import Worker
from dfbench.workers.checks import breaches
from dfbench.workers.records import TOKENS
from dfbench.workers.spec import ArmSpec, JobSpec, PromptSpec, ShardSpec, TargetSpec
from dfbench.workers.target import RecordedTarget

EOS = 2
CONTEXT = DrafterContext(vocab_size=1000, eos_ids=frozenset({EOS}))
ARMS: list[tuple[str, dict[str, Any]]] = [
    ("ar", {}),
    ("pld", {}),
    ("pld", {"preset": "hf"}),
    ("pld", {"preset": "original", "draft_len": 4}),
    ("pld", {"max_ngram": 4, "min_ngram": 2, "match": "earliest"}),
    ("cacheback", {}),
    ("cacheback", {"leader": 2, "follower": 2, "draft_len": 5}),
    ("cacheback", {"draft": "tree"}),
    ("cacheback", {"draft": "tree", "merge": True, "queries": 20, "reserve": 6}),
    ("cacheback", {"draft": "tree", "merge": True, "leader": 3, "follower": 2}),
    ("cacheback", {"draft": "tree", "leader": 2, "followers": 2, "count_refed": False, "follower": 1}),
    ("suffix", {}),
    ("suffix", {"factor": 3.0, "offset": 1.0, "min_prob": 0.0, "depth": 8}),
    ("suffix", {"mode": "tree", "factor": 2.0}),
]


def recordings() -> st.SearchStrategy[tuple[list[int], list[int], int]]:
    """Prompt, output and cap: few distinct ids, so that drafts are hit and missed, ends of text among them."""

    def make(
        vocab: int, prompt: list[int], output: list[int], ended: bool, cap: int
    ) -> tuple[list[int], list[int], int]:
        prompt, output = [EOS + t % vocab for t in prompt], [3 + t % vocab for t in output]
        return prompt, [*output, EOS] if ended else output, cap

    ids = st.integers(0, 10**6)
    return st.builds(
        make,
        st.sampled_from([1, 2, 3, 6, 30]),
        st.lists(ids, min_size=1, max_size=40),
        st.lists(ids, min_size=1, max_size=70),
        st.booleans(),
        st.sampled_from([1, 2, 5, 30, 200]),
    )


def both(
    name: str, options: dict[str, Any], prompt: list[int], output: list[int], cap: int, budget: int = 2**20
) -> None:
    drafter = registry.create(name, options, CONTEXT)
    target = RecordedTarget(1000, frozenset({EOS}))
    target.max_nodes = budget
    fast = fastpath.decode(drafter, prompt, output, target=target, max_new_tokens=cap, eos_ids={EOS})
    drafter.reset()
    target.load(output)
    real_cap = fastpath.recorded_cap(cap, output, {EOS})
    trace = loop.decode(target, drafter, prompt, max_new_tokens=real_cap, eos_ids={EOS})
    assert list(fast.output) == trace.output
    assert fast.finish_reason == trace.finish_reason
    assert fast.steps.tolist() == fastpath.columns(trace).tolist()
    assert fast.queries.tolist() == [step.queries for step in trace.steps]


@pytest.mark.parametrize(("name", "options"), ARMS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(ARMS)])
def test_kernel_equals_the_loop(name: str, options: dict[str, Any]) -> None:
    drafter = registry.create(name, options, CONTEXT)
    assert fastpath.kernel_for(drafter, 100) is not None, "this arm would compare the loop with itself"

    @settings(max_examples=60, deadline=None)
    @given(recordings(), st.sampled_from([1, 3, 2**20]))
    def holds(recording: tuple[list[int], list[int], int], budget: int) -> None:
        both(name, options, *recording, budget)

    holds()


@pytest.mark.parametrize(("name", "options"), ARMS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(ARMS)])
def test_kernel_equals_the_loop_on_long_text(name: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    pieces = [rng.integers(3, 400, rng.integers(2, 12)).tolist() for _ in range(20)]
    text = [token for i in rng.integers(0, 20, 300) for token in pieces[i]]
    both(name, options, text[:700], text[700:1500], 800)


@pytest.mark.parametrize(
    ("name", "options"),
    [("suffix", {"cached_requests": 4}), ("cacheback", {"leaders": 10})],
)
def test_what_no_kernel_knows_runs_through_the_loop(name: str, options: dict[str, Any]) -> None:
    drafter = registry.create(name, options, CONTEXT)
    assert fastpath.kernel_for(drafter, 100) is None
    both(name, options, [3, 4, 5] * 5, [3, 4, 5, 6] * 10, 40)


def test_a_carried_drafter_keeps_what_it_learned() -> None:
    drafter = registry.create("cacheback", {}, CONTEXT)
    target = RecordedTarget()
    runs = [
        fastpath.decode(drafter, [9], [3, 4, 5, 6, 7, 8] * 2, target=target, max_new_tokens=12, cold=cold)
        for cold in (True, False, False, True)
    ]
    steps = [len(run.steps) for run in runs]
    assert steps[1] > steps[2], "the third run knows the second's text"
    assert steps[0] == steps[3]


def test_bad_recordings_are_errors() -> None:
    drafter = registry.create("pld", {}, CONTEXT)
    with pytest.raises(EngineError, match="recorded output is empty"):
        fastpath.decode(drafter, [3], [], target=RecordedTarget(), max_new_tokens=4)
    with pytest.raises(WorkloadError, match="token id 1000"):
        fastpath.decode(drafter, [1000], [3, 4], target=RecordedTarget(), max_new_tokens=4)


@pytest.mark.parametrize(
    ("cap", "recorded", "expected"),
    [(10, [3, 4, EOS], 10), (10, [3, 4, 5], 3), (2, [3, 4, EOS], 2), (3, [3, 4, EOS], 3), (3, [3, 4, 5, 6], 3)],
)
def test_the_cap_of_a_recording(cap: int, recorded: list[int], expected: int) -> None:
    assert fastpath.recorded_cap(cap, recorded, {EOS}) == expected


def shard(arms: tuple[ArmSpec, ...]) -> ShardSpec:
    outputs = {"a": (3, 4, 5, 3, 4, 5, 3, 4, EOS), "b": (7, 8, 7, 8, 7, 8, 7)}
    prompts = tuple(
        PromptSpec("w", name, "test", "", (3, 4, 5), name, recorded_ids=ids) for name, ids in outputs.items()
    )
    jobs = tuple(
        JobSpec(f"{prompt}-{arm.name}", "w", prompt, arm.name, arm_order=order)
        for prompt in outputs
        for order, arm in enumerate(arms)
    )
    return ShardSpec("run", "shard", "w", prompts, arms, jobs, max_new_tokens=50)


def run(options: dict[str, Any]) -> dict[str, pa.Table]:
    worker = Worker(TargetSpec("recorded", model="m", options={"eos_ids": [EOS], **options}), node="here")
    worker.load()
    parts = list(worker.run(shard((ArmSpec("ar", "ar"), ArmSpec("pld", "pld"), ArmSpec("cb", "cacheback")))))
    assert [outcome.kind for part in parts for outcome in part.outcomes] == [""] * 6
    assert not any("tokens" in part.tables for part in parts), "a recording has no logits"
    return {name: pa.concat_tables([part.tables[name] for part in parts]) for name in ("jobs", "steps")}


def test_a_worker_replays_a_shard() -> None:
    tables = run({})
    assert breaches(tables["jobs"], tables["steps"], TOKENS.empty_table(), {EOS}) == {}
    jobs = {row["job_id"]: row for row in tables["jobs"].to_pylist()}
    assert jobs["a-pld"]["output_ids"] == [3, 4, 5, 3, 4, 5, 3, 4, EOS]
    assert (jobs["a-pld"]["finish_reason"], jobs["a-pld"]["max_new_tokens"]) == ("eos", 50)
    assert (jobs["b-pld"]["finish_reason"], jobs["b-pld"]["max_new_tokens"]) == ("length", 7)
    assert {row["target"] for row in jobs.values()} == {"recorded"}
    assert jobs["a-ar"]["wall_ns"] is None
    steps = tables["steps"].to_pylist()
    assert all(step["step_ns"] is None for step in steps)
    assert len([step for step in steps if step["job_id"] == "a-ar"]) == 8
    assert [s["step"] for s in steps if s["job_id"] == "b-pld"] == list(
        range(len([s for s in steps if s["job_id"] == "b-pld"]))
    )


def test_a_worker_hides_the_ids() -> None:
    tables = run({"keep_ids": False})
    jobs = {row["job_id"]: row["output_ids"] for row in tables["jobs"].to_pylist()}
    assert jobs["a-pld"] == [-1] * 8 + [EOS]
    assert jobs["b-pld"] == [-1] * 7
    assert tables["steps"].equals(run({})["steps"])

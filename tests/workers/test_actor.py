"""The worker: order, warm-up, cache policies, failures of single jobs, and what other threads see of it."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import threading
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from dfbench.drafters import registry
from dfbench.drafters.base import EMPTY, Draft, Drafter, Options, Verified
from dfbench.workers import parts
from dfbench.workers.actor import Worker
from dfbench.workers.failing import failure_kind
from dfbench.workers.parts import Part
from dfbench.workers.spec import ArmSpec, JobSpec, PromptSpec, ShardSpec, TargetSpec

AR, PLD = ArmSpec("ar", "ar"), ArmSpec("pld", "pld")
SCRIPTED = TargetSpec(kind="scripted", options={"period": 5})
CALLS: list[tuple[str, str]] = []


class Spy(Drafter):
    """Notes what is asked of it; raises on prompts that begin with 13, runs out of memory on those with 14."""

    name = "spy"
    summary = "For tests."

    def reset(self) -> None:
        CALLS.append(("reset", ""))

    def start(self, prompt: Sequence[int]) -> None:
        CALLS.append(("start", str(prompt[0])))
        assert not gc.isenabled()
        if prompt[0] == 13:
            raise KeyError("thirteen")
        if prompt[0] == 14:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    def propose(self, budget: int) -> Draft:
        return EMPTY

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        pass


@pytest.fixture(autouse=True)
def spying(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    monkeypatch.setitem(registry.BUILT_IN, "spy", f"{__name__}:Spy")
    found = registry.find
    monkeypatch.setattr(registry, "find", lambda name: Spy if name == "spy" else found(name))
    monkeypatch.setattr(registry, "parse_options", lambda name, given: found_options(name, given))


def found_options(name: str, given: dict[str, Any]) -> Any:
    return Options() if name == "spy" else registry.find(name).Options(**given)


def prompt(first: int, name: str = "p0") -> PromptSpec:
    return PromptSpec("w", name, "test", "text", (first, 4, 5, 6), "sha", recorded_ids=tuple(range(3, 40)))


def shard(arms: Sequence[ArmSpec], prompts: Sequence[PromptSpec], repeats: int = 1, **changes: Any) -> ShardSpec:
    jobs = tuple(
        JobSpec(f"{p.prompt_id}-{arm.name}-{repeat}", "w", p.prompt_id, arm.name, repeat)
        for repeat in range(repeats)
        for p in prompts
        for arm in arms
    )
    return ShardSpec("run", "s0", "w", tuple(prompts), tuple(arms), jobs, changes.pop("cap", 8), **changes)


def loaded(spec: TargetSpec = SCRIPTED) -> Worker:
    worker = Worker(spec, "node")
    worker.load()
    return worker


def run(worker: Worker, spec: ShardSpec) -> Part:
    given = list(worker.run(spec))
    tables: dict[str, pa.Table] = {}
    for part in given:
        for name, table in part.tables.items():
            tables[name] = pa.concat_tables([tables[name], table]) if name in tables else table
    outcomes = tuple(outcome for part in given for outcome in part.outcomes)
    return Part("s0", 1, outcomes, tables, given[-1].unusable)


def test_jobs_run_in_order_and_arms_agree() -> None:
    part = run(loaded(), shard([AR, PLD], [prompt(3), prompt(7, "p1")]))
    jobs = part.tables["jobs"].to_pylist()
    assert [job["job_id"] for job in jobs] == ["p0-ar-0", "p0-pld-0", "p1-ar-0", "p1-pld-0"]
    assert jobs[0]["output_ids"] == jobs[1]["output_ids"]
    assert all(job["target"] == "scripted" for job in jobs)
    assert [job["began_at"] for job in jobs] == sorted(job["began_at"] for job in jobs)


def test_warm_up_comes_once_a_workload_through_every_arm() -> None:
    worker, spec = loaded(), shard([AR, PLD], [prompt(3)], warmup=(prompt(9, "warm"),))
    first, second = run(worker, spec), run(worker, spec)
    assert [outcome.warmup for outcome in first.outcomes] == [True, True, False, False]
    assert [outcome.warmup for outcome in second.outcomes] == [False, False]
    jobs = first.tables["jobs"].to_pylist()
    assert [job["warmup"] for job in jobs] == [True, True, False, False]
    assert len({job["job_id"] for job in jobs}) == 4
    assert {job["prompt_id"] for job in jobs if job["warmup"]} == {"warm"}


def test_a_cold_arm_forgets_before_every_prompt_and_a_carried_one_does_not() -> None:
    prompts = [prompt(3), prompt(7, "p1")]
    run(loaded(), shard([ArmSpec("spy", "spy", {}, "cold")], prompts))
    assert [call for call, _ in CALLS] == ["reset", "start", "reset", "start"]
    CALLS.clear()
    run(loaded(), shard([ArmSpec("spy", "spy", {}, "carried")], prompts, repeats=2))
    # Forgotten only where the repeat begins.
    assert [call for call, _ in CALLS] == ["start", "start", "reset", "start", "start"]


def test_what_warm_up_taught_is_forgotten() -> None:
    run(loaded(), shard([ArmSpec("spy", "spy", {}, "carried")], [prompt(3)], warmup=(prompt(9, "warm"),)))
    assert CALLS == [("start", "9"), ("reset", ""), ("start", "3")]


def test_what_a_job_raises_is_its_own_outcome() -> None:
    spy = ArmSpec("spy", "spy")
    part = run(loaded(), shard([AR, spy], [prompt(13), prompt(7, "p1")]))
    assert [outcome.kind for outcome in part.outcomes] == ["", "error", "", ""]
    failed = part.outcomes[1]
    assert failed.message.startswith("KeyError: 'thirteen'")
    assert "in start" in failed.message
    assert part.tables["jobs"]["job_id"].to_pylist() == ["p0-ar-0", "p1-ar-0", "p1-spy-0"]
    assert not part.unusable


def test_an_arm_that_cannot_be_made_fails_its_jobs_only() -> None:
    part = run(loaded(), shard([AR, ArmSpec("x", "nothing")], [prompt(3)]))
    assert [outcome.kind for outcome in part.outcomes] == ["", "error"]


def test_a_device_out_of_memory_ends_the_shard() -> None:
    spy = ArmSpec("spy", "spy")
    part = run(loaded(), shard([AR, spy], [prompt(14), prompt(7, "p1")]))
    assert [outcome.kind for outcome in part.outcomes] == ["", "oom"]
    assert part.unusable


def test_a_carried_arm_goes_no_further_than_its_failure() -> None:
    carried = ArmSpec("spy", "spy", {}, "carried")
    part = run(loaded(), shard([AR, carried], [prompt(3), prompt(13, "p1"), prompt(7, "p2")]))
    assert [outcome.kind for outcome in part.outcomes] == ["", "", "", "error", "", "error"]
    assert "an earlier job of this carried arm failed (p1-spy-0)" in part.outcomes[5].message
    assert ("start", "7") not in CALLS


def test_quick_jobs_come_in_one_part_and_slow_ones_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = shard([AR, PLD], [prompt(3), prompt(7, "p1")])
    assert len(list(loaded().run(spec))) == 1
    monkeypatch.setattr(parts, "HAND_OVER_S", 0.0)
    assert [len(part.outcomes) for part in loaded().run(spec)] == [1, 1, 1, 1, 0]


def test_parts_survive_pickling() -> None:
    part = run(loaded(), shard([AR, PLD], [prompt(3)]))
    again = pickle.loads(pickle.dumps(part))
    assert again == part
    assert again.outcomes[0].arm == "ar"
    assert again.tables["jobs"].schema.metadata == part.tables["jobs"].schema.metadata


def test_others_see_a_job_move_and_can_stop_it() -> None:
    worker = loaded(TargetSpec(kind="scripted", options={"step_ms": 5}))
    spec = shard([AR], [prompt(3), prompt(7, "p1"), prompt(9, "p2")], cap=400)
    outcomes: list[Any] = []
    assert worker.pulse().job_id == ""
    thread = threading.Thread(target=lambda: outcomes.extend(run(worker, spec).outcomes))
    thread.start()
    wait_for(lambda: worker.pulse().job_id == "p0-ar-0" and worker.pulse().progress > 2)
    before = worker.pulse()
    wait_for(lambda: worker.pulse().progress > before.progress)
    worker.stop("p0-ar-0")
    wait_for(lambda: worker.pulse().job_id == "p1-ar-0")
    worker.stop("p1-ar-0", leave=True)  # and p2 does not even begin
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert [outcome.kind for outcome in outcomes] == ["cancelled", "cancelled"]


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_recorded_target_replays_its_stream() -> None:
    worker = loaded(TargetSpec(kind="recorded", options={"vocab_size": 64, "eos_ids": [1]}))
    part = run(worker, shard([AR, PLD], [prompt(3)], cap=10))
    jobs = part.tables["jobs"].to_pylist()
    assert [job["output_ids"] for job in jobs] == [list(range(3, 13))] * 2
    assert jobs[0]["decode_ns"] is None


def test_a_later_turn_is_rendered_from_the_references_answer() -> None:
    worker = loaded()
    first = dataclasses.replace(prompt(3), followups=("and then?",))

    def next_turn(turn: PromptSpec, answer: Sequence[int], enable_thinking: bool = False) -> PromptSpec:
        ids = (*turn.prompt_ids, *answer)
        return dataclasses.replace(turn, prompt_id="p0#2", prompt_ids=ids, followups=turn.followups[1:])

    worker._target.next_turn = next_turn  # type: ignore[union-attr]
    jobs = tuple(
        JobSpec(f"{arm}-{turn}", "w", "p0" if not turn else "p0#2", arm, turn=turn)
        for turn in range(2)
        for arm in ("pld", "ar")
    )
    part = run(worker, dataclasses.replace(shard([AR, PLD], [first]), jobs=jobs))
    assert [outcome.kind for outcome in part.outcomes] == ["", "", "", ""]
    rows = part.tables["jobs"].to_pylist()
    assert [row["prompt_tokens"] for row in rows] == [4, 4, 12, 12]
    assert rows[2]["output_ids"] == rows[3]["output_ids"]
    # Without the reference's answer there is nothing to render the next turn from.
    part = run(worker, dataclasses.replace(shard([AR, PLD], [first]), jobs=jobs[2:]))
    assert [outcome.kind for outcome in part.outcomes] == ["error", "error"]


def test_a_worker_says_what_it_is() -> None:
    ready = Worker(TargetSpec(kind="scripted", options={"eos_at": 7}), "node").load()
    assert ready.eos_ids == {2}
    assert ready.info["eos_ids"] == [2]
    assert {"pid", "node", "device", "python", "dfbench", "cpu_model"} <= ready.info.keys()


def test_garbage_collection_is_back_after_a_job() -> None:
    run(loaded(), shard([ArmSpec("spy", "spy")], [prompt(13), prompt(3, "p1")]))
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no"), "error"),
        (RuntimeError("CUDA out of memory."), "oom"),
        (type("OutOfMemoryError", (RuntimeError,), {})("x"), "oom"),
        (RuntimeError("CUDA error: device-side assert triggered"), "device"),
        (type("AcceleratorError", (RuntimeError,), {})("x"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "device"),
        (RuntimeError("CUDA driver error: an illegal memory access was encountered"), "device"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "device"),
        (MemoryError(), "oom"),
    ],
)
def test_failures_of_the_device_are_told_from_the_jobs_own(error: Exception, kind: str) -> None:
    assert failure_kind(error) == kind


def test_failures_of_the_device_as_torch_raises_them() -> None:
    torch = pytest.importorskip("torch")
    assert failure_kind(torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")) == "oom"
    assert failure_kind(torch.cuda.OutOfMemoryError("Tried to allocate 2.00 GiB.")) == "oom"
    assert failure_kind(torch.AcceleratorError("CUDA error: an illegal memory access was encountered")) == "device"
    assert failure_kind(torch.AcceleratorError("CUDA error: out of memory")) == "oom"
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**58)
    assert failure_kind(raised.value) == "oom"
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2) @ torch.ones(3)
    assert failure_kind(raised.value) == "error"

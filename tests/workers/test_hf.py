"""transformers' own generate beside ours, on a tiny model in float64."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from transformers import PreTrainedModel

from dfbench.drafters.base import DrafterContext
from dfbench.drafters.registry import create
from dfbench.workers import actor, calibrate, checks
from dfbench.workers.engine import TorchTarget
from dfbench.workers.hf import hf_decode, hf_run
from dfbench.workers.loop import decode
from dfbench.workers.records import WorkerFacts, job_record
from dfbench.workers.spec import ArmSpec, JobSpec, PromptSpec, ShardSpec, TargetSpec

TinyModel = Callable[..., PreTrainedModel]
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4)
CAP = 30


@pytest.fixture
def target(tiny_model: TinyModel, family: str) -> TorchTarget:
    return TorchTarget(tiny_model(family), TargetSpec(dtype="float64"))


@pytest.mark.parametrize("draft_len", [None, 10])
def test_generate_gives_our_tokens_and_no_steps(target: TorchTarget, draft_len: int | None) -> None:
    ours = decode(target, create("ar", {}), PROMPT, max_new_tokens=CAP)
    theirs = hf_decode(target, PROMPT, max_new_tokens=CAP, draft_len=draft_len)
    assert theirs.output == ours.output
    assert theirs.finish_reason == "length"
    assert theirs.wall_only and not theirs.steps and theirs.wall_ns > 0


def test_an_end_of_text_ends_it_and_can_be_ignored(target: TorchTarget) -> None:
    whole = decode(target, create("ar", {}), PROMPT, max_new_tokens=CAP).output
    eos = whole[7]
    expected = whole[: whole.index(eos) + 1]
    target.model.generation_config.eos_token_id = eos
    try:
        theirs = hf_decode(target, PROMPT, max_new_tokens=CAP, eos_ids={eos})
        assert (theirs.output, theirs.finish_reason) == (expected, "eos")
        assert hf_decode(target, PROMPT, max_new_tokens=CAP, eos_ids=()).output == whole
        assert target.model.generation_config.eos_token_id == eos
    finally:
        target.model.generation_config.eos_token_id = None


def test_our_prompt_lookup_with_its_settings_gives_its_tokens(target: TorchTarget) -> None:
    context = DrafterContext(vocab_size=target.vocab_size)
    ours = decode(target, create("pld", {"preset": "hf"}, context), PROMPT, max_new_tokens=CAP)
    theirs = hf_run(target, create("hf-pld", {}, context), PROMPT, max_new_tokens=CAP)  # type: ignore[arg-type]
    assert ours.output == theirs.output
    assert sum(step.drafted for step in ours.steps) > 0


def test_its_rows_pass_the_checks_and_only_its(target: TorchTarget) -> None:
    trace = hf_decode(target, PROMPT, max_new_tokens=CAP)
    prompt = PromptSpec("w", "p", "s", "", PROMPT, "sha")
    facts = WorkerFacts("w0", "cpu", "tiny", None, "float64", "cached", "stack")

    def found(drafter: str) -> dict[checks.JobKey, str]:
        arm = ArmSpec("arm", drafter)
        job = JobSpec("j", "w", "p", "arm")
        shard = ShardSpec("r", "s", "w", (prompt,), (arm,), (job,), CAP)
        record = job_record(shard, job, arm, prompt, target.spec, facts, trace, began_at=0)
        row = record.jobs.to_pylist()[0]
        assert (row["decode_ns"], row["prefill_ns"], row["start_ns"]) == (None, None, None)
        assert row["wall_ns"] == trace.wall_ns
        tables: list[pa.Table] = [record.jobs, record.steps, record.tokens]
        return checks.breaches(*tables)

    assert found("hf-pld") == {}
    assert "its steps end at position 1" in found("pld")["j", 1]


def test_a_worker_runs_the_arm_and_calibrates(target: TorchTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "load_target", lambda spec: target)
    monkeypatch.setitem(calibrate.READ_BYTES, "cpu", 1 << 16)
    worker = actor.Worker(target.spec, "here", "w0")
    worker.load()
    arms = (ArmSpec("ar", "ar"), ArmSpec("theirs", "hf-pld", {"draft_len": 4}), ArmSpec("ours", "pld"))
    jobs = tuple(JobSpec(arm.name, "w", "p", arm.name) for arm in arms)
    shard = ShardSpec("r", "s", "w", (PromptSpec("w", "p", "s", "", PROMPT, "sha"),), arms, jobs, CAP, calibrate=True)
    calibration, *parts = worker.run(shard)
    assert [outcome.message for part in parts for outcome in part.outcomes] == ["", "", ""]
    filled = [part.tables for part in parts if part.tables]
    tables = {name: pa.concat_tables([part[name] for part in filled]) for name in ("jobs", "steps", "tokens")}
    assert len({tuple(output) for output in tables["jobs"]["output_ids"].to_pylist()}) == 1
    assert set(tables["steps"]["arm"].to_pylist()) == set(tables["tokens"]["arm"].to_pylist()) == {"ar", "ours"}
    assert checks.breaches(tables["jobs"], tables["steps"], tables["tokens"]) == {}
    measured = calibration.tables["calibration"].to_pylist()
    assert {row["kind"] for row in measured} == {"read"}  # a context of 256 does not fit a model of 256 positions
    assert {row["run_id"] for row in measured} == {"r"}
    assert not any("calibration" in part.tables for part in worker.run(shard)), "once a worker"

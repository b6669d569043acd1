"""Rows of finished jobs, and the identities that they must satisfy."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfbench.errors import RecordError
from dfbench.workers.checks import breaches
from dfbench.workers.loop import Step, Trace
from dfbench.workers.records import (
    SCHEMAS,
    JobRecord,
    JobRows,
    WorkerFacts,
    check,
    job_record,
    job_row,
    outcome_row,
    tables,
)
from dfbench.workers.spec import ArmSpec, JobSpec, PromptSpec, ShardSpec, TargetSpec
from dfbench.workers.target import Evidence

EOS = frozenset({2})
FACTS = WorkerFacts("worker", "cpu", "model", None, "none", "scripted", "stack")
PROMPT = PromptSpec("w", "p", "test", "text", (3, 4, 5), "sha")


def shard(cap: int) -> ShardSpec:
    return ShardSpec("run", "shard", "w", (PROMPT,), (), (), cap)


def make(emitted: list[int], *, cap: int | None = None, last: str = "length", name: str = "job") -> JobRecord:
    """A sound record: one step a number, which emits that many tokens; `last` is how it ended."""
    return job_record(
        shard(cap or 1 + sum(emitted)),
        JobSpec(name, "w", "p", "pld"),
        ArmSpec("pld", "pld"),
        PROMPT,
        TargetSpec(kind="scripted"),
        FACTS,
        trace(emitted, last),
        began_at=1,
    )


def trace(emitted: list[int], last: str = "length") -> Trace:
    made = Trace(output=[5] * (1 + sum(emitted)), finish_reason=last, start_ns=1, prefill_ns=2)
    if last == "eos":
        made.output[-1] = 2
    position = 1
    for count in emitted:
        made.steps.append(Step(position, count + 1, 0, count, count, count - 1, count, 10, 1, 5, 2, 1))
        position += count
    made.decode_ns = 10 * len(emitted)
    n = len(made.output)
    ids, logits = np.array(made.output), np.full(n, 8.0)
    made.evidence = Evidence(ids, logits, ids + 1, logits - 1, np.ones(n, dtype=np.int64))
    return made


def spoil(record: JobRecord, table: str, column: str, row: int, value: object) -> JobRecord:
    made = getattr(record, table)
    entry = made.schema.field(column)
    values = made[column].to_pylist()
    values[row] = value
    changed = made.set_column(made.schema.get_field_index(column), entry, pa.array(values, entry.type))
    return JobRecord(
        **{name: changed if name == table else getattr(record, name) for name in ("jobs", "steps", "tokens")}
    )


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(1, 6), max_size=12), st.sampled_from(["length", "eos"]))
def test_sound_rows_pass(emitted: list[int], last: str) -> None:
    check(make(emitted, last=last, cap=1 + sum(emitted) + (5 if last == "eos" else 0)), EOS)


@pytest.mark.parametrize(
    ("table", "column", "row", "value", "says"),
    [
        ("steps", "position", 1, 9, "step 1 begins at 9, not 3"),
        ("steps", "step", 2, 5, "step 2 is numbered 5"),
        ("steps", "accepted", 0, 9, "step 0 accepted 9 of 2 at depth 2"),
        ("steps", "depth", 0, 3, "step 0 accepted 1 of 2 at depth 3"),
        ("steps", "drafted", 1, 0, "step 1 accepted 2 of 0 at depth 3"),
        ("steps", "queries", 1, 1, "step 1 has 1 queries"),
        ("steps", "padding", 1, -1, "step 1 has 4 queries"),
        ("steps", "emitted", 0, 1, "step 0 accepted 1 but emitted 1"),
        ("steps", "emitted", 2, 3, "its steps end at position 9, its output at 7"),
        ("steps", "step_ns", 1, 8, "step 1 is shorter than its phases"),
        ("steps", "commit_ns", 1, -1, "step 1 has a phase of negative length"),
        ("steps", "step_ns", 1, 80, "its steps take 100 ns, its decode 30 ns"),
        ("jobs", "finish_reason", 0, "eos", "finish reason 'eos', not 'length'"),
        ("jobs", "max_new_tokens", 0, 6, "7 output tokens at a cap of 6"),
        ("jobs", "max_new_tokens", 0, 9, "it stopped at 7 of 9 tokens"),
        ("jobs", "output_ids", 0, [], "0 output tokens at a cap of 7"),
        ("jobs", "output_ids", 0, [5, 2, 5, 5, 5, 5, 5], "an end of text inside the output"),
        ("jobs", "drafter", 0, "ar", "step 0 of a plain run has a draft of 2"),
        ("tokens", "token_id", 3, 9, "token 3 is out of place"),
        ("tokens", "position", 3, 4, "token 3 is out of place"),
        ("tokens", "top1_id", 3, 9, "token 3 is not the argmax of its own pass"),
        ("tokens", "top2_logit", 3, 9.0, "token 3 has its top two swapped"),
        ("tokens", "top_ties", 3, 0, "token 3 has its top two swapped"),
        ("tokens", "step", 0, 0, "token 0 names step 0, not -1"),
        ("tokens", "step", 3, 0, "token 3 names step 0, not 1"),
    ],
)
def test_broken_rows_are_named(table: str, column: str, row: int, value: object, says: str) -> None:
    record = spoil(make([2, 3, 1]), table, column, row, value)
    if column == "emitted" and row == 2:
        record = spoil(record, "steps", "accepted", 2, 2)
        record = spoil(record, "steps", "depth", 2, 2)
        record = spoil(record, "steps", "drafted", 2, 2)
        record = spoil(record, "steps", "queries", 2, 3)
    with pytest.raises(RecordError) as caught:
        check(record, EOS)
    assert says in str(caught.value)
    assert str(caught.value).startswith("job job: ")


def test_missing_and_foreign_rows_are_named() -> None:
    record = make([2, 3])
    with pytest.raises(RecordError, match="its steps end at position 3, its output at 6"):
        check(JobRecord(record.jobs, record.steps.slice(0, 1), SCHEMAS["tokens"].empty_table()), EOS)
    with pytest.raises(RecordError, match="5 token rows for 6 tokens"):
        check(JobRecord(record.jobs, record.steps, record.tokens.slice(0, 5)), EOS)
    other = make([1], name="other")
    found = breaches(record.jobs, pa.concat_tables([record.steps, other.steps]), record.tokens, EOS)
    assert found == {("other", 1): "job other: step rows without a job row."}
    twice = breaches(pa.concat_tables([record.jobs] * 2), record.steps, record.tokens, EOS)
    assert twice == {("job", 1): "job job: two job rows."}


def test_rows_of_a_job_that_do_not_lie_together_are_named() -> None:
    one, two = make([2, 3]), make([1], name="two")
    steps = pa.concat_tables([one.steps.slice(0, 1), two.steps, one.steps.slice(1)])
    found = breaches(pa.concat_tables([one.jobs, two.jobs]), steps, SCHEMAS["tokens"].empty_table(), EOS)
    assert "do not lie together" in found["job", 1]


def test_only_the_last_step_may_end_on_an_accepted_draft() -> None:
    made = trace([3, 2])
    made.steps[1] = made.steps[1]._replace(accepted=2)
    row = job_row(
        shard(6), JobSpec("job", "w", "p", "pld"), ArmSpec("pld", "pld"), PROMPT, TargetSpec(), FACTS, began_at=1
    )
    check(JobRecord(**tables([JobRows(row | outcome_row(made), made)])), EOS)
    made.steps[0] = made.steps[0]._replace(accepted=3)
    with pytest.raises(RecordError, match="step 0 accepted 3 but emitted 3"):
        check(JobRecord(**tables([JobRows(row | outcome_row(made), made)])), EOS)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(1, 4), max_size=5), min_size=1, max_size=6))
def test_many_jobs_are_made_and_checked_as_one_by_one(jobs: list[list[int]]) -> None:
    records = [make(emitted, name=f"job{i}") for i, emitted in enumerate(jobs)]
    joined = {n: pa.concat_tables([getattr(r, n) for r in records]) for n in ("jobs", "steps", "tokens")}
    assert breaches(joined["jobs"], joined["steps"], joined["tokens"], EOS) == {}
    rows = []
    for i, emitted in enumerate(jobs):
        job = JobSpec(f"job{i}", "w", "p", "pld")
        row = job_row(
            shard(1 + sum(emitted)), job, ArmSpec("pld", "pld"), PROMPT, TargetSpec(kind="scripted"), FACTS, began_at=1
        )
        made = trace(emitted)
        rows.append(JobRows(row | outcome_row(made), made))
    for name, table in tables(rows).items():
        assert table.schema == SCHEMAS[name]
        assert table.to_pylist() == joined[name].to_pylist()


def test_times_of_an_untimed_target_are_null() -> None:
    made = trace([1, 2])
    job, arm = JobSpec("job", "w", "p", "pld"), ArmSpec("pld", "pld")
    record = job_record(shard(4), job, arm, PROMPT, TargetSpec(kind="recorded"), FACTS, made, began_at=1, timed=False)
    check(record, EOS)
    for name in ("step_ns", "draft_ns", "forward_ns", "accept_ns", "commit_ns"):
        assert record.steps[name].null_count == 2
    assert record.jobs["decode_ns"].to_pylist() == [None]


def test_a_job_that_ends_at_prefill_has_no_step() -> None:
    record = make([], cap=1)
    check(record, EOS)
    assert record.steps.num_rows == 0
    assert record.tokens["step"].to_pylist() == [None]

"""Plans: what names a job and what does not, the order of shards, what is refused before anything runs."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfbench.cluster import plan as planning
from dfbench.cluster import runspec
from dfbench.cluster.plan import Plan
from dfbench.cluster.sweep import Sweep, validate
from dfbench.errors import ModelError, OptionError, SweepError, UsageError, WorkloadError
from dfbench.workers.spec import JobSpec

Make = Callable[..., Path]


def scripted(**more: Any) -> dict[str, Any]:
    base = {"name": "s", "target": "scripted", "workloads": [{"name": "w", "prompts": 4}], "arms": ["ar", "pld"]}
    return {**base, **more}


def plan(data: dict[str, Any]) -> Plan:
    return planning.plan(validate(data))


def jobs(made: Plan) -> list[JobSpec]:
    return [job for shard in made.shards() for job in shard.jobs]


def ids(made: Plan) -> set[str]:
    return {job.job_id for job in jobs(made)}


# --- identity ------------------------------------------------------------------------------------------------------


def test_counts_agree_with_the_shards() -> None:
    made = plan(scripted(repeats=3))
    assert made.shard_count == len(list(made.shards())) == 4
    assert made.job_count == len(jobs(made)) == len(ids(made)) == 4 * 2 * 3


@given(st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=20)
def test_another_prompt_renames_nothing(few: int, more: int) -> None:
    small = plan(scripted(workloads=[{"name": "w", "prompts": few}]))
    large = plan(scripted(workloads=[{"name": "w", "prompts": few + more}]))
    assert ids(small) < ids(large)
    assert [s.shard_id for s in small.shards()] == [s.shard_id for s in islice(large.shards(), few)]


UNNAMED = [
    {"workers": 7},
    {"workers_per_node": 2},
    {"device_filter": "RTX"},
    {"max_attempts": 9},
    {"job_deadline_s": 1.0},
    {"progress_deadline_s": 1.0},
    {"warmup": 3},
    {"calibrate": False},
    {"name": "other"},
    {"notes": ["a remark"]},
    {"arms": ["pld", "ar"]},
    {"workloads": [{"name": "v"}, {"name": "w", "prompts": 4}]},
    {"model": {"device": "cpu"}},
]


@pytest.mark.parametrize("change", UNNAMED, ids=lambda change: next(iter(change)))
def test_what_does_not_decide_an_output_is_not_in_the_name(change: dict[str, Any]) -> None:
    assert ids(plan(scripted())) <= ids(plan(scripted(**change)))


NAMED = [
    {"engine": "recompute"},
    {"kv_repair": "refeed"},
    {"attention": "eager"},
    {"logits_dtype": "float32"},
    {"max_queries": 64},
    {"buckets": [1, 8]},
    {"max_new_tokens": 255},
    {"ignore_eos": True},
    {"enable_thinking": True},
    {"model": {"id": "another"}},
    {"model": {"revision": "abc"}},
    {"model": {"dtype": "float32"}},
    {"model": {"trust_remote_code": True}},
    {"scripted": {"seed": 1}},
    {"scripted": {"period": 18}},
    {"scripted": {"vocab": 65}},
    {"scripted": {"eos_at": 40}},
    {"scripted": {"step_ms": 1.0}},
    {"scripted": {"prompt_tokens": 17}},
    {"workloads": [{"name": "v", "prompts": 4}]},
    {"arms": [{"name": "a", "drafter": "ar"}, {"name": "b", "drafter": "pld"}]},
]


@pytest.mark.parametrize("change", NAMED, ids=json.dumps)
def test_what_decides_an_output_is_in_the_name(change: dict[str, Any]) -> None:
    assert ids(plan(scripted())).isdisjoint(ids(plan(scripted(**change))))


def test_every_setting_is_named_or_known_not_to_matter() -> None:
    tested = {key for change in (*NAMED, *UNNAMED) for key in change}
    assert set(Sweep.model_fields) - tested <= {"target", "recorded", "repeats"}


ARM_OPTIONS = [
    ("pld", {"max_ngram": 5}),
    ("pld", {"min_ngram": 2}),
    ("pld", {"draft_len": 11}),
    ("pld", {"match": "earliest"}),
    ("pld", {"full": True}),
    ("cacheback", {"leader": 2}),
    ("cacheback", {"follower": 4}),
    ("cacheback", {"draft": "tree"}),
    ("cacheback", {"leaders": 7}),
    ("cacheback", {"followers": 7}),
    ("cacheback", {"queries": 7}),
    ("cacheback", {"reserve": 7}),
    ("cacheback", {"merge": True}),
    ("cacheback", {"cache": "carried"}),
]


@pytest.mark.parametrize(("drafter", "options"), ARM_OPTIONS, ids=str)
def test_every_option_of_an_arm_is_in_its_jobs_names_and_in_no_others(drafter: str, options: dict[str, Any]) -> None:
    before, after = (plan(scripted(arms=["ar", {"drafter": drafter, **extra}])) for extra in ({}, options))
    named = {arm: {job.job_id for job in jobs(made) if job.arm == arm} for made in (before,) for arm in ("ar", drafter)}
    assert named["ar"] <= ids(after)
    assert named[drafter].isdisjoint(ids(after))


def test_another_version_of_a_drafter_makes_other_jobs() -> None:
    sweep = validate(scripted())
    arm = sweep.arms[1]
    newer = arm.model_copy(update={"source": "dfbench 9.9"})
    assert planning.arm_key(sweep, arm, frozenset()) != planning.arm_key(sweep, newer, frozenset())


@given(st.permutations(list(scripted(max_new_tokens=9, model={"dtype": "float32", "id": "m"}).items())))
@settings(max_examples=20)
def test_the_order_of_keys_means_nothing(items: list[tuple[str, Any]]) -> None:
    reference = plan(scripted(max_new_tokens=9, model={"id": "m", "dtype": "float32"}))
    assert plan(dict(items)).sha == reference.sha and ids(plan(dict(items))) == ids(reference)


def test_the_sha_tells_sweeps_apart_and_survives_its_own_yaml() -> None:
    made = plan(scripted())
    assert plan(made.sweep.to_dict()).sha == made.sha
    for change in ({"repeats": 2}, {"warmup": 2}, {"workloads": [{"name": "w", "prompts": 5}]}, {"max_new_tokens": 9}):
        assert plan(scripted(**change)).sha != made.sha
    assert plan(scripted(workers=5, max_attempts=9)).sha == made.sha


# --- order ---------------------------------------------------------------------------------------------------------


def test_arms_rotate_from_prompt_to_prompt_and_the_place_is_recorded() -> None:
    made = plan(scripted(arms=["ar", "pld", "cacheback"]))
    orders = [[job.arm for job in shard.jobs] for shard in made.shards()]
    assert orders[:4] == [
        ["ar", "pld", "cacheback"],
        ["pld", "cacheback", "ar"],
        ["cacheback", "ar", "pld"],
        ["ar", "pld", "cacheback"],
    ]
    assert all([job.arm_order for job in shard.jobs] == [0, 1, 2] for shard in made.shards())


def test_a_shard_holds_all_arms_and_repeats_of_one_prompt() -> None:
    for shard in plan(scripted(repeats=2)).shards():
        assert len(shard.prompt_ids) == 1
        assert {(job.arm, job.repeat) for job in shard.jobs} == {(a, r) for a in ("ar", "pld") for r in (0, 1)}


def carried(**more: Any) -> dict[str, Any]:
    return scripted(arms=["ar", {"name": "cb", "drafter": "cacheback", "cache": "carried"}], **more)


def test_a_carried_arm_makes_one_ordered_shard_a_workload() -> None:
    made = plan(carried(repeats=2, workloads=[{"name": "w", "prompts": 3}, {"name": "v", "prompts": 2}]))
    first, second = made.shards()
    assert made.shard_count == 2 and first.prompt_ids == ("p0", "p1", "p2") and second.workload == "v"
    order = [(job.repeat, job.prompt_id) for job in first.jobs]
    assert order == sorted(order) and len(first.jobs) == 3 * 2 * 2


def test_a_carried_job_is_named_by_its_predecessors() -> None:
    def named(made: Plan) -> dict[tuple[str, str], str]:
        return {(job.arm, job.prompt_id): job.job_id for job in jobs(made)}

    longer, made = named(plan(carried(workloads=[{"name": "w", "prompts": 5}]))), named(plan(carried()))
    assert all(longer[key] == made[key] for key in made)
    assert planning.job_id("a", _prompt("p"), history="x") != planning.job_id("a", _prompt("p"), history="y")
    first, second = planning._histories([_prompt("a"), _prompt("b"), _prompt("c")])[1:]
    assert second != planning._histories([_prompt("b"), _prompt("a"), _prompt("c")])[2] and first != second


def _prompt(name: str) -> planning.PromptSpec:
    return planning.PromptSpec("w", name, "", "", (1,), "sha")


# --- rendering -----------------------------------------------------------------------------------------------------


def torch_sweep(model: Path, rows: list[dict[str, Any]], tmp_path: Path, **more: Any) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {"name": "t", "model": str(model), "workloads": [{"name": "w", "file": str(path)}], "warmup": 0}
    return {**base, "arms": ["ar", "pld"], "max_new_tokens": 8, **more}


def test_prompts_are_rendered_by_the_models_own_template(tiny_model: Make, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "w5 w6"}], "id": "m"}, {"prompt": "w7 w8", "id": "p"}]
    made = plan(torch_sweep(tiny_model(), rows, tmp_path))
    chat, plain = made.prompts()
    assert chat.prompt_ids == (2, 5, 6, 3) and chat.text == "w5 w6" and chat.messages
    assert plain.prompt_ids == (7, 8) and plain.text == "w7 w8" and not plain.messages
    assert made.eos_ids == {1}
    assert made.sweep.model.digest and made.run_spec("r").target.model == made.sweep.model.id


def test_a_switch_that_changes_no_prompt_is_in_the_name_all_the_same(tiny_model: Make, tmp_path: Path) -> None:
    rows = [{"prompt": "w7 w8"}]
    model = tiny_model()
    plain, thinking = (plan(torch_sweep(model, rows, tmp_path, enable_thinking=on)) for on in (False, True))
    assert [p.prompt_sha for p in plain.prompts()] == [p.prompt_sha for p in thinking.prompts()]
    assert ids(plain).isdisjoint(ids(thinking))


def test_local_weights_are_known_by_content_not_by_place(tiny_model: Make, tmp_path: Path) -> None:
    rows = [{"prompt": "w7"}]
    here, moved, other = tiny_model("here"), tiny_model("moved"), tiny_model("other", seed=1)
    named = [ids(plan(torch_sweep(model, rows, tmp_path))) for model in (here, moved, other)]
    assert named[0] == named[1] and named[0].isdisjoint(named[2])
    claimed = {**torch_sweep(here, rows, tmp_path), "model": {"id": str(here), "digest": "0" * 64}}
    with pytest.raises(ModelError, match=r"leave `model\.digest` out"):
        plan(claimed)


def test_a_prompt_that_leaves_the_context_is_refused(tiny_model: Make, tmp_path: Path) -> None:
    model = tiny_model(context=20)
    rows = [{"prompt": "w7 " * 12, "id": "twelve"}]
    assert plan(torch_sweep(model, rows, tmp_path)).job_count == 2
    with pytest.raises(
        WorkloadError, match=r"'twelve': 12 prompt tokens and up to 9 .* context of 20: write max_new_tokens: 8"
    ):
        plan(torch_sweep(model, rows, tmp_path, max_new_tokens=9))
    with pytest.raises(WorkloadError, match="shorten the prompt"):
        plan(torch_sweep(model, [{"prompt": "w7 " * 30}], tmp_path))
    shorter = torch_sweep(model, rows, tmp_path, engine="compiled")
    shorter["model"] = {"id": str(model), "options": {"context": 15}}
    with pytest.raises(WorkloadError, match=r"context of 15: .*, or raise the model's option `context`"):
        plan(shorter)
    talk = [{"turns": ["w7 " * 5, "w8 " * 5]}]
    with pytest.raises(WorkloadError, match="a later turn's and up to 16 new ones"):
        plan(torch_sweep(model, talk, tmp_path))


def test_later_turns_are_jobs_of_their_own_and_need_ar(tiny_model: Make, tmp_path: Path) -> None:
    sweep = torch_sweep(tiny_model(), [{"turns": ["w7", "w8", "w9"], "id": "t"}, {"prompt": "w5", "id": "s"}], tmp_path)
    made = plan(sweep)
    assert made.job_count == len(jobs(made)) == len(ids(made)) == 2 * (3 + 1)
    shard = next(made.shards())
    assert [(job.prompt_id, job.turn, job.arm) for job in shard.jobs] == [
        ("t", 0, "ar"),
        ("t", 0, "pld"),
        ("t#2", 1, "pld"),
        ("t#2", 1, "ar"),
        ("t#3", 2, "ar"),
        ("t#3", 2, "pld"),
    ]
    assert [runspec.base_prompt(job) for job in shard.jobs] == ["t"] * 6
    with pytest.raises(SweepError, match="add the arm `ar`"):
        plan({**sweep, "arms": ["pld"]})


def test_a_model_without_a_template_refuses_messages_but_takes_plain_prompts(tiny_model: Make, tmp_path: Path) -> None:
    model = tiny_model(template=None)
    assert plan(torch_sweep(model, [{"prompt": "w5"}], tmp_path)).job_count == 2
    with pytest.raises(ModelError, match=r"prompt 'x': the model has no chat template"):
        plan(torch_sweep(model, [{"turns": ["w5"], "id": "x"}], tmp_path))


def test_token_ids_beyond_the_vocabulary_are_refused(tiny_model: Make, tmp_path: Path) -> None:
    model = tiny_model()
    assert next(plan(torch_sweep(model, [{"prompt_ids": [299]}], tmp_path)).prompts()).prompt_ids == (299,)
    with pytest.raises(WorkloadError, match="beyond the model's vocabulary of 300"):
        plan(torch_sweep(model, [{"prompt_ids": [300]}], tmp_path))


def test_warm_up_prompts_are_the_last_rows_and_never_planned(tiny_model: Make, tmp_path: Path) -> None:
    rows = [{"prompt": f"w{i}", "id": f"r{i}"} for i in range(5, 10)]
    made = plan(torch_sweep(tiny_model(), rows, tmp_path, warmup=2))
    assert [p.prompt_id for p in made.prompts()] == ["r5", "r6", "r7"]
    assert [p.prompt_id for p in made.warmups()] == ["r8", "r9"]


def test_all_that_cannot_be_had_is_named_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from dfbench.cluster import render, sweep_file, workloads

    def no_model(_: object) -> None:
        raise ModelError("the model 'M' could not be had: point to a local folder with `--model PATH`.")

    def no_data(_: object) -> None:
        raise OSError("offline")

    monkeypatch.setattr(render, "open_renderer", no_model)
    monkeypatch.setattr(workloads, "_download", no_data)
    with pytest.raises(UsageError) as caught:
        planning.plan(sweep_file.load("qwen3-8b"))
    for part in (
        "model 'M'",
        "openai/openai_humaneval@7dce6050",
        "abisee/cnn_dailymail@96df5e68",
        "--workload copyctx=",
    ):
        assert part in str(caught.value)


# --- recorded targets, files that arms name --------------------------------------------------------------------------


def test_recorded_streams(tmp_path: Path) -> None:
    rows = [
        {"workload": "w", "prompt_id": 0, "prompt_ids": [5, 6], "output_ids": [7, 8, 9]},
        {"workload": "v", "prompt_id": 0, "prompt_ids": [5], "output_ids": [7] * 50},
    ]
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{"name": name, "file": str(path)} for name in ("w", "v")]
    data = {"name": "r", "target": "recorded", "workloads": sources, "arms": ["ar"], "warmup": 0, "max_new_tokens": 40}
    made = plan(data)
    assert [p.recorded_ids and len(p.recorded_ids) for p in made.prompts()] == [3, 50]
    assert [shard.max_new_tokens for shard in made.shards()] == [3, 40]
    path.write_text(json.dumps({**rows[0], "output_ids": [7, 8, 10]}) + "\n")
    assert ids(made).isdisjoint(ids(plan({**data, "workloads": sources[:1]})))
    path.write_text('{"prompt_ids": [1]}\n')
    with pytest.raises(WorkloadError, match="`prompt_ids` and `output_ids`"):
        plan({**data, "workloads": sources[:1]})


def test_a_frozen_table_is_known_by_content_and_must_suit_the_tokenizer(tiny_model: Make, tmp_path: Path) -> None:
    from dfbench.drafters import frozen
    from dfbench.workers import models
    from dfbench.workers.spec import TargetSpec

    model = tiny_model()
    tokenizer = models.load_tokenizer(models.resolve(TargetSpec(model=str(model))))
    places = [tmp_path / "a.table", tmp_path / "b.table", tmp_path / "foreign.table"]
    for path, name in zip(places, (models.tokenizer_hash(tokenizer),) * 2 + ("0" * 64,), strict=True):
        texts = ["w5 w6 w7 w8"] * 2
        frozen.build(texts, lambda text: tokenizer(text)["input_ids"], tokenizer_hash=name, corpus="c").save(path)

    def with_table(path: Path) -> dict[str, Any]:
        arm = {"drafter": "cacheback", "draft": "tree", "leader": 1, "follower": 3, "frozen": str(path)}
        return torch_sweep(model, [{"prompt": "w5"}], tmp_path, arms=["ar", arm])

    assert ids(plan(with_table(places[0]))) == ids(plan(with_table(places[1])))
    with pytest.raises(OptionError, match="built with another tokenizer"):
        plan(with_table(places[2]))
    with pytest.raises(OptionError, match="cannot be read"):
        plan(with_table(tmp_path / "none.table"))


# --- size ----------------------------------------------------------------------------------------------------------


def test_shards_of_a_large_plan_are_made_one_by_one() -> None:
    made = plan(scripted(workloads=[{"name": "w", "prompts": 500_000}]))
    assert (made.shard_count, made.job_count) == (500_000, 1_000_000)
    tracemalloc.start()
    count = sum(len(shard.jobs) for shard in islice(made.shards(), 2_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 4_000 and peak < 2_000_000


def test_prompts_and_shards_go_into_a_run_and_come_back(tmp_path: Path) -> None:
    from dfbench.cluster import runs
    from dfbench.cluster.ledger import Ledger

    made = plan(scripted(repeats=2))
    runs.create(tmp_path / "r", made)
    with Ledger.open(tmp_path / "r") as ledger:
        assert ledger.counts().total == made.job_count and ledger.run.sweep_sha == made.sha
        reader = runspec.ShardReader(tmp_path / "r", ledger.run)
        for row, shard in zip(ledger.pending(10), made.shards(), strict=True):
            assert reader.shard(row).jobs == shard.jobs
            assert [dataclasses.astuple(p)[:6] for p in reader.shard(row).prompts] == [
                dataclasses.astuple(p)[:6] for p in made.prompts() if p.prompt_id in shard.prompt_ids
            ]
            assert [p.prompt_id for p in reader.shard(row).warmup] == ["w0"]

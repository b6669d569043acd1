"""Sweep files: what loads, what is refused and in which words, and that the effective sweep loads to itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dfbench.cluster import sweep_file
from dfbench.cluster.sweep import Sweep, canonical, validate
from dfbench.errors import OptionError, SweepError, UsageError


def minimal(**more: Any) -> dict[str, Any]:
    return {"name": "s", "target": "scripted", "workloads": ["w"], "arms": ["ar"], **more}


@pytest.mark.parametrize("name", sorted(sweep_file.built_in()))
def test_a_built_in_sweep_is_valid_and_its_effective_form_loads_to_itself(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cacheback.table").write_bytes(b"what `corpus build` wrote")
    sweep = sweep_file.load(name)
    assert validate(yaml.safe_load(sweep.to_yaml())) == sweep
    assert list(dict.fromkeys(arm.drafter for arm in sweep.arms)) == ["ar", "pld", "cacheback"]


def test_the_sweep_of_cachebacks_parts_wants_its_frozen_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"cacheback\.table cannot be read: .*; build that file, or write where"):
        sweep_file.load("cacheback")
    (tmp_path / "mine").write_bytes(b"a table")
    sweep = sweep_file.load("cacheback", ["arms.cacheback-full.frozen=mine"])
    options = {arm.name: arm.options for arm in sweep.arms if arm.drafter == "cacheback"}
    assert [(name, o["draft"], o["frozen"]) for name, o in options.items()] == [
        ("cacheback", "chain", None),
        ("cacheback-tree", "tree", None),
        ("cacheback-full", "tree", "mine"),
    ]


def test_the_effective_sweep_names_every_default() -> None:
    written = validate(minimal(arms=["ar", "pld"])).to_dict()
    assert set(written) == set(Sweep.model_fields)
    assert written["arms"][1]["max_ngram"] >= written["arms"][1]["min_ngram"] >= 1
    assert written["arms"][1]["source"].startswith("dfbench ")


def test_qwen_sweep_lists_its_assumptions_and_pins_what_comes_from_a_hub() -> None:
    sweep = sweep_file.load("qwen3-8b")
    assert len(sweep.model.revision or "") == 40
    assert all(len(w.dataset.revision) == 40 for w in sweep.workloads if w.dataset)
    assumed = " ".join(sweep.notes)
    for word in ("drafts of 10", "thinking", "ignore_eos", "wording", "chat set"):
        assert word in assumed
    pld = sweep.arms[1]
    assert (pld.options["max_ngram"], pld.options["match"]) == (1, "recent")


REFUSED = [
    (minimal(prompts=3), r"unknown key 'prompts': write it under `workloads`"),
    (minimal(max_new_token=3), r"unknown key 'max_new_token': did you mean 'max_new_tokens'\?"),
    (minimal(dtype="float32"), r"unknown key 'dtype': write it under `model`"),
    (minimal(model={"logits_dtype": "float32"}), r"'logits_dtype' in `model`: write it at the top level of the sweep"),
    (minimal(model={"prompts": 3}), r"unknown key 'prompts' in `model`: write it under `workloads`"),
    (minimal(model={"threads": 2}), r"unknown key 'threads' in `model`: write it under `model.options`"),
    (minimal(workloads=[{"name": "w", "max_new_tokens": 3}]), r"in `workloads\[0\]`: write it at the top level"),
    (minimal(arms=[{"drafter": "pld", "repeats": 3}]), r"arm 'pld': 'repeats' is the same for all arms: write it at"),
    (minimal(model={"device": "gpu"}), r"`model.device` must be auto, cpu, cuda, or .+ cuda:0, not 'gpu'"),
    (minimal(model={"dtyp": "float32"}), r"unknown key 'dtyp': did you mean 'dtype' in `model`\?"),
    (
        minimal(workloads=[{"name": "w", "promts": 3}]),
        r"unknown key 'promts': did you mean 'prompts' in `workloads\[0\]`\?",
    ),
    (minimal(workloads=[{"name": "w", "prompts": 0}]), r"`workloads\[0\].prompts` must be at least 1, not 0"),
    (minimal(workloads=[{"name": "w", "prompts": "three"}]), r"`workloads\[0\].prompts` must be a whole number"),
    (minimal(workloads=[{"name": "w", "prompts": True}]), r"must be a whole number, not True"),
    (minimal(workloads=[]), r"`workloads` is empty"),
    (minimal(workloads="code"), r"`workloads` must be a list"),
    (minimal(workloads=["w", "w"]), r"two workloads are called 'w'"),
    (minimal(workloads=[{"name": "../up"}]), r"`workloads\[0\].name` must be a name of letters"),
    (minimal(name="a/b"), r"`name` must be a name of letters"),
    (minimal(name=""), r"`name` must be a name of letters"),
    (minimal(arms=[]), r"`arms` is empty"),
    (minimal(arms=["ar", "ar"]), r"two arms are called 'ar'"),
    (minimal(arms=["ar", 3]), r"must be a drafter's name or a mapping"),
    (minimal(arms=[{"max_ngram": 3}]), r"must name a `drafter`"),
    (minimal(arms=["pldd"]), r"unknown drafter 'pldd': did you mean 'pld'\?"),
    (minimal(arms=[{"name": "pld", "max_gram": 3}]), r"unknown option 'max_gram': did you mean 'max_ngram'\?"),
    (minimal(arms=[{"name": "pld", "preset": "recnt"}]), r"unknown preset 'recnt': did you mean 'recent'\?"),
    (minimal(arms=[{"name": "pld", "max_ngram": 0}]), r"option 'max_ngram'"),
    (minimal(arms=[{"name": "pld", "cache": "warm"}]), r"`arms\[0\].cache` must be one of 'cold', 'carried'"),
    (minimal(arms=[{"name": "pld", "source": "other 1.0"}]), r"says source 'other 1.0'"),
    (minimal(engine="cachd"), r"`engine` must be one of .*'cached'.*, not 'cachd'"),
    (minimal(model={"dtype": "bf16"}), r"`model.dtype` must be one of 'bfloat16'"),
    (minimal(model=7), r"`model` must be a mapping"),
    (minimal(max_new_tokens=0), r"`max_new_tokens` must be at least 1"),
    (minimal(max_new_tokens=1.5), r"`max_new_tokens` must be a whole number"),
    (minimal(ignore_eos="no"), r"`ignore_eos` must be true or false"),
    (minimal(warmup=-1), r"`warmup` must be at least 0"),
    (minimal(workloads=[{"name": "w", "file": "x.jsonl"}]), r"makes up its own prompts"),
    (minimal(target="recorded"), r"needs the `file`"),
    (
        minimal(target="torch", workloads=[{"name": "w", "file": "x", "dataset": {"id": "a/b", "revision": "1"}}]),
        "both",
    ),
    (minimal(workloads=[{"name": "w", "template": "no place"}]), r"must hold \{text\}"),
    ({"name": "s", "arms": ["ar"]}, r"`workloads` is missing"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_what_is_wrong_is_said_in_one_sentence(data: dict[str, Any], message: str) -> None:
    with pytest.raises((SweepError, OptionError), match=message) as caught:
        validate(data, "my.yaml")
    text = str(caught.value)
    assert "\n" not in text and text.endswith((".", "?"))


FILES = [
    ("", "is empty"),
    ("# nothing but a comment\n", "is empty"),
    ("- a\n- b\n", "must be a mapping .* not a list"),
    ("just text", "not a single value"),
    ("name: [unclosed", "is not YAML at line"),
    ("name: a\nname: b\n", "'name' is there twice"),
    ("name: !!python/object/apply:os.system ['true']\n", "is not YAML"),
]


@pytest.mark.parametrize(("text", "message"), FILES)
def test_files_that_are_no_sweep(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(SweepError, match=message):
        sweep_file.load(str(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x9f")
    with pytest.raises(SweepError, match="cannot be read as UTF-8"):
        sweep_file.load(str(binary))
    with pytest.raises(SweepError, match="is a folder"):
        sweep_file.load(str(tmp_path))
    with pytest.raises(
        SweepError, match=r"unknown sweep 'quik': did you mean 'quick'; a sweep is a YAML file or one of"
    ):
        sweep_file.load("quik")
    with pytest.raises(SweepError, match=r"unknown sweep 'zzz'; a sweep is a YAML file or one of cacheback, quick"):
        sweep_file.load("zzz")
    for name in ("quik.yaml", str(tmp_path / "quik")):
        with pytest.raises(SweepError, match=f"there is no sweep file {name}"):
            sweep_file.load(name)


def test_paths_count_from_the_sweep_file(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("{name: s, workloads: [{name: mine, file: data/p.jsonl}], arms: [ar]}")
    assert sweep_file.load(str(path)).workloads[0].file == str(tmp_path / "data/p.jsonl")


def test_set_overrides_by_dotted_key_name_and_index() -> None:
    sweep = sweep_file.load(
        "quick",
        [
            "max_new_tokens=7",
            "model.dtype=float32",
            "workloads.code.prompts=2",
            "workloads.1.prompts=1",
            "arms.pld.max_ngram=5",
            "ignore_eos=true",
            "arms.0={name: base, drafter: ar}",
        ],
    )
    assert (sweep.max_new_tokens, sweep.model.dtype, sweep.ignore_eos) == (7, "float32", True)
    assert [w.prompts for w in sweep.workloads] == [2, 1, 3]
    assert sweep.arms[1].options["max_ngram"] == 5 and sweep.arms[0].name == "base"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_new_tokens", "has no '='"),
        ("=3", "has no '='"),
        ("model.dtyp=float32", "did you mean 'dtype'"),
        ("workloads.cod.prompts=2", "did you mean 'code'"),
        ("max_new_tokens.x=2", "single value"),
        ("model.dtype=[", "not YAML"),
        ("arms.pld.max_gram=2", "did you mean 'max_ngram'"),
        ("workloads.code.prompts=many", "must be a whole number"),
    ],
)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sweep_file.load("quick", [override])


def test_a_runs_sweep_keeps_the_sources_it_was_begun_with(tmp_path: Path) -> None:
    text = sweep_file.load("quick").to_yaml().replace("source: dfbench ", "source: dfbench 0.0.")
    (tmp_path / "sweep.yaml").write_text(text)
    assert all(arm.source.startswith("dfbench 0.0.") for arm in sweep_file.load_run(tmp_path).arms)
    with pytest.raises(SweepError, match=r"has no readable sweep\.yaml"):
        sweep_file.load_run(tmp_path / "missing")


TEXT = st.text("abz019 .é_", max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(Sweep.model_fields)), JSON, max_size=8))
def test_no_input_ends_in_anything_but_a_sweep_or_one_sentence(data: dict[str, Any]) -> None:
    try:
        sweep = validate({**minimal(), **data})
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert validate(yaml.safe_load(sweep.to_yaml())) == sweep


@given(st.dictionaries(TEXT, JSON, max_size=5), st.randoms(use_true_random=False))
def test_canonical_json_ignores_the_order_of_keys(data: dict[str, Any], random: Any) -> None:
    items = list(data.items())
    random.shuffle(items)
    assert canonical(dict(items)) == canonical(data)

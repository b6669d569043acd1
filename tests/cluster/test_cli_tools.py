"""Commands that list and build: drafters, workloads, corpus. Machine-readable output is what they print for people."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dfbench.cluster import cli_tools, sweep_file
from dfbench.cluster.cli import app
from dfbench.cluster.sweep import Workload, validate
from dfbench.cluster.workloads import load
from dfbench.drafters import registry
from dfbench.errors import OptionError, UsageError, WorkloadError

cli = CliRunner()


def output(*arguments: str) -> str:
    result = cli.invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_drafter_is_listed_with_every_option() -> None:
    listed = {entry["name"]: entry for entry in json.loads(output("drafters", "--json"))}
    assert list(listed) == registry.names()
    text = output("drafters")
    for name, entry in listed.items():
        fields = registry.find(name).Options.model_fields
        assert [option["name"] for option in entry["options"]] == list(fields)
        assert all(option["description"] for option in entry["options"]), name
        defaults = {option["name"]: option["default"] for option in entry["options"]}
        assert registry.parse_options(name, {}).model_dump(mode="json") == defaults
        assert name in text and entry["summary"] in text
        assert all(f"    {option}: " in text for option in fields)
        assert all(f"preset {preset}:" in text for preset in entry["presets"])


def test_option_types_read_as_in_a_sweep_file() -> None:
    from typing import Annotated, Literal

    shown = [int, str | None, Literal["a", "b"], list[int], tuple[float, ...], dict[str, int], Annotated[int, "x"]]
    assert [cli_tools._type_name(kind) for kind in shown] == [
        *("int", "str | null", "a|b", "list[int]", "list[float]", "map[str, int]", "int"),
    ]


def test_one_drafter_and_an_unknown_one() -> None:
    assert output("drafters", "pld").splitlines()[0].startswith("pld  (dfbench ")
    with pytest.raises(OptionError, match="unknown drafter 'pdl': did you mean 'pld'"):
        cli.invoke(app, ["drafters", "pdl"], catch_exceptions=False)


def test_workloads_are_listed_with_source_and_licence() -> None:
    listed = json.loads(output("workloads", "--json"))
    assert [entry["name"] for entry in listed] == ["code", "copyctx", "chat"]
    assert all(entry["prompts"] >= 14 and entry["licence"] and entry["source"] for entry in listed)
    assert all(entry["name"] in output("workloads") for entry in listed)


def test_a_built_workload_reads_back_as_the_same_prompts(tmp_path: Path) -> None:
    out = tmp_path / "code.jsonl"
    assert f"--workload code={out}" in output("workloads", "build", "code", "--out", str(out))
    original, built = load(Workload(name="code")), load(Workload(name="code", file=str(out)))
    assert [(row.prompt_id, row.messages) for row in built] == [(row.prompt_id, row.messages) for row in original]


def test_a_sweeps_workload_is_built_with_its_warm_up_prompt(tmp_path: Path) -> None:
    out = tmp_path / "chat.jsonl"
    output("workloads", "build", "chat", "--sweep", "qwen3-8b", "--out", str(out))
    rows, every = load(Workload(name="chat", file=str(out))), load(Workload(name="chat"))
    assert len(rows) == 31
    assert [row.prompt_id for row in rows] == [row.prompt_id for row in [*every[:30], every[-1]]]


def test_a_file_is_not_overwritten_unless_told(tmp_path: Path) -> None:
    out = tmp_path / "chat.jsonl"
    out.write_text("mine")
    with pytest.raises(WorkloadError, match="is there already"):
        cli.invoke(app, ["workloads", "build", "chat", "--out", str(out)], catch_exceptions=False)
    assert out.read_text() == "mine"
    output("workloads", "build", "chat", "--out", str(out), "--force")
    assert len(out.read_text().splitlines()) == 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["workloads", "build", "chatt", "--out", "{tmp}/f"], "unknown workload 'chatt': did you mean 'chat'"),
        (["workloads", "build", "cod", "--sweep", "quick", "--out", "{tmp}/f"], "did you mean 'code'"),
        (["workloads", "build", "chat", "--out", "{tmp}/none/f"], "cannot be written"),
        (["corpus", "build", "{tmp}/none.txt", "--out", "{tmp}/f", "--model", "{model}"], "cannot be read"),
        (["corpus", "build", "{tmp}/bad.jsonl", "--out", "{tmp}/f", "--model", "{model}"], "line 2 has no `text`"),
        (["corpus", "build", "{tmp}/short.txt", "--out", "{tmp}/f", "--model", "{model}"], "no text of 4 tokens"),
        (["corpus", "build", "{tmp}/short.txt", "--out", "{tmp}/none/f"], "is not a folder"),
        (["corpus", "bigrams", "{tmp}/short.txt", "--out", "{tmp}/none/f"], "is not a folder"),
        (
            ["corpus", "bigrams", "{tmp}/short.txt", "--out", "{tmp}/f", "--model", "{model}", "--min-count", "2"],
            "no 2-gram that a token follows 2 times",
        ),
        (["corpus", "build", "{tmp}/short.txt", "--out", "{tmp}/f", "--model", "{tmp}"], "not a model"),
    ],
)
def test_what_cannot_be_built_is_said_and_nothing_written(
    tmp_path: Path, tiny_model: Callable[..., Path], arguments: list[str], message: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "w5 w6 w7 w8"}\n{"txt": "w5"}\n')
    (tmp_path / "short.txt").write_text("w5 w6")
    model = tiny_model() if "{model}" in arguments else tmp_path
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=message):
        cli.invoke(app, [part.format(tmp=tmp_path, model=model) for part in arguments], catch_exceptions=False)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_built_corpus_runs_as_an_arm(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    from dfbench.cluster import plan
    from dfbench.drafters.cacheback import Cacheback

    model, out = tiny_model(), tmp_path / "c.table"
    (tmp_path / "a.txt").write_text("w5 w6 w7 w8 " * 5)
    (tmp_path / "b.jsonl").write_text('{"text": "w9 w10 w11 w12"}\n\n{"prompt": "w9 w10 w11 w12"}\n')
    sources = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    assert "3 texts, 28 tokens" in output("corpus", "build", *sources, "--out", str(out), "--model", str(model))
    (tmp_path / "p.jsonl").write_text('{"prompt": "w20 w9"}\n')
    (tmp_path / "s.yaml").write_text(
        f"{{name: s, model: {model}, workloads: [{{name: w, file: p.jsonl}}], warmup: 0, max_new_tokens: 8,"
        " arms: [ar, {name: full, drafter: cacheback, draft: tree, frozen: c.table}]}"
    )
    made = plan.plan(sweep_file.load(str(tmp_path / "s.yaml")))
    arm = made.sweep.arms[1]
    assert arm.options["frozen_sha256"] and arm.options["frozen"] == str(out)
    drafter = registry.create("cacheback", arm.options)
    assert isinstance(drafter, Cacheback)
    drafter.start([20])
    drafter.observe([9])
    assert list(drafter.propose(20).tokens)[:3] == [10, 11, 12]


def test_built_bigrams_run_as_an_arm(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    model, out, text = tiny_model(), tmp_path / "b.table", tmp_path / "a.txt"
    text.write_text("w5 w6 w7 " * 3 + "w5 w8")
    told = output("corpus", "bigrams", str(text), "--out", str(out), "--model", str(model), "--min-count", "2")
    assert "3 continuations of 3 2-grams" in told
    sweep = validate(
        {
            "name": "s",
            "target": "scripted",
            "workloads": ["w"],
            "arms": [{"name": "static", "drafter": "ngram-cache", "static": str(out)}],
        }
    )
    drafter = registry.create("ngram-cache", sweep.arms[0].options)
    drafter.start([20])
    drafter.observe([5])
    assert not drafter.propose(3).tokens, "5 alone says nothing: 2-grams do"
    drafter.observe([6])
    assert list(drafter.propose(3).tokens) == [7, 5, 6], "7, 5 → 8 was seen once"

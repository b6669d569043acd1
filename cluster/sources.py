"""SOURCE → recordings: what a model answered, as token ids, from a run, token streams or logs as people have them.

files ─► documents ─► exchanges ─► tokens ─► Recording …         (one at a time, whatever the files' size)
             └────────────┴───────────┴─────► Summary: what was used, what was not, and why
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dfbench.cluster import sources_formats as formats
from dfbench.cluster.sources_batch import BatchJoin
from dfbench.cluster.sources_files import Document, Fault, documents, find_files, readable
from dfbench.cluster.sources_formats import Exchange, Skip
from dfbench.cluster.sources_tokens import MAX_ID, Tokens
from dfbench.errors import WorkloadError

EXAMPLES = 3
"""Places named for each reason."""


class Recording(NamedTuple):
    """One answer as token ids. `turn` counts a conversation's answers from 0; `place` is where it was read."""

    workload: str
    prompt_id: str
    turn: int
    prompt_ids: list[int]
    output_ids: list[int]
    place: str
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()


@dataclass
class Tally:
    """How often something happened, and the first places where it did."""

    count: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, place: str, count: int = 1) -> None:
        self.count += count
        if len(self.places) < EXAMPLES:
            self.places.append(place)


@dataclass
class Summary:
    """What became of a source: nothing that was read is missing from it.

    `notes` are the reasons why counts from a recording are estimates rather than what a live run would show.
    """

    files: int = 0
    used: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    skipped: dict[str, Tally] = field(default_factory=dict)
    notes: dict[str, Tally] = field(default_factory=dict)

    @property
    def recordings(self) -> int:
        return self.used.total()

    @property
    def estimate(self) -> bool:
        """Whether figures from it are estimates."""
        return bool(self.notes)

    def skip(self, reason: str, place: str, count: int = 1) -> None:
        self.skipped.setdefault(reason, Tally()).add(place, count)

    def note(self, reason: str, place: str) -> None:
        self.notes.setdefault(reason, Tally()).add(place)

    def lines(self) -> list[str]:
        """For a terminal: what was used, what was not and why, what the figures are worth."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.used.most_common())
        files = "1 file" if self.files == 1 else f"{self.files} files"
        found = [f"{self.recordings} answers of {self.output_tokens:,} tokens from {files} ({kinds})"]
        for reason, tally in sorted(self.skipped.items(), key=lambda item: -item[1].count):
            found.append(f"not used: {tally.count} × {reason} ({_places(tally)})")
        if self.notes:
            found.append("ESTIMATE: replayed counts need not be those of the served model:")
            found += [f"  {tally.count} × {reason}" for reason, tally in self.notes.items()]
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for the run's ledger."""
        return {
            "files": self.files,
            "used": dict(self.used),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "skipped": {reason: vars(tally) for reason, tally in self.skipped.items()},
            "notes": {reason: vars(tally) for reason, tally in self.notes.items()},
            "estimate": self.estimate,
        }


def _places(tally: Tally) -> str:
    return ", ".join(tally.places) + (", …" if tally.count > len(tally.places) else "")


@dataclass(frozen=True)
class SourceOptions:
    """How to read logs. `workload` names what no document names; `keep_text` false forgets texts at once."""

    tokenizer: str | None = None
    workload: str | None = None
    vocab_size: int | None = None
    enable_thinking: bool = False
    keep_text: bool = True
    hash_ids: bool = False


class LogSource:
    """Recordings of a file or of a folder of files. Iterate it once; `summary` is complete when it ends."""

    def __init__(self, path: Path, options: SourceOptions) -> None:
        if not path.exists():
            raise WorkloadError(f"{path} does not exist: name a run, a file of logs or a folder of them.")
        self.path = path
        self.options = options
        self.summary = Summary()
        self.tokens = Tokens(options.tokenizer, options.vocab_size, options.enable_thinking)
        self._workload = _clean(options.workload) if options.workload else safe_name(path)
        self._names: set[int] = set()

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary, where it is known."""
        return self.tokens.vocab_size if self.tokens.vocab_size < MAX_ID else None

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an output, where the tokenizer tells."""
        return self.tokens.eos_ids

    @property
    def label(self) -> str:
        """What stands in the place of the model's name."""
        return self.options.tokenizer or "recorded"

    def __iter__(self) -> Iterator[Recording]:
        files = find_files(self.path)
        with BatchJoin() as batch:
            for file in files:
                self.summary.files += 1
                yield from self._convert(self._read(file, batch))
            yield from self._convert(iter(batch.pairs()))
        if not self.summary.recordings:
            raise WorkloadError(self._nothing())

    def _nothing(self) -> str:
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            return f"{self.path} is a pipe or a device, which cannot be read twice: write what it holds into a file."
        if not self.summary.skipped:
            return f"{self.path} holds no recorded answers: it is empty."
        reason, tally = max(self.summary.skipped.items(), key=lambda item: item[1].count)
        skipped = sum(t.count for t in self.summary.skipped.values())
        fix = " Write --tokenizer with a folder or model name." if "tokenizer" in reason else ""
        return f"nothing in {self.path} can be replayed ({skipped} left out): {tally.count} × {reason}.{fix}"

    def _read(self, file: Path, batch: BatchJoin) -> Iterator[tuple[str, Exchange | Skip]]:
        name = readable(Path(file.name) if self.path.is_file() else file.relative_to(self.path))
        empty = True
        try:
            for found in documents(file):
                empty = False
                yield from self._interpret(found, f"{name}, {found.place}", batch)
        except OSError as error:
            yield name, Skip(f"a file that cannot be read ({error.strerror})")
            return
        if empty:
            yield name, Skip("an empty file")

    def _interpret(
        self, found: Document | Fault, place: str, batch: BatchJoin
    ) -> Iterator[tuple[str, Exchange | Skip]]:
        if isinstance(found, Fault):
            yield place, Skip(found.reason)
        elif formats.kind_of(found.value) in (formats.BATCH_INPUT, formats.BATCH_OUTPUT):
            refused = batch.add(found.value, place)
            if refused is not None:
                yield place, refused
        else:
            for item in formats.exchanges(found.value):
                yield place, item

    def _convert(self, items: Iterable[tuple[str, Exchange | Skip]]) -> Iterator[Recording]:
        for place, item in items:
            if isinstance(item, Skip):
                self.summary.skip(item.reason, place, item.answers)
                continue
            tokens = self.tokens.of(item)
            if isinstance(tokens, Skip):
                self.summary.skip(tokens.reason, place)
                continue
            yield self._recording(item, place, tokens.prompt_ids, tokens.output_ids, (*item.notes, *tokens.notes))

    def _recording(
        self, item: Exchange, place: str, prompt_ids: list[int], output_ids: list[int], notes: tuple[str, ...]
    ) -> Recording:
        self.summary.used[item.kind] += 1
        self.summary.prompt_tokens += len(prompt_ids)
        self.summary.output_tokens += len(output_ids)
        for note in notes:
            self.summary.note(note, place)
        workload = _clean(item.workload) if item.workload else self._workload
        kept = self.options.keep_text and not self.options.hash_ids
        return Recording(
            workload,
            self._name(workload, item, place),
            item.turn,
            prompt_ids,
            output_ids,
            place,
            (item.prompt or "") if kept else "",
            item.messages if kept else (),
        )

    def _name(self, workload: str, item: Exchange, place: str) -> str:
        """The answer's id: its own, else its place; a turn and a repeated id are told apart by a suffix."""
        base = item.prompt_id or place.replace(", line ", ":").replace(", element ", ":").replace(", object ", ":")
        name = base if item.turn == 0 else f"{base}#{item.turn + 1}"
        number = 1
        unique = name
        while (key := hash((workload, unique))) in self._names:
            number += 1
            unique = f"{name}~{number}"
        self._names.add(key)
        return unique


class IdMask:
    """A secret renaming of token ids: the same id gets the same random number, and the table is never stored.

    Drafters only compare ids, so every count stays the same.
    """

    def __init__(self) -> None:
        self._names: dict[int, int] = {}
        self._taken: set[int] = set()

    def ids(self, given: Iterable[int]) -> list[int]:
        """The renamed ids."""
        names = self._names
        return [names[i] if i in names else self._new(i) for i in given]

    def _new(self, token: int) -> int:
        while (name := secrets.randbelow(2**31 - 1)) in self._taken:
            pass
        self._taken.add(name)
        self._names[token] = name
        return name


def masked(recordings: Iterable[Recording], mask: IdMask) -> Iterator[Recording]:
    """Recordings with their ids renamed and their texts gone."""
    for r in recordings:
        yield r._replace(prompt_ids=mask.ids(r.prompt_ids), output_ids=mask.ids(r.output_ids), text="", messages=())


def write_jsonl(recordings: Iterable[Recording], file: Path) -> None:
    """Recordings as a file of token streams, which reads back to the same recordings."""
    with file.open("w", encoding="utf-8") as out:
        for r in recordings:
            row = {"workload": r.workload, "prompt_id": r.prompt_id, "turn": r.turn}
            out.write(json.dumps({**row, "prompt_ids": r.prompt_ids, "output_ids": r.output_ids}) + "\n")


def safe_name(path: Path) -> str:
    """A workload's name from a file's: without endings, and of characters that sweeps allow."""
    return _clean(path.resolve().name.split(".")[0])


def _clean(name: str) -> str:
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name).strip("-_.")
    return kept[:80] or "logs"

"""The identities that the rows of every job must satisfy (docs/measurement.md §1, §4), checked for many jobs at once.

Called by the driver before a commit and by `verify` on what is on disk. The rows of one job lie together and in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

JobKey = tuple[str, int]
"""What tells one run of a job from every other: job_id and attempt."""

PHASES = ("draft_ns", "forward_ns", "accept_ns", "commit_ns")


class _Rows:
    """Columns of a table as arrays, and which job each row belongs to."""

    def __init__(self, table: pa.Table, jobs: dict[JobKey, int], found: _Found, what: str) -> None:
        self.table = table
        self.count = table.num_rows
        self.first = np.zeros(len(jobs), dtype=np.int64)
        self.size = np.zeros(len(jobs), dtype=np.int64)
        self.owner = np.full(self.count, -1, dtype=np.int64)
        starts, keys = runs(table)
        ends = np.append(starts[1:], self.count)[: len(starts)]
        for start, end, key in zip(starts.tolist(), ends.tolist(), keys, strict=True):
            owner = jobs.get(key)
            if owner is None:
                found.add_key(key, f"{what} rows without a job row")
            elif self.size[owner]:
                found.add(owner, f"its {what} rows do not lie together")
            else:
                self.first[owner], self.size[owner] = start, end - start
                self.owner[start:end] = owner
        self.number = np.arange(self.count) - self.first[self.owner] if self.count else np.zeros(0, dtype=np.int64)

    def __getitem__(self, name: str) -> np.ndarray:
        return as_numpy(self.table[name])

    def flag(self, bad: np.ndarray, found: _Found, message: Callable[[int], str]) -> None:
        """Note the bad rows; of each job, the first one counts."""
        for row in np.flatnonzero(bad & (self.owner >= 0)).tolist():
            found.add(int(self.owner[row]), message(row), int(self.number[row]))


class _Found:
    """The first breach of each job: by row, then in the order of the checks."""

    def __init__(self, keys: list[JobKey]) -> None:
        self.keys = keys
        self._found: dict[JobKey, tuple[int, str]] = {}

    def add(self, job: int, message: str, row: int = -1) -> None:
        self.add_key(self.keys[job], message, row)

    def add_key(self, key: JobKey, message: str, row: int = -1) -> None:
        if key not in self._found or row < self._found[key][0]:
            self._found[key] = (row, f"job {key[0]}: {message}.")

    def flag(self, bad: np.ndarray, message: Callable[[int], str], row: int = -1) -> None:
        for job in np.flatnonzero(bad).tolist():
            self.add(job, message(job), row)

    def messages(self) -> dict[JobKey, str]:
        return {key: message for key, (_, message) in self._found.items()}


AFTER_ROWS = 2**62
"""Place of a breach that is about a job's rows together: it counts when no single row is to blame."""


def breaches(jobs: pa.Table, steps: pa.Table, tokens: pa.Table, eos_ids: Collection[int] = ()) -> dict[JobKey, str]:
    """What is wrong with each job whose rows break an identity, one sentence each; empty when all are sound.

    `eos_ids`: the ids that end an output; none where the sweep ignores them. Token rows are optional a job.
    """
    keys = job_keys(jobs)
    found = _Found(keys)
    places: dict[JobKey, int] = {}
    for place, key in enumerate(keys):
        if places.setdefault(key, place) != place:
            found.add_key(key, "two job rows")
    outputs = jobs["output_ids"].combine_chunks()
    lengths = as_numpy(pc.list_value_length(outputs))
    flat = as_numpy(pc.list_flatten(outputs))
    ends = np.cumsum(lengths)
    _check_outputs(jobs, lengths, flat, ends, eos_ids, found)
    step_rows = _Rows(steps, places, found, "step")
    _check_steps(jobs, step_rows, lengths, found)
    _check_times(jobs, step_rows, found)
    if tokens.num_rows:
        _check_tokens(_Rows(tokens, places, found, "token"), step_rows, lengths, flat, ends - lengths, found)
    return found.messages()


def _check_outputs(
    jobs: pa.Table, lengths: np.ndarray, flat: np.ndarray, ends: np.ndarray, eos_ids: Collection[int], found: _Found
) -> None:
    caps = as_numpy(jobs["max_new_tokens"])
    reasons = np.asarray(jobs["finish_reason"].to_pylist(), dtype=object)
    found.flag((lengths < 1) | (lengths > caps), lambda j: f"{lengths[j]} output tokens at a cap of {caps[j]}")
    is_eos = np.isin(flat, list(eos_ids)) if eos_ids else np.zeros(len(flat), dtype=bool)
    eos_before = np.concatenate(([0], np.cumsum(is_eos)))
    some = lengths > 0
    last = np.where(some, ends - 1, 0)
    ended = some & is_eos[np.minimum(last, max(len(flat) - 1, 0))] if len(flat) else np.zeros(len(lengths), dtype=bool)
    inside = eos_before[np.where(some, ends - 1, 0)] - eos_before[np.where(some, ends - lengths, 0)]
    found.flag(some & (inside > 0), lambda j: "an end of text inside the output")
    expected = np.where(ended, "eos", "length").astype(object)
    found.flag(some & (reasons != expected), lambda j: f"finish reason '{reasons[j]}', not '{expected[j]}'")
    found.flag(some & ~ended & (lengths < caps), lambda j: f"it stopped at {lengths[j]} of {caps[j]} tokens")


def _check_steps(jobs: pa.Table, rows: _Rows, lengths: np.ndarray, found: _Found) -> None:
    step, position, accepted, emitted = (rows[name] for name in ("step", "position", "accepted", "emitted"))
    depth, drafted, queries, padding = (rows[name] for name in ("depth", "drafted", "queries", "padding"))
    number, owner = rows.number, rows.owner
    before = np.cumsum(emitted) - emitted
    expected = 1 + before - before[rows.first[owner]] if rows.count else before
    last = number == rows.size[owner] - 1
    rows.flag(step != number, found, lambda r: f"step {number[r]} is numbered {step[r]}")
    rows.flag(position != expected, found, lambda r: f"step {number[r]} begins at {position[r]}, not {expected[r]}")
    rows.flag(
        (accepted < 0) | (accepted > depth) | (depth > drafted),
        found,
        lambda r: f"step {number[r]} accepted {accepted[r]} of {drafted[r]} at depth {depth[r]}",
    )
    rows.flag((queries < 1 + drafted) | (padding < 0), found, lambda r: f"step {number[r]} has {queries[r]} queries")
    whole = emitted == accepted + 1
    short = last & (emitted == accepted) & (emitted > 0)
    rows.flag(~(whole | short), found, lambda r: f"step {number[r]} accepted {accepted[r]} but emitted {emitted[r]}")
    plain = np.asarray(jobs["drafter"].to_pylist(), dtype=object) == "ar"
    rows.flag(
        (drafted > 0) & plain[owner] if rows.count else drafted > 0,
        found,
        lambda r: f"step {number[r]} of a plain run has a draft of {drafted[r]}",
    )
    total = np.zeros(len(lengths), dtype=np.int64)
    np.add.at(total, owner[owner >= 0], emitted[owner >= 0])
    # transformers' own loop shows no steps; any other job with none has one token.
    opaque = (np.asarray(jobs["drafter"].to_pylist(), dtype=object) == "hf-pld") & (rows.size == 0)
    found.flag(
        (total + 1 != lengths) & ~opaque,
        lambda j: f"its steps end at position {total[j] + 1}, its output at {lengths[j]}",
        AFTER_ROWS,
    )


def _check_times(jobs: pa.Table, rows: _Rows, found: _Found) -> None:
    """Phases lie within their step and steps within the decode; rows without times are those of untimed targets."""
    timed = rows.table["step_ns"].is_valid().combine_chunks().to_numpy(zero_copy_only=False) if rows.count else None
    if timed is None or not timed.any():
        return
    step_ns = rows["step_ns"]
    phases = np.stack([rows[name] for name in PHASES])
    number, owner = rows.number, rows.owner
    rows.flag(timed & (phases.min(axis=0) < 0), found, lambda r: f"step {number[r]} has a phase of negative length")
    rows.flag(timed & (phases.sum(axis=0) > step_ns), found, lambda r: f"step {number[r]} is shorter than its phases")
    total = np.zeros(len(rows.first), dtype=np.int64)
    np.add.at(total, owner[owner >= 0], np.where(timed, step_ns, 0)[owner >= 0])
    decode = as_numpy(jobs["decode_ns"])
    found.flag(total > decode, lambda j: f"its steps take {total[j]} ns, its decode {decode[j]} ns", AFTER_ROWS)


def _check_tokens(
    rows: _Rows, steps: _Rows, lengths: np.ndarray, flat: np.ndarray, begins: np.ndarray, found: _Found
) -> None:
    short = (rows.size > 0) & (rows.size != lengths)
    found.flag(short, lambda j: f"{rows.size[j]} token rows for {lengths[j]} tokens")
    usable = (rows.owner >= 0) & ~short[rows.owner]
    if not usable.any():
        return
    number, owner = rows.number, rows.owner
    token, position, top1, ties = (rows[name] for name in ("token_id", "position", "top1_id", "top_ties"))
    expected = flat[np.where(usable, begins[owner] + number, 0)]
    rows.flag(
        usable & ((position != number) | (token != expected)), found, lambda r: f"token {number[r]} is out of place"
    )
    rows.flag(usable & (top1 != token), found, lambda r: f"token {number[r]} is not the argmax of its own pass")
    swapped = (rows["top1_logit"] < rows["top2_logit"]) | (ties < 1)
    rows.flag(usable & swapped, found, lambda r: f"token {number[r]} has its top two swapped")
    # The step of a token follows from the step rows: position 0 has none, then each step has as many as it emitted.
    step_of = as_numpy(pc.fill_null(rows.table["step"], -1))
    emitting = np.repeat(steps["step"], np.maximum(steps["emitted"], 0)) if steps.count else np.zeros(0, dtype=np.int64)
    offset = np.cumsum(np.maximum(steps["emitted"], 0)) - np.maximum(steps["emitted"], 0)
    base = np.where(steps.size > 0, offset[np.minimum(steps.first, max(steps.count - 1, 0))] if steps.count else 0, 0)
    place = np.clip(base[owner] + number - 1, 0, max(len(emitting) - 1, 0))
    due = np.where(number == 0, -1, emitting[place] if len(emitting) else -1)
    rows.flag(usable & (step_of != due), found, lambda r: f"token {number[r]} names step {step_of[r]}, not {due[r]}")


def job_keys(table: pa.Table) -> list[JobKey]:
    """Whose each row is."""
    return list(zip(table["job_id"].to_pylist(), table["attempt"].to_pylist(), strict=True))


def runs(table: pa.Table) -> tuple[np.ndarray, list[JobKey]]:
    """Where the rows of each job begin, and whose they are."""
    if not table.num_rows:
        return np.zeros(0, dtype=np.int64), []
    names = table["job_id"].combine_chunks()
    encoded = names if pa.types.is_dictionary(names.type) else names.dictionary_encode()
    codes, attempts = as_numpy(encoded.indices), as_numpy(table["attempt"])
    changed = (codes[1:] != codes[:-1]) | (attempts[1:] != attempts[:-1])
    starts = np.concatenate(([0], np.flatnonzero(changed) + 1))
    labels = encoded.dictionary.to_pylist()
    return starts, [(labels[codes[start]], int(attempts[start])) for start in starts.tolist()]


def as_numpy(column: Any) -> np.ndarray:
    """A column as int64 or float64; nulls become 0."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if array.null_count:
        array = pc.fill_null(array, 0)
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values.astype(np.int64) if values.dtype.kind in "iub" else values

"""Jobs of recorded targets, quickly: compiled where a kernel knows the drafter, through the loop everywhere else.

`decode` gives what `loop.decode` gives for a `RecordedTarget`, as arrays; `tables` turns many finished jobs into Arrow
tables at once. Neither measures time: a recorded target has none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dfbench.drafters.ar import Autoregressive
from dfbench.drafters.base import Drafter, check_prompt
from dfbench.drafters.cacheback import Cacheback
from dfbench.drafters.pld import PromptLookup
from dfbench.drafters.suffix import Suffix
from dfbench.drafters.suffix_counts import SuffixCounts
from dfbench.workers import fastpath_kernels as kernels
from dfbench.workers.fastpath_kernels import ACCEPTED, DEPTH, DRAFTED, EMITTED, POSITION, Array
from dfbench.workers.loop import Trace
from dfbench.workers.loop import decode as decode_by_loop
from dfbench.workers.records import JOBS, STEPS, TOKENS, repetition
from dfbench.workers.target import RecordedTarget

Kernel = Callable[[Array, int, int, int, Array], int]
"""(text, start, cap, budget, rows) → number of steps; fills `rows`."""


class Decoded(NamedTuple):
    """One job: `steps` is int32 [steps, 5] with the columns POSITION, DRAFTED, DEPTH, ACCEPTED, EMITTED."""

    output: Sequence[int]
    steps: Array
    finish_reason: str

    @property
    def queries(self) -> Array:
        """Tokens in each pass: the root and the draft."""
        return self.steps[:, DRAFTED] + 1


class Replayed(NamedTuple):
    """A finished job: the row for the jobs table, but for its output, and what was decoded."""

    row: dict[str, Any]
    decoded: Decoded


def recorded_cap(cap: int, recorded: Sequence[int], eos_ids: Collection[int]) -> int:
    """The cap of one recorded job: a recording without an end of text was itself cut at its last token."""
    within = recorded[:cap]
    ended = any(token in eos_ids for token in within)
    return cap if ended else len(within)


def decode(
    drafter: Drafter,
    prompt: Sequence[int],
    recorded: Sequence[int],
    *,
    target: RecordedTarget,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    cold: bool = True,
) -> Decoded:
    """What the drafter would have had accepted of a recorded output, up to its cap or first end of text.

    `cold`: the drafter starts empty (it is reset here); only then can a kernel take its place. Raises EngineError for
    an empty recording and whatever the drafter raises.
    """
    cap = recorded_cap(max_new_tokens, recorded, eos_ids)
    kernel = kernel_for(drafter, len(prompt) + len(recorded)) if cold and recorded else None
    if kernel is None:
        return _by_loop(drafter, prompt, recorded, target, cap, eos_ids, cold)
    check_prompt(prompt, drafter.context)
    output, reason = _end(recorded, cap, eos_ids)
    text = np.concatenate((np.asarray(prompt, np.int32), np.asarray(output, np.int32)))
    rows = np.empty((len(output), 5), np.int32)
    count = kernel(text, len(prompt), cap, target.max_nodes, rows)
    return Decoded(output, rows[:count], reason)


def _end(recorded: Sequence[int], cap: int, eos_ids: Collection[int]) -> tuple[Sequence[int], str]:
    for i, token in enumerate(recorded[:cap] if eos_ids else ()):
        if token in eos_ids:
            return recorded[: i + 1], "eos"
    return recorded[:cap], "length"


def _by_loop(
    drafter: Drafter,
    prompt: Sequence[int],
    recorded: Sequence[int],
    target: RecordedTarget,
    cap: int,
    eos_ids: Collection[int],
    cold: bool,
) -> Decoded:
    if cold:
        drafter.reset()
    target.load(recorded)
    trace = decode_by_loop(target, drafter, prompt, max_new_tokens=cap, eos_ids=eos_ids)
    return Decoded(trace.output, columns(trace), trace.finish_reason)


def columns(trace: Trace) -> Array:
    """The steps of a trace as the kernels write them."""
    rows = np.empty((len(trace.steps), 5), np.int32)
    for i, step in enumerate(trace.steps):
        rows[i] = (step.position, step.drafted, step.depth, step.accepted, step.emitted)
    return rows


def kernel_for(drafter: Drafter, tokens: int) -> Kernel | None:
    """The compiled form of a drafter for a text of this many tokens; None where there is none."""
    make = _KERNELS.get(type(drafter))
    return None if make is None else make(drafter, tokens)


def _ar(drafter: Autoregressive, tokens: int) -> Kernel:
    def run(text: Array, start: int, cap: int, budget: int, rows: Array) -> int:
        count = len(text) - start - 1
        rows[:count] = 0
        rows[:count, POSITION] = np.arange(1, count + 1)
        rows[:count, EMITTED] = 1
        return count

    return run


def _pld(drafter: PromptLookup, tokens: int) -> Kernel:
    o = drafter.options
    sizes = range(o.max_ngram, o.min_ngram - 1, -1)
    delays = np.array([max(o.draft_len, n + 1) if o.full else 1 for n in sizes], np.int64)
    eos = np.array(sorted(drafter.context.eos_ids) if o.stop_at_eos else [], np.int32)
    rule = (o.max_ngram, o.min_ngram, o.draft_len, delays, o.match == "recent", eos)

    def run(text: Array, start: int, cap: int, budget: int, rows: Array) -> int:
        tables = np.zeros((len(delays), len(kernels.table_for(tokens))), np.int32)
        return int(kernels.pld_steps(text, start, cap, budget, tables, *rule, rows))

    return run


def _cacheback(drafter: Cacheback, tokens: int) -> Kernel | None:
    o = drafter.options
    if o.frozen is not None or o.frozen_sha256 is not None or o.leaders < tokens:
        return None

    def chain(text: Array, start: int, cap: int, budget: int, rows: Array) -> int:
        table, rule = kernels.table_for(tokens), (o.leader, o.follower, o.draft_len)
        return int(kernels.cacheback_chain_steps(text, start, cap, budget, table, *rule, rows))

    def tree(text: Array, start: int, cap: int, budget: int, rows: Array) -> int:
        tables = (kernels.table_for(tokens), kernels.table_for(tokens))
        rule = (o.leader, o.follower, o.followers, o.queries, o.reserve, o.count_refed, o.merge)
        return int(kernels.cacheback_tree_steps(text, start, cap, budget, *tables, *rule, rows))

    return chain if o.draft == "chain" else tree


def _suffix(drafter: Suffix, tokens: int) -> Kernel | None:
    o = drafter.options
    if o.cached_requests:
        return None
    tree = o.mode == "tree"
    # The drafter's own tables: what it derives from its options is derived in one place.
    rule = (drafter._limits, drafter._min_prob, tree, drafter._out, drafter._chances)
    scratch = np.empty((2, o.max_draft), np.int32)

    def run(text: Array, start: int, cap: int, budget: int, rows: Array) -> int:
        c = SuffixCounts(o.depth, tokens + 1)
        counts = (c.meta, c.states, c.edges, c.groups, c.table)
        return int(kernels.suffix_steps(text, start, cap, budget, *counts, *rule, scratch, rows))

    return run


_KERNELS: dict[type[Drafter], Callable[[Any, int], Kernel | None]] = {
    Autoregressive: _ar,
    PromptLookup: _pld,
    Cacheback: _cacheback,
    Suffix: _suffix,
}


_UNTIMED = ("start_ns", "prefill_ns", "decode_ns", "wall_ns", "throttled", "telemetry")


def tables(jobs: Sequence[Replayed], *, keep_ids: bool = True) -> dict[str, pa.Table]:
    """Arrow tables of many finished jobs. `row` of each holds what `records.job_row` gives.

    `keep_ids` false puts -1 in the place of every output id but an end of text: the length is kept, the text is not.
    """
    rows = []
    for job in jobs:
        output = job.decoded.output
        row = dict.fromkeys(_UNTIMED)
        row |= job.row
        row["finish_reason"] = job.decoded.finish_reason
        if row["finish_reason"] == "length":
            row["max_new_tokens"] = len(output)  # the cap that the recording itself ran into
        row["repetition"] = _repetition(tuple(output))
        row["output_ids"] = output if keep_ids else _hidden(output, job.decoded.finish_reason)
        rows.append(row)
    return {
        "jobs": pa.Table.from_pylist(rows, schema=JOBS),
        "steps": _steps(jobs),
        "tokens": TOKENS.empty_table(),
    }


def _hidden(output: Sequence[int], finish_reason: str) -> list[int]:
    return [*[-1] * (len(output) - 1), output[-1] if finish_reason == "eos" else -1]


def _steps(jobs: Sequence[Replayed]) -> pa.Table:
    """Identity columns are repeated by index, the rest joined end to end."""
    sizes = [len(job.decoded.steps) for job in jobs]
    total = sum(sizes)
    if not total:
        return STEPS.empty_table()
    owner = pa.array(np.repeat(np.arange(len(jobs), dtype=np.int32), sizes))
    steps = np.concatenate([job.decoded.steps for job in jobs])
    made: dict[str, Array] = {
        "step": np.concatenate([np.arange(size, dtype=np.int32) for size in sizes]),
        "position": steps[:, POSITION],
        "queries": steps[:, DRAFTED] + 1,
        "padding": np.zeros(total, np.int32),
        "drafted": steps[:, DRAFTED],
        "depth": steps[:, DEPTH],
        "accepted": steps[:, ACCEPTED],
        "emitted": steps[:, EMITTED],
    }
    arrays = []
    for entry in STEPS:
        if entry.name in made:
            arrays.append(pa.array(np.ascontiguousarray(made[entry.name]), entry.type))
        elif entry.name.endswith("_ns"):
            arrays.append(pa.nulls(total, entry.type))
        else:
            arrays.append(pa.array([job.row[entry.name] for job in jobs], entry.type).take(owner))
    return pa.Table.from_arrays(arrays, schema=STEPS)


@lru_cache(maxsize=512)
def _repetition(output: tuple[int, ...]) -> float | None:
    """Arms share their prompts' outputs, so each is looked at once."""
    return repetition(output)

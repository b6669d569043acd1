"""Two runs side by side: what changed in the figures, prompt by prompt, and what changed in the set-up."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import duckdb

from dfbench.analysis import functions
from dfbench.analysis.counting import PROMPTS, TALKS, counted
from dfbench.analysis.stats import Interval, verdict
from dfbench.analysis.store import rows
from dfbench.errors import QueryError, RunError, unknown

ALIKE = ("device", "model", "revision", "dtype")
"""Columns in which two runs must agree: their figures may not be pooled or compared unless told."""
METRICS = ("mat", "speedup", "tokens_per_s")

_JOBS = """
select
    workload, arm, prompt_id, coalesce(prompt_sha, '') as prompt_sha, repeat, conversation, device, model, revision,
    dtype, engine, stack, cache, tokens, steps, ar_decode_s, scaled_s, decode_s, comparable, drafter, identical
from pairs
left join (select workload, prompt_id, prompt_sha from prompts) as prompts using (workload, prompt_id)
"""

_PAIRED = """
create view paired as
select
    a.workload, a.arm, a.conversation, a.cache = 'carried' or b.cache = 'carried' as carried,
    a.tokens as a_tokens, a.steps as a_steps, a.decode_s as a_s,
    b.tokens as b_tokens, b.steps as b_steps, b.decode_s as b_s,
    case when a.comparable and b.comparable then a.ar_decode_s end as a_ar,
    case when a.comparable and b.comparable then a.scaled_s end as a_scaled,
    case when a.comparable and b.comparable then b.ar_decode_s end as b_ar,
    case when a.comparable and b.comparable then b.scaled_s end as b_scaled,
    a.drafter, a.identical as a_identical, b.identical as b_identical
from a join b using (workload, arm, prompt_id, prompt_sha, repeat)
"""

_CHANGES = """
with metrics as (
    select workload, arm, drafter, conversation, carried, 'mat' as metric,
        a_tokens::double as an, a_steps::double as ad, b_tokens::double as bn, b_steps::double as bd from paired
    union all
    select workload, arm, drafter, conversation, carried, 'speedup', a_ar, a_scaled, b_ar, b_scaled from paired
    union all
    select workload, arm, drafter, conversation, carried, 'tokens_per_s', a_tokens, a_s, b_tokens, b_s from paired
),
units as (
    select workload, arm, metric, conversation, bool_or(carried) as carried, count(*) as jobs,
        bool_and(drafter = 'ar') as reference,
        sum(an) as an, sum(ad) as ad, sum(bn) as bn, sum(bd) as bd
    from metrics where ad > 0 and bd > 0 and an > 0 and bn > 0
    group by all
)
select
    workload, arm, metric, count(*) as prompts, sum(jobs)::bigint as jobs,
    sum(an) / sum(ad) as a, sum(bn) / sum(bd) as b, b / a - 1 as change, bool_and(reference) as reference,
    case when not bool_or(carried) then ratio_of_ratios_interval(list(bn), list(bd), list(an), list(ad)) end as interval
from units
group by workload, arm, metric
order by workload, arm, metric
"""

_OUTPUTS = """
select workload, arm, count(*) as outputs,
    count(*) filter (not a_identical) as a_differ, count(*) filter (not b_identical) as b_differ
from paired
where drafter <> 'ar' and a_identical is not null and b_identical is not null
group by all
having a_differ + b_differ > 0
order by all
"""


@dataclass(frozen=True)
class Change:
    """One metric of one workload and arm: its value in both runs over the same prompts, and the relative change."""

    workload: str
    arm: str
    metric: str
    prompts: int
    a: float
    b: float
    change: float
    interval: Interval | None
    reference: bool = False
    """Whether this is AR itself, whose MAT and speedup are 1 by definition."""
    counted: str = "prompts"
    """What `prompts` are called: conversations, where some have several turns."""

    @property
    def words(self) -> str:
        """The change as a sentence."""
        percent = self.interval and Interval(100 * self.interval.lo, 100 * self.interval.hi)
        what = f"{self.metric} of {self.arm} on {self.workload}"
        return verdict(what, "%", 100 * self.change, percent, self.prompts, self.counted)


@dataclass
class Comparison:
    """What `compare` found. `setup`: (what, in A, in B) for everything that differs in provenance."""

    changes: list[Change]
    setup: list[tuple[str, str, str]]
    only_a: int
    only_b: int
    notes: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    """How many outputs part from AR's in each run, over the same prompts: a sentence a workload and arm."""


def compare(a: duckdb.DuckDBPyConnection, b: duckdb.DuckDBPyConnection, across: Collection[str] = ()) -> Comparison:
    """Pair the jobs of two opened runs by workload, prompt, arm and repeat, and compare them.

    Raises RunError when the runs differ in a column of ALIKE that `across` does not name, or have no job in common.
    """
    strange = sorted(set(across) - set(ALIKE))
    if strange:
        raise QueryError(f"--across {strange[0]} is not a column to compare across: write one of {', '.join(ALIKE)}.")
    _require_alike(a, b, across)
    scratch = duckdb.connect(":memory:")
    functions.register(scratch)
    for name, con in (("a", a), ("b", b)):
        scratch.register(name, con.sql(_JOBS).to_arrow_table())
    scratch.execute(_PAIRED)
    units = (TALKS if TALKS in (counted(a), counted(b)) else PROMPTS).units
    changes = [_change(row, units) for row in rows(scratch, _CHANGES)]
    if not changes:
        raise RunError(
            "the two runs have no job of the same workload, prompt, arm and repeat: there is nothing to compare."
        )
    keys = "workload, arm, prompt_id, prompt_sha, repeat"
    only = [
        scratch.sql(f"select count(*) from (select {keys} from {x} except select {keys} from {y})").fetchall()[0][0]
        for x, y in (("a", "b"), ("b", "a"))
    ]
    outputs = [_parted(row) for row in rows(scratch, _OUTPUTS)]
    return Comparison(changes, list(_setup(a, b)), only[0], only[1], _notes(across), outputs)


def _parted(row: dict[str, Any]) -> str:
    removed = row["a_differ"] - row["b_differ"]
    what = "no change" if not removed else f"{abs(removed)} {'fewer' if removed > 0 else 'more'}"
    return (
        f"{row['arm']} on {row['workload']}: of {row['outputs']} outputs, {row['a_differ']} part from AR's in A and "
        f"{row['b_differ']} in B ({what})."
    )


def _notes(across: Collection[str]) -> list[str]:
    return [f"compared across {', '.join(across)}: the change is the {' and '.join(across)}'s too."] if across else []


def _change(row: dict[str, Any], units: str) -> Change:
    found = row["interval"]
    interval = Interval(found["lo"] - 1, found["hi"] - 1) if found else None
    plain = {name: row[name] for name in ("workload", "arm", "metric", "prompts", "a", "b", "change", "reference")}
    return Change(**plain, interval=interval, counted=units)


def _require_alike(a: duckdb.DuckDBPyConnection, b: duckdb.DuckDBPyConnection, across: Collection[str]) -> None:
    differing = []
    for column in ALIKE:
        query = f"select distinct {column} from pairs order by 1"
        mine, theirs = (tuple(value for (value,) in con.sql(query).fetchall()) for con in (a, b))
        if not mine or not theirs:
            raise RunError("one of the runs has no finished job: there is nothing to compare.")
        if mine != theirs and column not in across:
            differing.append(f"{column} ({_listed(mine)} and {_listed(theirs)})")
    if differing:
        names = " ".join(f"--across {text.split(' ')[0]}" for text in differing)
        raise RunError(f"the runs differ in {', '.join(differing)}: write {names} to compare them all the same.")


def _listed(values: Iterable[str]) -> str:
    return ", ".join(value or "none" for value in values)


def _setup(a: duckdb.DuckDBPyConnection, b: duckdb.DuckDBPyConnection) -> Iterable[tuple[str, str, str]]:
    """Everything that provenance tells apart: settings, arms, versions, workers."""
    mine, theirs = _provenance(a), _provenance(b)
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            yield name, mine.get(name, "–"), theirs.get(name, "–")


_PRIVATE = ("host", "pid", "joined_at", "left_at", "cpu_mhz")


def _provenance(con: duckdb.DuckDBPyConnection) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for row in rows(
        con,
        "select distinct arm, drafter, params, cache, engine, stack, max_new_tokens, dtype, model, revision, device "
        "from jobs where not warmup",
    ):
        arm = row.pop("arm")
        for name in ("drafter", "params", "cache"):
            found.setdefault(f"arm {arm}: {name}", set()).add(str(row.pop(name)))
        for name, value in row.items():
            found.setdefault(name, set()).add(str(value))
    for (facts,) in con.sql("select facts from workers").fetchall():
        for name, value in json.loads(facts or "{}").items():
            if name not in _PRIVATE:
                found.setdefault(f"worker: {name}", set()).add(json.dumps(value, sort_keys=True))
    return {name: ", ".join(sorted(values)) for name, values in found.items()}


class Condition(NamedTuple):
    """`--fail-if`: a metric, a direction, a size, and what of a change is measured by it (`parse_condition`)."""

    metric: str
    sign: str
    size: float
    of: Literal["relative change", "change", "value"]

    def judges(self, change: Change) -> bool:
        """Whether it is about this change: what is 1 by definition is not judged."""
        return change.metric == self.metric and not (change.reference and self.metric in ("mat", "speedup"))

    def met(self, change: Change) -> bool:
        """Whether a change is one that fails."""
        if not self.judges(change):
            return False
        value = {"relative change": change.change, "change": change.b - change.a, "value": change.b}[self.of]
        return value < self.size if self.sign == "<" else value > self.size


def parse_condition(text: str) -> Condition:
    """`mat < -1%`: B's MAT is more than 1 % below A's. `mat < -0.05`, with a sign: more than 0.05 below A's.

    `mat < 1.2`, without sign and %: B's own MAT is below 1.2, whatever A's is. Raises QueryError.
    """
    match = re.fullmatch(r"\s*(\w+)\s*([<>])\s*([+-]?)(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*", text)
    if not match:
        raise QueryError(
            f"'{text}' is not a condition: write a metric, < or >, and a size, such as 'mat < -1%' (change from A to "
            "B), 'mat < -0.05' (the same, not relative) or 'mat < 1.2' (B's own)."
        )
    metric, sign, signed, size, percent = match.groups()
    if metric not in METRICS:
        raise QueryError(unknown("metric", metric, METRICS))
    value = float(signed + size)
    if percent:
        return Condition(metric, sign, value / 100, "relative change")
    return Condition(metric, sign, value, "change" if signed else "value")

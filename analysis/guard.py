"""The guard's judge: is every output AR's, but for what rounding explains, and is nothing missing?

The rules are those of docs/measurement.md §5.

Each check has a name, looks at one thing, and says what it compared. A verdict is sound only if every check ran on all
that was planned: an empty, short or missing output is never equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import duckdb
import numpy as np

from dfbench.analysis.rundir import run_settings
from dfbench.analysis.store import planned_pairs
from dfbench.analysis.sums import sums_astray

CONTROL_LEVEL = 0.01
"""A spec arm that diverges more often than its control does with less than this chance is a finding."""
BIAS_ULP = 0.5
"""A mean logit shift of more than this many ulp, and of more than six standard errors, is systematic."""

NEEDS_MODEL = frozenset({"unresolved", "noise", "teacher", "bias", "control", "replay"})
"""Checks that read what the guard's workers computed; `--join-only` leaves them out."""


@dataclass(frozen=True)
class Finding:
    """Something that must not be in a sound run: which check saw it, and one sentence."""

    check: str
    message: str


@dataclass
class Verdict:
    """What the guard says of a run: the counts, by cell, and the findings. No finding, nothing wrong was found."""

    checks: tuple[str, ...]
    cells: list[dict[str, Any]]
    planned: int
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings

    def total(self, column: str) -> int:
        """A count of `guard_summary`, over all cells."""
        return sum(int(cell[column] or 0) for cell in self.cells)

    def line(self) -> str:
        """The report line, like the seed report's: tokens compared and identical, first divergences by class."""
        compared, identical = self.total("tokens_compared"), self.total("tokens_identical")
        classes = ", ".join(f"{self.total(name)} {name}" for name in ("ties", "ulps", "unresolved", "violations"))
        text = (
            f"{self.total('pairs_compared')} of {self.planned} planned pairs compared: {identical:,} of"
            f" {compared:,} tokens identical to AR; {self.total('divergences')} first divergences ({classes})"
        )
        if controls := self.total("controls"):
            text += f"; shape control alone: {self.total('control_divergences')} of {controls} outputs diverge"
        return text + "."


Check = Callable[[duckdb.DuckDBPyConnection], Iterable[str]]


def judge(con: duckdb.DuckDBPyConnection, *, skip: Collection[str] = (), join_only: bool = False) -> Verdict:
    """Run every check but those in `skip` on an opened run.

    `join_only` leaves out the checks that need the guard's re-runs; an unresolved divergence is then a finding, since
    only its witness could clear it.
    """
    left_out = set(skip) | (NEEDS_MODEL if join_only else set())
    names = tuple(name for name in CHECKS if name not in left_out)
    examined = not join_only and "examined" not in skip
    told = (*names, "examined") if examined else names
    verdict = Verdict(told, _rows(con, "select * from guard_summary"), planned_pairs(con) or 0)
    for name in names:
        verdict.findings += [Finding(name, message) for message in CHECKS[name](con)]
    if join_only and "unresolved" not in skip:
        verdict.findings += [Finding("unresolved", message) for message in _unresolved_at_all(con)]
    if examined:
        verdict.findings += [Finding("examined", message) for message in _examined(con)]
    verdict.notes += _notes(con)
    return verdict


def coverage(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """Every planned pair has both outputs, and each output that is there is whole."""
    reference = {arm for (arm,) in con.execute("select distinct arm from raw_jobs where drafter = 'ar'").fetchall()}
    if not reference:
        yield "no AR output is there to compare with."
    compared = dict(
        con.execute(
            "select workload || '/' || arm, count(*) from pairs where ar_job_id is not null group by all"
        ).fetchall()
    )
    for workload, arm, planned in con.execute("select workload, arm, jobs from plan order by all").fetchall():
        found = compared.get(f"{workload}/{arm}", 0)
        if found < planned:
            yield f"{workload}/{arm}: {found} outputs of {planned} planned ones are there with AR's beside them."
    if not compared:
        yield "nothing was compared."


def rows(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """The token and step rows of every job add up to its output, which is no longer than it may be."""
    query = """
        with counted as (
            select job_id, attempt, count(*) as n, bool_and(top1_id = token_id) as argmax
            from tokens group by all
        ),
        fed as (select job_id, attempt, sum(emitted) as emitted from steps group by all)
        select workload, arm, prompt_id,
            len(output_ids) as tokens, coalesce(emitted, 0) + 1 as stepped, n as token_rows, argmax,
            target, drafter, max_new_tokens,
            len(list_filter(output_ids[:-2], lambda token: list_contains($ends, token))) as inner_ends
        from raw_jobs left join counted using (job_id, attempt) left join fed using (job_id, attempt)
        where not warmup
    """
    for row in _rows(con, query, {"ends": _ends(con)}):
        where = f"{row['workload']}/{row['arm']} '{row['prompt_id']}'"
        timed_alone = row["stepped"] == 1 and row["token_rows"] is None and row["drafter"].startswith("hf-")
        if timed_alone:
            continue
        if row["stepped"] != row["tokens"]:
            yield f"{where}: its steps emit {row['stepped']} tokens, its output has {row['tokens']}."
        if row["target"] == "torch" and row["token_rows"] != row["tokens"]:
            yield f"{where}: {row['token_rows'] or 0} token rows for {row['tokens']} tokens."
        if row["tokens"] > row["max_new_tokens"]:
            yield f"{where}: {row['tokens']} tokens at a cap of {row['max_new_tokens']}."
        if row["inner_ends"]:
            yield f"{where}: its output goes on after an end of text."
        if row["argmax"] is False:
            yield f"{where}: a token is not the argmax of the pass that emitted it."


def prompts(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """No prompt begins with its tokenizer's first token twice."""
    starts = {
        json.loads(facts).get("bos_token_id")
        for (facts,) in con.execute("select facts from workers").fetchall()
        if facts
    }
    for workload, prompt_id, ids in con.execute(
        "select workload, prompt_id, prompt_ids[1:2] from prompts where len(prompt_ids) > 1"
    ).fetchall():
        if ids[0] == ids[1] and ids[0] in starts:
            yield f"{workload} '{prompt_id}': the prompt begins with the beginning-of-text token twice."


def identity(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """A job id stands for one set of settings, and no two sets share one."""
    doubled = con.execute(
        """
        select any_value(workload), any_value(prompt_id), list(distinct arm || ' ' || params) as settings
        from raw_jobs where not warmup group by job_id having len(settings) > 1
        """
    ).fetchall()
    for workload, prompt_id, settings in doubled:
        yield f"{workload} '{prompt_id}': one job id stands for {' and '.join(sorted(settings))}."
    uneven = con.execute(
        "select workload, list(arm order by arm), list(jobs order by arm) as counts from plan group by workload "
        "having len(list_distinct(counts)) > 1"
    ).fetchall()
    for workload, arms, counts in uneven:
        listed = ", ".join(f"{arm} {count}" for arm, count in zip(arms, counts, strict=True))
        yield f"{workload}: the plan does not have as many jobs for each arm ({listed})."
    spec = _run_spec(con)
    settings = {arm["name"]: arm["params"] for arm in spec.get("arms", [])}
    planned = {arm for (arm,) in con.execute("select distinct arm from plan").fetchall()}
    for arm in sorted(settings.keys() - planned):
        yield f"the plan has no job of arm '{arm}'."
    made = con.execute("select distinct arm, params from raw_jobs where not warmup order by all").fetchall()
    for arm, params in made:
        if arm not in planned:
            yield f"there are outputs of arm '{arm}', which the plan does not have."
        elif arm in settings and json.loads(params) != settings[arm]:
            yield f"outputs of arm '{arm}' were made with {params}, the run's settings are {json.dumps(settings[arm])}."


def figures(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """MAT as the views give it is MAT as the rows give it, added up here without them; so are the commits' sums."""
    jobs = con.execute(
        "select job_id, attempt, workload, arm, device, len(output_ids) from raw_jobs "
        "where not warmup and not pair_only"
    ).fetchall()
    cell_of = {(job, attempt): (workload, arm, device) for job, attempt, workload, arm, device, _ in jobs}
    tokens: dict[tuple[str, str, str], int] = {}
    for job, attempt, _, _, _, length in jobs:
        cell = cell_of[job, attempt]
        tokens[cell] = tokens.get(cell, 0) + length - 1
    steps: dict[tuple[str, str, str], int] = {}
    for job, attempt in con.execute("select job_id, attempt from raw_steps").fetchall():
        cell = cell_of.get((job, attempt), ("", "", ""))
        steps[cell] = steps.get(cell, 0) + 1
    shown = con.execute(
        "select workload, arm, device, sum(tokens), sum(steps), sum(mat * steps) / sum(steps) from mat group by all"
    ).fetchall()
    for workload, arm, device, n, s, mat in shown:
        cell = (workload, arm, device)
        if cell not in tokens or not steps.get(cell):
            continue
        counted = tokens[cell] / steps[cell]
        if (n, s) != (tokens[cell], steps[cell]) or not math.isclose(mat, counted, rel_tol=1e-9):
            yield (
                f"{workload}/{arm}: the view `mat` has {mat or math.nan:.4f} from {n} tokens and {s or 0} steps, the"
                f" rows give {counted:.4f} from {tokens[cell]} and {steps[cell]}."
            )
    missing = {cell for cell in tokens if steps.get(cell)} - {tuple(row[:3]) for row in shown}
    for workload, arm, _ in sorted(missing):
        yield f"{workload}/{arm}: the view `mat` lacks this cell."
    yield from sums_astray(con)


def divergence(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """Where a spec output parts from AR's, the two tokens tie, or are a few ulp apart."""
    for workload, arm, prompt_id, position, ar_id, spec_id in con.execute(
        "select workload, arm, prompt_id, position, ar_id, spec_id from divergences where class = 'violation'"
    ).fetchall():
        yield (
            f"{workload}/{arm} '{prompt_id}' position {position}: token {spec_id} where AR has {ar_id}, and the logits"
            " do not explain it."
        )


def unresolved(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """Where the recorded logits say nothing, the witness shows each arm's token to be its own shape's argmax."""
    for workload, arm, prompt_id, position, seen in con.execute(
        "select workload, arm, prompt_id, position, ar_choice is not null "
        "from guard_witness join pairs using (job_id, attempt, workload, arm, prompt_id) "
        "where class = 'unresolved' and cleared is not true and steps > 0"
    ).fetchall():
        how = "its witness does not clear it" if seen else "it has no witness"
        yield f"{workload}/{arm} '{prompt_id}' position {position}: unresolved from recorded logits, and {how}."


def noise(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """What shape alone does to the logits is what the arithmetic can do."""
    for device, dtype, most_ulp, most in con.execute(
        "select device, dtype, control_max_ulp, control_max_relative from guard_bounds "
        "where case when bound_ulp is not null then control_max_ulp > 16 else control_max_relative > bound_relative end"
    ).fetchall():
        yield (
            f"on {device} the shape controls' logits move by {most_ulp:.1f} ulp ({most:.1e} relative) between passes of"
            f" different width, more than {dtype} explains: the engine computes another thing in wide passes."
        )


def teacher(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """At every position the recorded logit is that of a plain pass over the whole output, within the measured bound."""
    for workload, arm, prompt_id, outside, tokens, first in con.execute(
        "select workload, arm, prompt_id, outside, tokens, first_outside from guard_teacher where outside > 0"
    ).fetchall():
        yield (
            f"{workload}/{arm} '{prompt_id}': {outside} of {tokens} recorded logits are not those of a plain pass, the"
            f" first at position {first}."
        )


def bias(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """In 16-bit arithmetic, whose bound is wide: no arm's logits are shifted as a whole, however little."""
    query = """
        select workload, arm, device, list(delta_ulp)
        from guard_scores
        where kind = 'teacher' and delta_ulp is not null and dtype in ('bfloat16', 'float16')
        group by all order by all
    """
    for workload, arm, device, deltas in con.execute(query).fetchall():
        values = np.asarray(deltas)
        if len(values) < 100:
            continue
        mean, error = values.mean(), values.std(ddof=1) / math.sqrt(len(values))
        if abs(mean) > BIAS_ULP and abs(mean) > 6 * error:
            yield f"{workload}/{arm} on {device}: recorded logits are off by {mean:+z.2f} ulp on average."


def control(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """A spec arm parts from AR no more often than AR at the same query widths does (paired, exact, one-sided)."""
    for workload, arm, device, spec_only, control_only, pairs in con.execute(
        """
        select workload, arm, device,
            count(*) filter (spec_position is not null and control_position is null),
            count(*) filter (spec_position is null and control_position is not null),
            count(*)
        from guard_control group by all
        """
    ).fetchall():
        chance = exceeds(spec_only, control_only)
        if chance < CONTROL_LEVEL:
            yield (
                f"{workload}/{arm} on {device}: {spec_only} of {pairs} outputs part from AR where their shape control"
                f" does not, {control_only} the other way round (chance {chance:.4f})."
            )


def exceeds(first: int, second: int) -> float:
    """The chance of at least `first` of first + second fair coins (the exact one-sided McNemar test)."""
    total = first + second
    return sum(math.comb(total, k) for k in range(first, total + 1)) / (1 << total)


def replay(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """A fresh drafter with the recorded options takes the recorded steps: it knew nothing that it should not."""
    for workload, arm, prompt_id, differs_at in con.execute(
        "select workload, arm, prompt_id, differs_at from guard_replay where differs_at is not null"
    ).fetchall():
        yield (
            f"{workload}/{arm} '{prompt_id}': from position {differs_at} on its steps are not those of a fresh drafter"
            " with the recorded options."
        )


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        coverage, rows, prompts, identity, figures, divergence, unresolved, noise, teacher, bias, control, replay,
    )
}  # fmt: skip
"""Every check by name."""


def _run_spec(con: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    """The settings that the run was planned with, as its ledger has them."""
    return run_settings(dict(con.execute("select key, value from ledger_meta where key = 'run'").fetchall()))


def _ends(con: duckdb.DuckDBPyConnection) -> list[int]:
    """The ids that end an output in this run; none where the run ignores them."""
    if _run_spec(con).get("ignore_eos"):
        return []
    facts = [json.loads(text) for (text,) in con.execute("select facts from workers").fetchall() if text]
    return sorted({token for fact in facts for token in fact.get("eos_ids", [])})


def _unresolved_at_all(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    for workload, arm, prompt_id, position in con.execute(
        "select workload, arm, prompt_id, position from divergences where class = 'unresolved'"
    ).fetchall():
        yield f"{workload}/{arm} '{prompt_id}' position {position}: unresolved, and only the model could clear it."


def _examined(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """The guard's workers have examined every job that there is."""
    for workload, arm, jobs, scored, controls in con.execute(
        """
        with seen as (
            select
                job_id, attempt,
                bool_or(kind = 'teacher') as scored,
                bool_or(kind in ('control', 'again')) as control
            from witness group by all
        )
        select workload, arm, count(*), count(*) filter (scored), count(*) filter (control)
        from raw_jobs left join seen using (job_id, attempt)
        where not warmup group by workload, arm order by workload, arm
        """
    ).fetchall():
        if scored < jobs or controls < jobs:
            yield f"{workload}/{arm}: {min(scored, controls)} of {jobs} outputs were examined with the model."


def _notes(con: duckdb.DuckDBPyConnection) -> list[str]:
    notes = []
    (again,) = con.execute(
        """
        select count(distinct witness.job_id) from witness join raw_jobs as jobs using (job_id, attempt)
        where kind = 'again' and token_id is distinct from jobs.output_ids[position + 1]
        """
    ).fetchall()[0]
    if again:
        notes.append(f"{again} AR outputs came out otherwise when AR was run again: noise between runs or devices.")
    for arm, count in con.execute(
        "select arm, count(*) from guard_witness join pairs using (job_id, attempt, workload, arm, prompt_id) "
        "where class = 'unresolved' and steps = 0 group by arm order by arm"
    ).fetchall():
        notes.append(f"{count} divergences of '{arm}', which records no logits, cannot be judged.")
    (unwitnessed,) = con.execute("select count(*) from guard_witness where cleared is false").fetchall()[0]
    if unwitnessed:
        notes.append(f"{unwitnessed} divergences were not reproduced by their witness.")
    return notes


def _rows(con: duckdb.DuckDBPyConnection, query: str, parameters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    cursor = con.execute(query, parameters)
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

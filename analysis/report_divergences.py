"""The report's table of first differences from AR's outputs: both tokens, with their text in context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import duckdb

from dfbench.analysis.report_figures import Row
from dfbench.analysis.report_markup import Html, el, evidence, join, number, table
from dfbench.analysis.store import rows

Decode = Callable[[Sequence[int]], str]
"""Token ids → their text."""

DIVERGENCES = """select workload, arm, prompt_id, repeat, device, position, ar_id, spec_id, class, ar_gap, spec_gap,
  ar_gap_ulp, spec_gap_ulp, differing_tokens, compared_tokens, job_id, ar_job_id, attempt
from divergences
order by class <> 'violation', class <> 'unresolved', workload, arm, prompt_id, repeat"""
MOST_DIVERGENCES = 50
BEFORE, AFTER = 16, 6
"""Tokens of context that a divergence is shown with."""


def divergences(con: duckdb.DuckDBPyConnection, decode: Decode | None) -> Html:
    """First differences from AR's outputs: both tokens, their text in context, and how near the logits were."""
    found = rows(con, DIVERGENCES)
    if not found:
        [(compared,)] = con.sql("select sum(pairs_compared) from losslessness").fetchall()
        none = f"All {compared} outputs compared are AR's, token for token." if compared else (
            "No output has an AR output to be compared with.")  # fmt: skip
        return join([el("p", none, class_=None if compared else "absent"), evidence(DIVERGENCES, [])])
    shown = found[:MOST_DIVERGENCES]
    outputs = _outputs(con, shown)
    body = [
        [_where(row), *_contexts(row, outputs, decode), _CLASSES.get(row["class"], row["class"]), _gap(row, "ar"),
         _gap(row, "spec"), f"{row['differing_tokens']} of {row['compared_tokens']}"]
        for row in shown
    ]  # fmt: skip
    heads = ("arm and prompt", "AR went on", "the arm went on", "class", "AR's gap", "the arm's gap",
             "tokens that differ")  # fmt: skip
    notes = ["Only the first difference of an output is evidence; what follows depends on it. Gaps are between the two "
             "tokens' logits, in that pass; ulp is the step between neighbouring numbers there.", _MEANING]  # fmt: skip
    if decode is None:
        notes.append("The model's tokenizer is not at hand here, so tokens show as their ids.")
    if len(found) > len(shown):
        notes.append(f"Shown: {len(shown)} of {len(found)}, the gravest first; the query gives all.")
    caption = "First differences from AR's outputs"
    return join([table(caption, heads, body, left=4, note=" ".join(notes)), evidence(DIVERGENCES, found)])


_CLASSES = {
    "tie_both": "tie in both",
    "tie_ar": "tie in AR's",
    "tie_spec": "tie in the arm's",
    "ulp1": "≤\u00a01\u00a0ulp",
    "ulp_k": "≤\u00a04\u00a0ulp",
}
_MEANING = (
    "Class: a tie is exact, in the logits of that pass; ≤ 4 ulp is nearly one; unresolved means that one token is not "
    "among the other pass's top two; a violation is explained by nothing recorded."
)


def _where(row: Row) -> Html:
    repeat = f", repeat {row['repeat']}" if row["repeat"] else ""
    place = f"{row['prompt_id']}, position {row['position']}{repeat}"
    return join([f"{row['arm']} on {row['workload']}", el("span", place, class_="detail")])


def _gap(row: Row, side: str) -> Html:
    gap, ulps = row[f"{side}_gap"], row[f"{side}_gap_ulp"]
    ulp = Html("") if ulps is None else el("span", f"{ulps:.3g} ulp", class_="interval")
    return join([number(gap, ".4g"), ulp])


def _outputs(con: duckdb.DuckDBPyConnection, found: Sequence[Row]) -> dict[tuple[str, int], list[int]]:
    """Outputs of the jobs that these divergences are between."""
    wanted = {(row[key], row["attempt"]) for row in found for key in ("job_id", "ar_job_id")}
    query = "select job_id, attempt, output_ids from jobs where not warmup and job_id in (select unnest($ids))"
    answer = con.execute(query, {"ids": [job for job, _ in wanted]}).fetchall()
    return {(job, attempt): ids for job, attempt, ids in answer}


def _contexts(row: Row, outputs: Mapping[tuple[str, int], list[int]], decode: Decode | None) -> list[Html]:
    return [
        in_context(outputs.get((row[key], row["attempt"]), []), row["position"], decode)
        for key in ("ar_job_id", "job_id")
    ]  # fmt: skip


def in_context(ids: Sequence[int], position: int, decode: Decode | None) -> Html:
    """A token marked among its neighbours: their text, or their ids without a decoder."""
    start = max(0, position - BEFORE)
    before, token, after = ids[start:position], ids[position : position + 1], ids[position + 1 : position + 1 + AFTER]
    parts = (
        _texts(before, token, after, decode)
        if decode
        else [" ".join(map(str, part)) for part in (before, token, after)]
    )
    gap = "" if decode else " "
    marked = el("mark", visible(parts[1]) if token else "(ends)")
    shown = join(["…" if start else "", parts[0], gap, marked, gap, parts[2]])
    id_note = el("span", f"token {token[0]} at {position}", class_="interval") if token else Html("")
    return join([el("span", shown, class_="text"), id_note])


def _texts(before: Sequence[int], token: Sequence[int], after: Sequence[int], decode: Decode) -> list[str]:
    """Texts of three runs of tokens, decoded together: a character may span tokens, a space belong to its word."""
    ends = [decode(list(ids)) for ids in (before, [*before, *token], [*before, *token, *after])]
    if ends[1].startswith(ends[0]) and ends[2].startswith(ends[1]):
        return [ends[0], ends[1][len(ends[0]) :], ends[2][len(ends[1]) :]]
    return [decode(list(ids)) for ids in (before, token, after)]


def visible(token: str) -> str:
    """A token's text with what would not be seen made visible."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥")
    return shown if shown.strip() else shown.replace(" ", "␣") or "(nothing)"

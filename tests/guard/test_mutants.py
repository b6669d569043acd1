"""The guard is tested against planted bugs: every mutant runs to its end, is caught by the checks named for it and by
no other, and would go unseen without them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from bugs_engine import (
    another_dtype_in_one_arm,
    bias_in_wide_passes,
    bool_mask_added,
    chain_without_a_mask,
    compaction_moves_keys_only,
    compaction_one_place_off,
    crop_one_too_few,
    crop_one_too_many,
    evidence_of_another_row,
    logits_recorded_too_high,
    node_sees_its_sibling,
    positions_by_index,
    stale_logits,
)
from bugs_loop import (
    accept_compares_with_the_wrong_row,
    another_cap_in_one_arm,
    bonus_from_the_wrong_node,
    cap_overrun,
    end_inside_a_draft_not_cut,
    option_ignored,
    reference_arm_sampled,
    state_carried_over,
)
from bugs_records import (
    an_arm_without_outputs,
    an_output_cut_short,
    ar_passes_one_place_off,
    draftless_steps_dropped,
    drafts_counted_twice,
    edited_view,
    other_settings_in_the_ledger,
    sums_lost,
    swapped_prompts,
    two_prompts_swapped,
    unchecked,
)

from dfbench.analysis import guard as judging
from dfbench.drafters.registry import create
from dfbench.workers import loop

Patch = pytest.MonkeyPatch
BOS = 1


@dataclass(frozen=True)
class Mutant:
    """A planted bug: `plant` patches the code before the run, `spoil` changes the run's files after it."""

    name: str
    by: frozenset[str]
    plant: Callable[[Patch], None] = lambda patch: None
    spoil: Callable[[Path], None] = lambda run: None
    settings: dict[str, Any] = field(default_factory=dict)


def by(*checks: str) -> frozenset[str]:
    """The checks that must see a mutant."""
    return frozenset(checks)


BF16 = {"dtype": torch.bfloat16}
MORE = {"count": 14}

MUTANTS = [
    Mutant("crop one too many", by("divergence", "noise", "teacher"), crop_one_too_many),
    Mutant("crop one too few", by("divergence", "noise", "teacher", "unresolved"), crop_one_too_few),
    Mutant("a node sees its sibling", by("teacher"), node_sees_its_sibling),
    Mutant("positions by index instead of depth", by("divergence", "teacher"), positions_by_index),
    Mutant("compaction moves keys only", by("divergence", "teacher"), compaction_moves_keys_only),
    Mutant("compaction one place off", by("divergence", "teacher"), compaction_one_place_off),
    Mutant("a chain without a mask", by("divergence", "noise", "teacher"), chain_without_a_mask),
    Mutant("a bool mask added", by("divergence", "noise", "teacher"), bool_mask_added, settings={"attention": "eager"}),
    Mutant("stale logits", by("coverage"), stale_logits),
    Mutant("stale logits, unchecked", by("rows", "teacher"), unchecked(stale_logits)),
    Mutant("a bias in wide passes", by("divergence", "noise", "teacher"), bias_in_wide_passes),
    Mutant("a bias in wide passes, 16 bits", by("teacher"), bias_in_wide_passes, settings=BF16),
    Mutant("logits recorded too high, 16 bits", by("bias"), logits_recorded_too_high, settings=BF16),
    Mutant("another dtype in one arm", by("teacher"), another_dtype_in_one_arm),
    Mutant("evidence of another row", by("coverage", "teacher"), evidence_of_another_row),
    Mutant("accept compares with the wrong row", by("coverage"), accept_compares_with_the_wrong_row),
    Mutant(
        "accept compares with the wrong row, unchecked",
        by("rows", "teacher", "control"),
        unchecked(accept_compares_with_the_wrong_row),
        settings=MORE,
    ),
    Mutant("bonus from the wrong node", by("coverage"), bonus_from_the_wrong_node),
    Mutant("bonus from the wrong node, unchecked", by("rows", "teacher"), unchecked(bonus_from_the_wrong_node)),
    Mutant("an end inside a draft not cut", by("coverage"), end_inside_a_draft_not_cut, settings={"end": True}),
    Mutant(
        "an end inside a draft not cut, unchecked",
        by("rows", "divergence"),
        unchecked(end_inside_a_draft_not_cut),
        settings={"end": True},
    ),
    Mutant("cap overrun", by("coverage"), cap_overrun),
    Mutant("another cap in one arm", by("divergence"), unchecked(another_cap_in_one_arm)),
    Mutant("reference arm sampled", by("teacher"), reference_arm_sampled),
    Mutant("drafter state carried over", by("replay"), state_carried_over),
    Mutant("an option ignored by the drafter", by("replay"), option_ignored),
    Mutant("two prompts swapped", by("replay", "teacher"), two_prompts_swapped),
    Mutant("an arm without outputs", by("coverage"), an_arm_without_outputs),
    Mutant("an output cut short", by("rows", "divergence"), an_output_cut_short),
    Mutant("a job id that ignores an option", by("identity"), spoil=other_settings_in_the_ledger),
    Mutant("warm-up counted", by("figures"), edited_view("pairs", "not mine.warmup and ", ""), settings={"warm": True}),
    Mutant("draftless steps dropped", by("figures"), draftless_steps_dropped),
    Mutant(
        "draftless steps dropped, without sums",
        by("figures"),
        edited_view("job_passes", "count(*) as steps", "count(*) filter (drafted > 0) as steps"),
        spoil=sums_lost,
    ),
    Mutant("every draft counted twice", by("figures"), drafts_counted_twice),
    Mutant("AR's passes one place off", by("figures"), ar_passes_one_place_off),
    Mutant("the beginning of text twice", by("prompts"), settings={"doubled": True}),
]

SOLE = {"coverage", "teacher", "bias", "replay", "identity", "figures", "prompts"}
"""Checks that some mutant would slip past without. The others see what a second check sees too, in another way."""


@pytest.fixture(scope="module")
def seen() -> dict[str, set[str]]:
    """Which checks caught which mutant; filled by the tests below."""
    return {}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught_by_its_checks_and_by_nothing_else(
    mutant: Mutant, lab: Callable[..., Any], monkeypatch: Patch, seen: dict[str, set[str]]
) -> None:
    made = lab()
    made = lab(**settings_of(mutant, made))
    mutant.plant(monkeypatch)
    made.run()
    mutant.spoil(made.run_dir)
    made.examine()
    found = {finding.check for finding in made.verdict().findings}
    seen[mutant.name] = found
    assert mutant.by <= found, "a check that should see it does not"
    for check in mutant.by:
        others = judging.CHECKS.keys() | {"examined"}
        assert not made.verdict(skip=others - {check}).ok, f"{check} alone does not see it"
    assert made.verdict(skip=found).ok, "it must go unseen when those checks are off"


def test_every_check_catches_a_mutant_and_most_are_needed(seen: dict[str, set[str]]) -> None:
    if len(seen) < len(MUTANTS):
        pytest.skip("only some mutants were run")
    assert set().union(*seen.values()) >= set(judging.CHECKS)
    assert {next(iter(checks)) for checks in seen.values() if len(checks) == 1} >= SOLE


def test_the_docs_list_the_planted_bugs() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "guard.md").read_text(encoding="utf-8")
    for mutant in MUTANTS:
        seen_by = ", ".join(f"`{check}`" for check in sorted(mutant.by))
        assert f"| {mutant.name} | {seen_by} |" in text
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == judging.CHECKS.keys() | {"examined"}


def settings_of(mutant: Mutant, plain: Any) -> dict[str, Any]:
    """The laboratory's settings for this mutant; `plain` is one with the usual ones."""
    swapped_prompts[:] = plain.prompts
    settings = dict(mutant.settings)
    if settings.pop("doubled", False):
        settings["prompts"] = [dataclasses.replace(p, prompt_ids=(BOS, *p.prompt_ids)) for p in plain.prompts]
    if settings.pop("warm", False):
        settings["warmups"] = [dataclasses.replace(plain.prompts[3], prompt_id="w0")]
    if settings.pop("end", False):
        settings |= with_an_end_inside_a_draft(plain)
    if count := settings.pop("count", 0):
        settings["prompts"] = plain.make_prompts(count)
    return settings


def with_an_end_inside_a_draft(plain: Any) -> dict[str, Any]:
    """Settings under which an end of text is accepted as a draft that more tokens follow in the same pass.

    The prompts go on with what the model says after them, so that it repeats itself from the first step on.
    """
    target, ar, arm = plain.target(), plain.arms[0], plain.arms[1]
    longer = []
    for prompt in plain.prompts:
        said = loop.decode(target, create(ar.drafter, {}), prompt.prompt_ids, max_new_tokens=24).output
        longer.append(dataclasses.replace(prompt, prompt_ids=(*prompt.prompt_ids, *said)))
    for prompt in longer:
        trace = loop.decode(target, create(arm.drafter, arm.params), prompt.prompt_ids, max_new_tokens=28)
        for step in trace.steps:
            for place in range(step.position, step.position + step.accepted):
                if trace.output[place] not in trace.output[:place]:
                    return {"prompts": longer, "eos_ids": frozenset({trace.output[place]})}
    raise AssertionError("no such token: choose other prompts")

"""The guard is tested against planted bugs: every mutant runs to its end, is caught by the checks named for it and by
no other, and would go unseen without them."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from dfbench.analysis import guard as judging
from dfbench.analysis import store
from dfbench.cluster import commit
from dfbench.cluster.ledger import Ledger
from dfbench.drafters.cacheback import Cacheback
from dfbench.drafters.registry import create
from dfbench.workers import actor, engine, loop, records, tree
from dfbench.workers.engine import TorchTarget
from dfbench.workers.spec import ArmSpec, PromptSpec

Patch = pytest.MonkeyPatch
BOS, EOS = 1, 2


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


# --- engine -------------------------------------------------------------------------------------------------------


def crop_one_too_many(patch: Patch) -> None:
    keep = TorchTarget._keep

    def mutant(self: TorchTarget, path: Any, emitted: Any) -> None:
        nodes = self._nodes
        keep(self, path, emitted)
        if self._cache is not None and nodes:
            self._cache.crop(-1)
            self._past -= 1

    patch.setattr(TorchTarget, "_keep", mutant)


def crop_one_too_few(patch: Patch) -> None:
    keep = TorchTarget._keep

    def mutant(self: TorchTarget, path: Any, emitted: Any) -> None:
        surplus = self._nodes - len(path[: len(emitted) - 1])
        if surplus > 1:
            self._nodes -= 1
        keep(self, path, emitted)
        if surplus > 1:
            self._past += 1

    patch.setattr(TorchTarget, "_keep", mutant)


def node_sees_its_sibling(patch: Patch) -> None:
    visibility = tree.visibility

    def mutant(parents: Any, lead: int = 1) -> np.ndarray:
        seen = visibility(parents, lead)
        for node in range(1, len(parents)):
            if parents[node] == parents[node - 1]:
                seen[lead + node, lead + node - 1] = True
        return seen

    patch.setattr(tree, "visibility", mutant)


def positions_by_index(patch: Patch) -> None:
    patch.setattr(engine, "offsets", lambda depths, lead=1: list(range(lead + len(depths))))


def compaction_moves_keys_only(patch: Patch) -> None:
    compact = engine.compact

    def mutant(layers: Any, start: int, path: Any) -> None:
        values = [layer.values.clone() for layer in layers]
        compact(layers, start, path)
        for layer, kept in zip(layers, values, strict=True):
            layer.values = kept

    patch.setattr(engine, "compact", mutant)


def compaction_one_place_off(patch: Patch) -> None:
    compact = engine.compact
    patch.setattr(
        engine, "compact", lambda layers, start, path: compact(layers, start, [max(node - 1, 0) for node in path])
    )


def chain_without_a_mask(patch: Patch) -> None:
    """Every fed token sees all the others, those after it included."""
    causal = tree.Masks.causal
    patch.setattr(tree.Masks, "causal", lambda self, past, fed: torch.ones_like(causal(self, past, fed)))


def bool_mask_added(patch: Patch) -> None:
    """Eager attention adds its mask to the scores; a bool one counts as 0 and 1."""
    patch.setattr(tree.Masks, "_form", lambda self, mask: mask.to(self._dtype))


def stale_logits(patch: Patch) -> None:
    """A wide pass answers with the root's row of the pass before."""
    run = TorchTarget._pass

    def mutant(self: TorchTarget, draft: Any) -> Any:
        before = getattr(self, "stale", None)
        verdict = run(self, draft)
        self.stale = verdict.argmax[0]  # type: ignore[attr-defined]
        if before is None or not draft.tokens:
            return verdict
        return verdict._replace(argmax=[before, *verdict.argmax[1:]])

    patch.setattr(TorchTarget, "_pass", mutant)


BIAS = {torch.bfloat16: 0.2}


def bias_in_wide_passes(patch: Patch) -> None:
    """A constant, small against the activations, is added to one layer's output where a step feeds several tokens."""
    run = TorchTarget._pass

    def mutant(self: TorchTarget, draft: Any) -> Any:
        layer = self.model.model.layers[1].mlp
        wide = bool(draft.tokens) and self._past > 0
        hook = layer.register_forward_hook(
            lambda module, given, out: out + (BIAS.get(out.dtype, 0.02) if wide else 0.0)
        )
        try:
            return run(self, draft)
        finally:
            hook.remove()

    patch.setattr(TorchTarget, "_pass", mutant)


def another_dtype_in_one_arm(patch: Patch) -> None:
    record = actor.Worker._record

    def mutant(self: actor.Worker, shard: Any, job: Any, arm: ArmSpec, *rest: Any) -> Any:
        target: Any = self._target
        if arm.name != "pld":
            return record(self, shard, job, arm, *rest)
        own = target.model
        target.model = rounded(own)
        try:
            return record(self, shard, job, arm, *rest)
        finally:
            target.model = own

    patch.setattr(actor.Worker, "_record", mutant)


@functools.cache
def rounded(model: Any) -> Any:
    """The model with its weights rounded to 16 bits."""
    copy = type(model)(model.config).to(model.dtype).eval()
    copy.load_state_dict({name: value.bfloat16().to(value.dtype) for name, value in model.state_dict().items()})
    return copy


def evidence_of_another_row(patch: Patch) -> None:
    """The recorded top two are those of the row after."""
    record = TorchTarget._record

    def mutant(self: TorchTarget, path: Any, count: int) -> None:
        if count > 1:
            self._rows = self._rows.roll(1, 0)
            self._top_two.hold(*self._rows.max(-1))
        record(self, path, count)

    patch.setattr(TorchTarget, "_record", mutant)


def logits_recorded_too_high(patch: Patch) -> None:
    """By one to two units in the last place: too little for any single token to show it."""
    read = engine.TopTwo.read

    def mutant(self: engine.TopTwo) -> Any:
        evidence = read(self)
        higher = 1 + 2.0**-6
        return evidence._replace(top1_logit=evidence.top1_logit * higher, top2_logit=evidence.top2_logit * higher)

    patch.setattr(engine.TopTwo, "read", mutant)


# --- loop ---------------------------------------------------------------------------------------------------------


def accept_compares_with_the_wrong_row(patch: Patch) -> None:
    accept = loop.accept

    def mutant(draft: Any, argmax: Any) -> Any:
        if len(argmax) > 2:
            argmax = [argmax[0], *argmax[2:], argmax[1]]
        return accept(draft, argmax)

    patch.setattr(loop, "accept", mutant)


def bonus_from_the_wrong_node(patch: Patch) -> None:
    accept = loop.accept

    def mutant(draft: Any, argmax: Any) -> Any:
        path, emitted = accept(draft, argmax)
        return path, [*emitted[:-1], argmax[0] if path else emitted[-1]]

    patch.setattr(loop, "accept", mutant)


def unchecked(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """The same bug where nothing checks rows at the commit."""

    def both(patch: Patch) -> None:
        plant(patch)
        patch.setattr(commit, "breaches", lambda *tables: {})

    return both


def end_inside_a_draft_not_cut(patch: Patch) -> None:
    patch.setattr(loop, "cut", lambda emitted, room, eos_ids: emitted[:room])


def cap_overrun(patch: Patch) -> None:
    cut, draft_cut = loop.cut, loop.Draft.cut
    patch.setattr(loop, "cut", lambda emitted, room, eos_ids: cut(emitted, room + 8, eos_ids))
    patch.setattr(loop.Draft, "cut", lambda self, depth: draft_cut(self, depth + 8))


def another_cap_in_one_arm(patch: Patch) -> None:
    decode = actor.decode

    def mutant(target: Any, drafter: Any, prompt: Any, *, max_new_tokens: int, **rest: Any) -> Any:
        fewer = 5 if drafter.name == "pld" else 0
        return decode(target, drafter, prompt, max_new_tokens=max_new_tokens - fewer, **rest)

    patch.setattr(actor, "decode", mutant)


def reference_arm_sampled(patch: Patch) -> None:
    """AR takes the second-best token once in a while."""
    run = TorchTarget._pass

    def mutant(self: TorchTarget, draft: Any) -> Any:
        verdict = run(self, draft)
        if self._past and self._past % 11 == 0 and not draft.tokens:
            second = int(self._rows[0].topk(2).indices[1])
            self._rows = self._rows.clone()
            self._rows[0, verdict.argmax[0]] = self._rows[0, second] - 1
            self._top_two.hold(*self._rows.max(-1))
            return verdict._replace(argmax=[second])
        return verdict

    patch.setattr(TorchTarget, "_pass", mutant)


# --- drafters and their state -------------------------------------------------------------------------------------


def state_carried_over(patch: Patch) -> None:
    """A cold arm's table survives its reset."""
    reset = Cacheback.reset

    def mutant(self: Cacheback) -> None:
        table = getattr(self, "_table", None)
        reset(self)
        if table is not None:
            self._table = table

    patch.setattr(Cacheback, "reset", mutant)


def option_ignored(patch: Patch) -> None:
    """The worker makes the drafter with another draft length than the arm's, which is what it records."""
    drafter = actor.Worker._drafter

    def mutant(self: actor.Worker, arm: ArmSpec) -> Any:
        if arm.drafter == "pld":
            arm = dataclasses.replace(arm, params={**arm.params, "draft_len": 2})
        return drafter(self, arm)

    patch.setattr(actor.Worker, "_drafter", mutant)


# --- plan, records and views --------------------------------------------------------------------------------------


def two_prompts_swapped(patch: Patch) -> None:
    """In one arm only."""
    record = actor.Worker._record

    def mutant(self: actor.Worker, shard: Any, job: Any, arm: ArmSpec, prompt: PromptSpec, *rest: Any) -> Any:
        known = {made.prompt_id: made for made in swapped_prompts}
        other = {"p0": "p1", "p1": "p0"}.get(prompt.prompt_id)
        if arm.name == "pld" and other:
            prompt = known[other]
        return record(self, shard, job, arm, prompt, *rest)

    patch.setattr(actor.Worker, "_record", mutant)


swapped_prompts: list[PromptSpec] = []


def an_arm_without_outputs(patch: Patch) -> None:
    """The ledger says done, the files lack the rows."""
    write = commit.write_files

    def mutant(run_dir: Path, tables: dict[str, pa.Table], **where: Any) -> Any:
        kept = {name: table.filter(pc.not_equal(table["arm"], "pld")) for name, table in tables.items() if table}
        return write(run_dir, tables | kept, **where)

    patch.setattr(commit, "write_files", mutant)


def an_output_cut_short(patch: Patch) -> None:
    """Rows of one output are lost on the way to disk, and nothing checks them."""
    write = commit.write_files

    def mutant(run_dir: Path, tables: dict[str, pa.Table], **where: Any) -> Any:
        jobs = tables["jobs"].to_pylist() if "jobs" in tables else []
        for job in jobs:
            if job["arm"] == "pld" and job["prompt_id"] == "p2":
                job["output_ids"] = job["output_ids"][:-3]
        if not jobs:
            return write(run_dir, tables, **where)
        return write(run_dir, tables | {"jobs": pa.Table.from_pylist(jobs, schema=records.JOBS)}, **where)

    patch.setattr(commit, "write_files", mutant)


def edit(view: store.View, old: str, new: str) -> store.View:
    """The view with `new` for `old` wherever its SQL stands."""
    return view._replace(
        **{
            field: text.replace(old, new)
            for field, text in view._asdict().items()
            if isinstance(text, str) and old in text
        }
    )


def edited_view(name: str, old: str, new: str) -> Callable[[Patch], None]:
    """The view with a mistake in it."""

    def plant(patch: Patch) -> None:
        sound = store.views()
        assert any(view.name == name and old in view.sql for view in sound)
        wrong = tuple(edit(view, old, new) if view.name == name else view for view in sound)
        patch.setattr(store, "views", lambda: wrong)

    return plant


def other_settings_in_the_ledger(run: Path) -> None:
    """A job id that ignores an option: a run resumed with another value of it keeps the old rows as done."""
    with Ledger.open(run) as ledger:
        spec = ledger.meta("run")
        assert '"stop_at_eos": false' in spec
        ledger.set_meta("run", spec.replace('"stop_at_eos": false', '"stop_at_eos": true'))


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
    Mutant(
        "draftless steps dropped",
        by("figures"),
        edited_view("job_passes", "count(*) as steps", "count(*) filter (drafted > 0) as steps"),
    ),
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

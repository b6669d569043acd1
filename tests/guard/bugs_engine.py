"""Planted bugs of the engine: cache, masks, positions, logits and the evidence of them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from dfbench.workers import actor, engine, tree
from dfbench.workers.engine import TorchTarget
from dfbench.workers.spec import ArmSpec

Patch = pytest.MonkeyPatch


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
            layer.values.copy_(kept)

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
            self._top_two.look(self._rows)
        record(self, path, count)

    patch.setattr(TorchTarget, "_record", mutant)


def logits_recorded_too_high(patch: Patch) -> None:
    """By one to two units in the last place: too little for any single token to show it."""
    read = TorchTarget.evidence

    def mutant(self: TorchTarget) -> Any:
        evidence = read(self)
        higher = 1 + 2.0**-6
        return evidence._replace(top1_logit=evidence.top1_logit * higher, top2_logit=evidence.top2_logit * higher)

    patch.setattr(TorchTarget, "evidence", mutant)

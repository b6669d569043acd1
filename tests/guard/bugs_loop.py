"""Planted bugs of the loop and of drafters: what is accepted, where an output ends, what a drafter remembers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dfbench.drafters.cacheback import Cacheback
from dfbench.workers import actor, loop
from dfbench.workers.engine import TorchTarget
from dfbench.workers.spec import ArmSpec

Patch = pytest.MonkeyPatch


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
            self._top_two.look(self._rows)
            return verdict._replace(argmax=[second])
        return verdict

    patch.setattr(TorchTarget, "_pass", mutant)


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

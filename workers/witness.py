"""The guard's re-runs on the target: shape control, teacher-forced scores and witnesses. `analysis` judges their rows.

Rows by kind:
    control   AR decoded at the arm's own query widths, its drafts being dummies that are always discarded
    noise     a teacher-forced score of the control's own output: what shape noise alone does to logits here
    teacher   a teacher-forced score of the recorded output, position by position
    again     plain AR once more, on whichever worker the guard was given
    witness   at a divergence, the choice of a re-run of the common prefix in AR's passes and in the arm's passes
    replay    one row a job: a fresh drafter on the recorded output; `position` is where its first step differs from the
              recorded one, -1 where none does; `queries` is the number of steps. Shows state that should not be there
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dfbench.drafters import registry
from dfbench.drafters.base import EMPTY, Draft
from dfbench.errors import EngineError
from dfbench.workers.actor import drafter_context
from dfbench.workers.loop import decode
from dfbench.workers.records import WITNESS, WorkerFacts
from dfbench.workers.score import Score, score
from dfbench.workers.spec import ArmSpec, GuardJob, GuardSpec, PassShape
from dfbench.workers.target import Evidence, RecordedTarget, Target

if TYPE_CHECKING:
    from dfbench.workers.engine import TorchTarget


def guard_table(target: TorchTarget, spec: GuardSpec, job: GuardJob, facts: WorkerFacts) -> pa.Table:
    """Every witness row of one job: AR is held against itself, another arm against AR."""
    prompt = _prompt_ids(target, spec)
    target.top_k = 0
    rows = _score_rows("teacher", target, job, prompt, job.output_ids, job.recorded_logits)
    if job.job_id == spec.ar.job_id:
        rows += _again_rows(target, job, prompt)
    else:
        tokens, evidence = control(target, prompt, job.passes, len(job.output_ids))
        rows += _evidence_rows("control", job, tokens, evidence, job.passes)
        rows += _score_rows("noise", target, job, prompt, tokens, evidence.top1_logit)
        rows += _witness_rows(target, spec.ar, job, prompt)
        rows += _replay_rows(target, spec, job, prompt)
    shared = {
        "run_id": spec.run_id,
        "workload": spec.workload,
        "prompt_id": spec.prompt_id,
        "worker_id": facts.worker_id,
        "device": facts.device,
    }
    return pa.Table.from_pylist([shared | row for row in rows], schema=WITNESS)


def control(
    target: Target, prompt: Sequence[int], passes: Sequence[PassShape], length: int
) -> tuple[list[int], Evidence]:
    """AR whose every pass is as wide as the pass in which the arm emitted that position; `length` tokens in all."""
    output = [target.prefill(prompt)]
    for shape, _ in _by_position(passes):
        if len(output) >= length:
            break
        verdict = target.verify(dummy(shape, (), output[-1]))
        output.append(int(verdict.argmax[0]))
        target.commit([], output[-1:])
    return output, _evidence(target, len(output))


def forced(
    target: Target, prompt: Sequence[int], output: Sequence[int], passes: Sequence[PassShape], until: int
) -> tuple[int, Evidence]:
    """Feed `output` in the given passes up to and including the one that emits position `until`.

    Rejected drafts are unknown and filled with dummies; accepted ones stand first, as a chain. Returns the target's
    own choice at `until` and the evidence of the positions fed.
    """
    choice = target.prefill(prompt)
    if until == 0:
        return choice, _evidence(target, 1)
    fed = 1
    for shape in passes:
        accepted = output[shape.position : shape.position + shape.accepted]
        verdict = target.verify(dummy(shape, accepted, output[shape.position - 1]))
        emitted = list(output[shape.position : shape.position + shape.emitted])
        target.commit(list(range(len(accepted))), emitted)
        fed += len(emitted)
        if until < shape.position + shape.emitted:
            return int(verdict.argmax[until - shape.position]), _evidence(target, fed)
    raise EngineError(f"no pass of the recorded run emits position {until}.")


def dummy(shape: PassShape, accepted: Sequence[int], filler: int) -> Draft:
    """A draft of the shape's width: `accepted` as a chain from the root, then filler; what exceeds its depth hangs
    below the root."""
    if not shape.drafted:
        return EMPTY
    tokens = [*accepted, *[filler] * (shape.drafted - len(accepted))]
    if shape.depth >= shape.drafted:
        return Draft(tokens)
    return Draft(tokens, [i - 1 if i < shape.depth else -1 for i in range(shape.drafted)])


def replayed(target: TorchTarget, arm: ArmSpec, prompt: Sequence[int], job: GuardJob, max_new_tokens: int) -> int:
    """Where a fresh drafter on the recorded output first takes another step than the recorded run; -1 = nowhere."""
    drafter = registry.create(arm.drafter, arm.params, drafter_context(target))
    recorded = _SameBudget(target, len(prompt))
    recorded.load(job.output_ids)
    # The recorded output ends where it ended; what ended it plays no part here.
    trace = decode(recorded, drafter, prompt, max_new_tokens=max_new_tokens, eos_ids=_ends(job, max_new_tokens))
    for mine, theirs in zip(trace.steps, job.passes, strict=False):
        if (mine.position, mine.drafted, mine.accepted) != (theirs.position, theirs.drafted, theirs.accepted):
            return min(mine.position, theirs.position)
    return -1 if len(trace.steps) == len(job.passes) else len(job.output_ids)


class _SameBudget(RecordedTarget):
    """A recorded target that offers the drafts the room that the torch target had: query budget and context left."""

    def __init__(self, target: TorchTarget, prompt_tokens: int) -> None:
        super().__init__(target.vocab_size, target.eos_ids)
        self._most = target.spec.max_queries - 1
        self._context = target.context_limit - prompt_tokens

    @property
    def max_nodes(self) -> int:  # type: ignore[override]
        return max(0, min(self._most, self._context - self._at))


def plain(length: int) -> list[PassShape]:
    """The passes of a plain AR decode of `length` tokens."""
    return [PassShape(position, 0, 0, 0, 1) for position in range(1, length)]


def _by_position(passes: Sequence[PassShape]) -> Iterator[tuple[PassShape, int]]:
    for shape in passes:
        for position in range(shape.position, shape.position + shape.emitted):
            yield shape, position


def _evidence(target: Target, length: int) -> Evidence:
    evidence = target.evidence()
    if evidence is None:
        raise EngineError("the guard needs a target that records logits.")
    return Evidence(*(column[:length] for column in evidence))


def _row(kind: str, job: GuardJob, position: int, queries: int, shape: str, **values: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "job_id": job.job_id,
        "attempt": job.attempt,
        "arm": job.arm,
        "position": position,
        "shape": shape,
        "queries": queries,
        "recorded_logit": None,
        **values,
    }


def _again_rows(target: TorchTarget, job: GuardJob, prompt: Sequence[int]) -> list[dict[str, Any]]:
    passes = plain(len(job.output_ids))
    tokens, evidence = control(target, prompt, passes, len(job.output_ids))
    return _evidence_rows("again", job, tokens, evidence, passes)


def _evidence_rows(
    kind: str, job: GuardJob, tokens: Sequence[int], evidence: Evidence, passes: Sequence[PassShape]
) -> list[dict[str, Any]]:
    width = {position: shape.drafted + 1 for shape, position in _by_position(passes)}
    return [
        _row(
            kind,
            job,
            position,
            width.get(position, 1),
            "ar" if kind == "again" else "spec",
            token_id=int(token),
            token_logit=float(evidence.top1_logit[position]),
            **_top_two(evidence, position),
        )
        for position, token in enumerate(tokens)
    ]


def _score_rows(
    kind: str,
    target: TorchTarget,
    job: GuardJob,
    prompt: Sequence[int],
    output: Sequence[int],
    recorded: Sequence[float] | np.ndarray,
) -> list[dict[str, Any]]:
    scored = score(target, prompt, output)
    return [
        _row(
            kind,
            job,
            position,
            len(prompt) + len(output),
            "full",
            token_id=int(token),
            token_logit=float(scored.token_logit[position]),
            recorded_logit=float(recorded[position]) if len(recorded) else None,
            **_top_two(scored, position),
        )
        for position, token in enumerate(output)
    ]


def _witness_rows(target: TorchTarget, ar: GuardJob, job: GuardJob, prompt: Sequence[int]) -> list[dict[str, Any]]:
    at = job.divergence
    if not job.passes or at is None or at >= min(len(ar.output_ids), len(job.output_ids)):
        return []
    rows = []
    runs = (("ar", ar.output_ids, plain(len(ar.output_ids))), ("spec", job.output_ids, job.passes))
    for shape, output, passes in runs:
        _, evidence = forced(target, prompt, output, passes, at)
        rows.append(
            _row(
                "witness",
                job,
                at,
                next((s.drafted + 1 for s, position in _by_position(passes) if position == at), len(prompt)),
                shape,
                token_id=int(output[at]),
                token_logit=float(evidence.top1_logit[at]),
                **_top_two(evidence, at),
            )
        )
    return rows


def _replay_rows(target: TorchTarget, spec: GuardSpec, job: GuardJob, prompt: Sequence[int]) -> list[dict[str, Any]]:
    """None where a replay cannot say anything: a job without recorded steps, a drafter that reads logits, a cache that
    earlier prompts filled, a query budget that shrinks with what is fed again."""
    arm = next(arm for arm in spec.arms if arm.name == job.arm)
    reads_logits = registry.find(arm.drafter).top_k > 0
    if not job.passes or reads_logits or arm.cache == "carried" or target.spec.kv_repair == "refeed":
        return []
    where = replayed(target, arm, prompt, job, spec.max_new_tokens)
    return [_row("replay", job, where, len(job.passes), "spec")]


def _ends(job: GuardJob, max_new_tokens: int) -> frozenset[int]:
    return frozenset(job.output_ids[-1:]) if len(job.output_ids) < max_new_tokens else frozenset()


def _prompt_ids(target: TorchTarget, spec: GuardSpec) -> Sequence[int]:
    """The prompt as the jobs saw it: later turns hold AR's answers to the earlier ones."""
    prompt = spec.prompt
    for answer in spec.history:
        prompt = target.next_turn(prompt, answer, spec.enable_thinking)
    return prompt.prompt_ids


def _top_two(evidence: Evidence | Score, position: int) -> dict[str, Any]:
    return {
        "top1_id": int(evidence.top1_id[position]),
        "top1_logit": float(evidence.top1_logit[position]),
        "top2_id": int(evidence.top2_id[position]),
        "top2_logit": float(evidence.top2_logit[position]),
    }

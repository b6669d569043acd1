"""A finished run as a source: AR's outputs, prompt by prompt, as its folder holds them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dfbench.cluster.ledger import Ledger
from dfbench.cluster.runspec import RunSpec, ShardReader
from dfbench.cluster.sources import Recording, SourceOptions, Summary
from dfbench.errors import RunError
from dfbench.workers.spec import PromptSpec

COLUMNS = ["job_id", "workload", "prompt_id", "arm", "drafter", "repeat", "turn", "warmup", "pair_only"]
_VALUES = ["output_ids", "max_new_tokens"]
DIVERGED = "an arm's live output differs from AR's, which is what is replayed"


class RunSource:
    """Recordings of the AR arm's first repeat."""

    def __init__(self, run_dir: Path, options: SourceOptions) -> None:
        self.path = run_dir
        self.options = options
        self.summary = Summary(files=1)
        with Ledger.open(run_dir, readonly=True) as ledger:
            self.run: RunSpec = ledger.run
            self.files = [run_dir / file.name for file in ledger.files() if file.table == "jobs"]
            facts: list[dict[str, Any]] = [worker.facts for worker in ledger.workers()]
        if not any(arm.drafter == "ar" for arm in self.run.arms):
            raise RunError(
                f"{run_dir} has no AR arm whose outputs could be replayed: add the arm `ar` and run it again."
            )
        known = next((f for f in facts if f.get("vocab_size")), {})
        self.vocabulary: int | None = options.vocab_size or known.get("vocab_size")
        ends: list[int] = next((f["eos_ids"] for f in facts if f.get("eos_ids")), [])
        self.eos_ids: frozenset[int] = frozenset() if self.run.ignore_eos else frozenset(ends)

    def cap_of_jobs(self) -> int:
        """The run's own cap, so that drafts are cut where they were live."""
        caps = (pc.max(batch["max_new_tokens"]).as_py() for batch in self._rows() if batch.num_rows)
        return max(caps, default=1)

    @property
    def label(self) -> str:
        """The model that answered."""
        return self.run.target.model

    def __iter__(self) -> Iterator[Recording]:
        """Every AR output with its prompt, in the order of the run's files."""
        prompts = _Prompts(self.path, self.run)
        outputs: dict[tuple[str, str], list[int]] = {}
        turn = 0
        while turn == 0 or prompts.expecting:  # files need not be in the order of turns
            for row in self._answers(turn):
                outputs[row["workload"], row["prompt_id"]] = row["output_ids"]
                yield self._recording(row, prompts)
            turn += 1
        if not outputs:
            raise RunError(f"{self.path} has no finished AR job: let the run get further, then replay it.")
        self._note_divergences(outputs)

    def _recording(self, row: dict[str, Any], prompts: _Prompts) -> Recording:
        if min(row["output_ids"]) < 0:
            raise RunError(f"{self.path} was replayed with --no-text: it holds no token ids that could be replayed.")
        prompt = prompts.of(row)
        self.summary.used["AR outputs"] += 1
        self.summary.prompt_tokens += len(prompt.prompt_ids)
        self.summary.output_tokens += len(row["output_ids"])
        kept = self.options.keep_text and not self.options.hash_ids
        return Recording(
            row["workload"],
            row["prompt_id"],
            row["turn"],
            list(prompt.prompt_ids),
            row["output_ids"],
            prompt.source,
            prompt.text if kept else "",
            tuple(dict(m) for m in prompt.messages) if kept else (),
        )

    def _note_divergences(self, outputs: dict[tuple[str, str], list[int]]) -> None:
        for batch in self._rows():
            for row in batch.filter(_mask(batch, ar=False)).to_pylist():
                expected = outputs.get((row["workload"], row["prompt_id"]))
                if expected is not None and expected != row["output_ids"]:
                    self.summary.note(DIVERGED, f"{row['workload']} {row['prompt_id']} {row['arm']}")

    def _answers(self, turn: int) -> Iterator[dict[str, Any]]:
        for batch in self._rows():
            wanted = pc.and_(_mask(batch, ar=True), pc.equal(batch["turn"], turn))
            yield from batch.filter(wanted).to_pylist()

    def _rows(self) -> Iterator[pa.RecordBatch]:
        for file in self.files:
            yield from pq.ParquetFile(file).iter_batches(batch_size=4096, columns=[*COLUMNS, *_VALUES])


def _mask(batch: pa.RecordBatch, *, ar: bool) -> pa.Array:
    """Measured jobs of the first repeat: AR's, or the others'."""
    measured = pc.and_(pc.invert(batch["warmup"]), pc.invert(batch["pair_only"]))
    first = pc.and_(measured, pc.equal(batch["repeat"], 0))
    is_ar = pc.equal(batch["drafter"], "ar")
    return pc.and_(first, is_ar if ar else pc.invert(is_ar))


class _Prompts:
    """Prompts of a run's jobs; those of later turns are rendered again from AR's earlier answers."""

    def __init__(self, run_dir: Path, run: RunSpec) -> None:
        self._reader = ShardReader(run_dir, run)
        self._run = run
        self._later: dict[tuple[str, str], PromptSpec] = {}
        self._tokenizer: Any = None

    @property
    def expecting(self) -> bool:
        """Whether an answer that was seen opens a later turn."""
        return bool(self._later)

    def of(self, row: dict[str, Any]) -> PromptSpec:
        """The prompt of this AR job; its answer opens the next turn, where there is one."""
        key = (row["workload"], row["prompt_id"])
        prompt = self._later.pop(key) if row["turn"] else self._reader.prompt(*key)
        if prompt.followups:
            following = self._next_turn(prompt, row["output_ids"])
            self._later[row["workload"], following.prompt_id] = following
        return prompt

    def _next_turn(self, prompt: PromptSpec, answer: list[int]) -> PromptSpec:
        from dfbench.workers import models

        if self._tokenizer is None:
            self._tokenizer = models.load_tokenizer(models.resolve(self._run.target))
        return models.next_turn(replace(prompt, recorded_ids=None), answer, self._tokenizer, self._run.enable_thinking)


def recorded_shas(run_dir: Path) -> str:
    """What identifies a run's outputs: the digests of its committed job files."""
    with Ledger.open(run_dir, readonly=True) as ledger:
        return json.dumps(sorted(file.sha256 for file in ledger.files() if file.table == "jobs"))

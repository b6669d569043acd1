"""Large run directories, made column by column: for the benchmark, and in small for a test that they are valid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from runmaker import Facts, prompt_table, write_file, write_ledger

from dfbench.cluster.sums import sums_of
from dfbench.workers.records import JOBS, STEPS, TOKENS

ARMS = ("ar", "pld", "cacheback", "tree", "suffix", "recycle")
WORKLOADS = ("code", "copyctx", "chat")
OVERHEAD_NS = 900_000
Ints = np.ndarray


def make_bulk(
    path: Path,
    *,
    prompts: int,
    tokens: int = 256,
    arms: Sequence[str] = ARMS,
    per_file: int = 330,
    diverging: float = 0.03,
    seed: int = 0,
) -> Path:
    """A finished run of `prompts` prompts × arms, each output `tokens` long, `per_file` prompts a commit.

    AR runs tokens − 1 steps, an arm about 0.4 times as many. A share of the spec outputs parts from AR's at a tie.
    """
    generator = np.random.default_rng(seed)
    path.mkdir(parents=True)
    plan, files = [], []
    for number, start in enumerate(range(0, prompts, per_file)):
        names = [f"p{index:06}" for index in range(start, min(start + per_file, prompts))]
        group = _Group(generator, names, tokens, arms, diverging)
        tables = {"jobs": group.jobs(), "steps": group.steps(), "tokens": group.tokens()}
        tables["sums"] = sums_of(tables["jobs"], tables["steps"])
        covered = {f"shard-{name}" for name in names}
        files += [(*write_file(path, table, rows, number), covered) for table, rows in tables.items()]
        plan += group.plan()
    listed = [
        {"workload": _workload(name), "prompt_id": name, "source": "bulk", "text": f"prompt {name}", "messages": "[]",
         "prompt_ids": [1, 2, 3], "prompt_sha": name, "warmup": False}
        for name in dict.fromkeys(row[3] for row in plan)
    ]  # fmt: skip
    pq.write_table(prompt_table(listed), path / "prompts.parquet")
    facts = {"w0": {"device": Facts().device, "logits_dtype": "bfloat16"}}
    meta = {"run_id": "bulk", "sweep": "bulk", "state": "done", "ledger_version": "1"}
    write_ledger(path, meta, plan, files, workers=facts)
    return path


def _workload(prompt: str) -> str:
    return WORKLOADS[int(prompt[1:]) % len(WORKLOADS)]


class _Group:
    """The jobs of one commit: every arm of some prompts."""

    def __init__(
        self, generator: np.random.Generator, prompts: list[str], tokens: int, arms: Sequence[str], diverging: float
    ) -> None:
        self.generator, self.prompts, self.length, self.arms = generator, prompts, tokens, arms
        self.count = len(prompts) * len(arms)
        self.arm = np.tile(np.arange(len(arms)), len(prompts))
        self.emitted, self.sizes = self._emits()
        self.job = np.repeat(np.arange(self.count), self.sizes)
        first = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        self.step = np.arange(self.sizes.sum()) - first[self.job]
        before = np.cumsum(self.emitted) - self.emitted
        self.position = 1 + before - before[first][self.job]
        self.ids, self.split = self._outputs(diverging)
        spare = generator.integers(0, 4, len(self.job))
        self.drafted = np.where(self.arm[self.job] == 0, 0, self.emitted - 1 + spare)
        noise = np.maximum(generator.normal(1, 0.02, len(self.job)), 0.5)
        self.forward = (20e6 * (1 + 0.01 * (self.drafted + 1)) * noise).astype(np.int64)

    def _emits(self) -> tuple[Ints, Ints]:
        """Tokens that each step emits: one for AR, 1 + geometric for the arms, cut at the end of the output."""
        left = self.length - 1
        draws = np.minimum(self.generator.geometric(0.4, (self.count, left)), 12)
        draws[self.arm == 0] = 1
        ends = np.cumsum(draws, axis=1)
        sizes = (ends < left).sum(axis=1) + 1
        rows = np.arange(self.count)
        draws[rows, sizes - 1] -= ends[rows, sizes - 1] - left
        return draws[np.arange(left) < sizes[:, None]], sizes

    def _outputs(self, diverging: float) -> tuple[Ints, Ints]:
        """Output ids [jobs, tokens], and where each parts from its AR output (its length: nowhere)."""
        shared = self.generator.integers(0, 49_000, (len(self.prompts), self.length))
        ids = np.repeat(shared, len(self.arms), axis=0)
        parts = (self.generator.random(self.count) < diverging) & (self.arm > 0)
        split = np.where(parts, self.generator.integers(1, self.length, self.count), self.length)
        return np.where(np.arange(self.length) >= split[:, None], ids + 1, ids).astype(np.int32), split

    def _identity(self, job: Ints) -> dict[str, pa.Array]:
        names = [f"{prompt}-{arm}" for prompt in self.prompts for arm in self.arms]
        prompts = [prompt for prompt in self.prompts for _ in self.arms]
        rows = len(job)
        values = {
            "job_id": names,
            "workload": [_workload(prompt) for prompt in prompts],
            "prompt_id": prompts,
            "arm": [self.arms[index] for index in self.arm],
        }
        taken = {name: pa.array(column).take(pa.array(job)) for name, column in values.items()}
        return {
            "run_id": pa.repeat("bulk", rows),
            **taken,
            "device": pa.repeat(Facts().device, rows),
            "attempt": pa.repeat(pa.scalar(1, pa.int32()), rows),
            "warmup": pa.repeat(False, rows),
            "pair_only": pa.repeat(False, rows),
        }

    def steps(self) -> pa.Table:
        forward, drafted = self.forward, self.drafted
        queries = drafted + 1
        columns = {
            "step": self.step, "position": self.position, "queries": queries, "padding": np.zeros_like(queries),
            "drafted": drafted, "depth": drafted, "accepted": self.emitted - 1, "emitted": self.emitted,
            "step_ns": forward + OVERHEAD_NS, "draft_ns": np.where(queries > 1, 200_000, 1000), "forward_ns": forward,
            "accept_ns": np.full_like(forward, 100_000), "commit_ns": np.full_like(forward, 300_000),
        }  # fmt: skip
        return _table(STEPS, {**self._identity(self.job), **columns})

    def jobs(self) -> pa.Table:
        decode = np.bincount(self.job, weights=self.forward + OVERHEAD_NS, minlength=self.count).astype(np.int64)
        facts, rows = Facts(), self.count
        constant = {
            "params": "{}", "cache": "cold", "target": "torch", "engine": facts.engine, "model": facts.model,
            "revision": None, "dtype": facts.dtype, "stack": facts.stack, "worker_id": "w0", "repeat": 0, "turn": 0,
            "prompt_tokens": 3, "max_new_tokens": self.length, "finish_reason": "length", "began_at": 0,
            "repetition": 0.0, "throttled": None, "telemetry": None,
        }  # fmt: skip
        flat = pa.array(self.ids.ravel())
        offsets = pa.array(np.arange(0, self.ids.size + 1, self.length, dtype=np.int32))
        columns = {
            **{name: pa.repeat(pa.scalar(value, JOBS.field(name).type), rows) for name, value in constant.items()},
            "shard_id": [f"shard-{prompt}" for prompt in self.prompts for _ in self.arms],
            "drafter": [self.arms[index] for index in self.arm],
            "arm_order": self.arm,
            "start_ns": np.full(rows, 1000),
            "prefill_ns": np.full(rows, 40_000_000),
            "decode_ns": decode,
            "wall_ns": decode + 40_001_000,
            "output_ids": pa.ListArray.from_arrays(offsets, flat),
        }
        return _table(JOBS, {**self._identity(np.arange(rows)), **columns})

    def tokens(self) -> pa.Table:
        job = np.repeat(np.arange(self.count), self.length)
        position = np.tile(np.arange(self.length), self.count)
        ids = self.ids.ravel()
        top = np.round(self.generator.uniform(16, 31, ids.size) * 8) / 8
        near = np.zeros((len(self.prompts), self.length + 1), dtype=bool)
        near[np.arange(self.count) // len(self.arms), self.split] = True
        near = np.repeat(near[:, :-1], len(self.arms), axis=0).ravel()
        gap = np.where(near, 0.125, np.round(self.generator.exponential(3, ids.size) * 8) / 8)
        step = np.full((self.count, self.length), -1)
        step[:, 1:] = np.repeat(self.step, self.emitted).reshape(self.count, self.length - 1)
        flat = step.ravel()
        columns = {
            "position": position, "token_id": ids, "step": pa.array(flat, pa.int32(), mask=flat < 0), "top1_id": ids,
            "top1_logit": top, "top2_id": np.where(position >= self.split[job], ids - 1, ids + 1),
            "top2_logit": top - gap, "top_ties": 1 + (gap == 0),
        }  # fmt: skip
        return _table(TOKENS, {**self._identity(job), **columns})

    def plan(self) -> list[tuple[object, ...]]:
        """Rows of the ledger's jobs table."""
        return [
            (f"{prompt}-{arm}", f"shard-{prompt}", _workload(prompt), prompt, arm, 0, 0, order, "done", 1)
            for prompt in self.prompts
            for order, arm in enumerate(self.arms)
        ]


def _table(schema: pa.Schema, columns: dict[str, object]) -> pa.Table:
    arrays = []
    for entry in schema:
        values = columns[entry.name]
        array = values if isinstance(values, pa.Array) else pa.array(values)
        arrays.append(array.cast(entry.type, safe=False))
    return pa.Table.from_arrays(arrays, schema=schema)

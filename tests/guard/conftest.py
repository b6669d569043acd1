"""A laboratory for the guard: a whole run on a tiny random model, in this process, through the worker, the commit and
the ledger that real runs use; then the guard's re-runs and its verdict."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from dfbench import analysis
from dfbench.analysis.guard import Verdict, judge
from dfbench.cluster import commit, guard
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.runspec import PlannedShard, RunSpec, ShardReader, write_prompts
from dfbench.workers import provenance
from dfbench.workers.actor import Worker
from dfbench.workers.engine import TorchTarget
from dfbench.workers.examiner import Examiner
from dfbench.workers.spec import ArmSpec, JobSpec, PromptSpec, TargetSpec

sys.path.insert(0, str(Path(__file__).parent))  # for the planted bugs beside the tests

# Tiny tensors gain nothing from threads and lose much to waiting for them.
torch.set_num_threads(1)

VOCAB = 31
BOS, EOS = 1, 2
CAP = 28
FAMILIES = {"llama": LlamaConfig, "qwen3": Qwen3Config}

AR = ArmSpec("ar", "ar")
PLD = ArmSpec("pld", "pld", {"draft_len": 4, "max_ngram": 2, "stop_at_eos": False})
TREE = ArmSpec(
    "tree",
    "cacheback",
    {"draft": "tree", "leader": 1, "follower": 2, "queries": 14, "reserve": 4, "count_refed": False},
)
ARMS = (AR, PLD, TREE)


@cache
def tiny_model(family: str, dtype: torch.dtype, attention: str) -> Any:
    """A random model that minds its past and often repeats itself, so that drafts are accepted."""
    torch.manual_seed(3)
    config = FAMILIES[family](
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, bos_token_id=BOS, eos_token_id=EOS,
        pad_token_id=0, initializer_range=0.15,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def prompts(count: int = 6) -> list[PromptSpec]:
    """Prompts that repeat themselves here and there, so that drafters find something."""
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        piece = torch.randint(3, VOCAB, (7,), generator=generator).tolist()
        ids = (BOS, *piece, *piece[:4], number + 3, *piece[2:])
        made.append(PromptSpec("tiny", f"p{number}", "made", "", ids, f"sha{number}"))
    return made


@dataclass
class Lab:
    """One run and its verdict. What a mutant changes is patched before `run`; `finish` may change what lies on disk."""

    run_dir: Path
    family: str = "llama"
    dtype: torch.dtype = torch.float64
    attention: str = "sdpa"
    kv_repair: str = "compact"
    engine: str = "cached"
    arms: Sequence[ArmSpec] = ARMS
    prompts: Sequence[PromptSpec] = field(default_factory=prompts)
    warmups: Sequence[PromptSpec] = ()
    check_rows: bool = True
    job_id: Callable[[PromptSpec, ArmSpec], str] = lambda prompt, arm: f"{prompt.prompt_id}-{arm.name}"
    worker: type[Worker] = Worker
    eos_ids: frozenset[int] = frozenset({EOS})

    def run(self) -> None:
        """Plan, decode, commit."""
        spec = RunSpec("lab", "lab", "lab", self._target_spec(), tuple(self.arms))
        self.run_dir.mkdir(exist_ok=True)
        write_prompts(self.run_dir, self.prompts, self.warmups)
        Ledger.create(self.run_dir, spec, self._shards()).close()
        self._drive(self.run_dir, ShardReader, self.worker)

    def examine(self) -> None:
        """The guard's model work."""
        guard_dir = guard.prepare(self.run_dir)
        self._drive(guard_dir, guard.GuardReader, Examiner)
        guard.adopt(self.run_dir)

    def verdict(self, *, skip: Collection[str] = (), join_only: bool = False) -> Verdict:
        with analysis.open_run(self.run_dir) as con:
            return judge(con, skip=skip, join_only=join_only)

    @staticmethod
    def make_prompts(count: int) -> list[PromptSpec]:
        return prompts(count)

    def target(self) -> TorchTarget:
        model = tiny_model(self.family, self.dtype, self.attention)
        return TorchTarget(model, self._target_spec(), eos_ids=self.eos_ids, context_limit=512)

    def _target_spec(self) -> TargetSpec:
        return TargetSpec(
            model=f"tiny-{self.family}",
            dtype=str(self.dtype).removeprefix("torch."),
            attention=self.attention,
            kv_repair=self.kv_repair,  # type: ignore[arg-type]
            engine=self.engine,  # type: ignore[arg-type]
            max_queries=32,
        )

    def _shards(self) -> list[PlannedShard]:
        shards = []
        for number, prompt in enumerate(self.prompts):
            turned = [self.arms[(number + i) % len(self.arms)] for i in range(len(self.arms))]
            jobs = [
                JobSpec(self.job_id(prompt, arm), "tiny", prompt.prompt_id, arm.name, arm_order=order)
                for order, arm in enumerate(turned)
            ]
            shards.append(PlannedShard(f"s{number}", "tiny", [prompt.prompt_id], jobs, CAP))
        return shards

    def _drive(self, run_dir: Path, reader: Any, worker_class: type[Worker]) -> None:
        """What the driver does, without Ray: every pending shard through one worker, then one commit."""
        with Ledger.open(run_dir) as ledger:
            ledger.begin()
            worker = worker_class(ledger.run.target, "here", f"worker-{worker_class.__name__}")
            worker._target = target = self.target()
            info = provenance.worker_facts(target) | {"bos_token_id": BOS}
            worker._facts = provenance.record_facts(info, worker.worker_id)
            ledger.add_worker(worker.worker_id, "here", info["device"], info)
            committer = commit.Committer(ledger, target.eos_ids)
            source = reader(run_dir, ledger.run)
            for row in ledger.pending(1000):
                shard = commit.FinishedShard(source.shard(row), worker.worker_id, "here")
                shard.parts.extend(worker.run(shard.spec))
                committer.add(shard)
            committer.flush()
            ledger.end()


@pytest.fixture
def lab(tmp_path: Path) -> Callable[..., Lab]:
    """`lab(**settings)`: a fresh laboratory, its run not yet made."""
    numbers = itertools.count()
    return lambda **settings: Lab(tmp_path / f"run{next(numbers)}", **settings)

"""What travels to a worker: plain frozen data, picklable and free of torch and Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

TargetKind = Literal["torch", "recorded", "scripted"]
EngineMode = Literal["cached", "recompute", "compiled"]
CachePolicy = Literal["cold", "carried", "preloaded"]

EMBEDDED_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class TargetSpec:
    """How to load the target, and every switch that decides its tokens or its timing class.

    `model`: the embedded model's name, a hub id, or a local folder (for scripted and recorded targets a label).
    `kv_repair`: compact = move accepted keys and values in place; refeed = crop all drafts and feed accepted tokens
    again. `max_queries`: most tokens in one pass. `buckets`: query widths that passes are padded to (compiled engine).
    `logits_dtype`: dtype of the last projection; None keeps the model's. `options`: what else the loader is told.
    """

    kind: TargetKind = "torch"
    model: str = EMBEDDED_MODEL
    revision: str | None = None
    dtype: str = "bfloat16"
    device: str = "auto"
    engine: EngineMode = "cached"
    kv_repair: Literal["compact", "refeed"] = "compact"
    attention: str = "sdpa"
    logits_dtype: str | None = None
    max_queries: int = 128
    buckets: tuple[int, ...] = ()
    trust_remote_code: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ArmSpec:
    """One arm: a drafter with resolved options (defaults and preset filled in) and its cache policy."""

    name: str
    drafter: str
    params: dict[str, Any] = field(default_factory=dict)
    cache: CachePolicy = "cold"


@dataclass(frozen=True)
class PromptSpec:
    """One prompt, rendered. Later turns of a conversation cannot be rendered before AR has answered the earlier ones.

    `messages`: the chat messages of the turns so far, empty where the workload gives plain text. `followups`: user
    messages of the turns to come; the worker renders each with AR's answers, and numbers the prompt ids `id#2`, `id#3`.
    `recorded_ids`: the recorded output (recorded targets).
    """

    workload: str
    prompt_id: str
    source: str
    text: str
    prompt_ids: tuple[int, ...]
    prompt_sha: str
    messages: tuple[dict[str, str], ...] = ()
    followups: tuple[str, ...] = ()
    recorded_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class JobSpec:
    """One job of a shard: which prompt, which arm, which repeat, and its place among the prompt's arms.

    `pair_only`: an AR run that exists only to pair a retried arm with; in no figure of its own.
    """

    job_id: str
    workload: str
    prompt_id: str
    arm: str
    repeat: int = 0
    arm_order: int = 0
    turn: int = 0
    pair_only: bool = False


@dataclass(frozen=True)
class ShardSpec:
    """The smallest set of jobs that must run on one device in one order; `jobs` is that order.

    `warmup`: the workload's reserved prompts, which a worker runs through every arm before its first job of it.
    `calibrate`: a worker that has not yet measured what its passes cost does so before anything else.
    """

    run_id: str
    shard_id: str
    workload: str
    prompts: tuple[PromptSpec, ...]
    arms: tuple[ArmSpec, ...]
    jobs: tuple[JobSpec, ...]
    max_new_tokens: int
    ignore_eos: bool = False
    enable_thinking: bool = False
    warmup: tuple[PromptSpec, ...] = ()
    attempt: int = 1
    deadline_s: float | None = None
    calibrate: bool = False


@dataclass(frozen=True)
class PassShape:
    """The outer form of one recorded step: which positions it emitted and how wide its pass was."""

    position: int
    drafted: int
    depth: int
    accepted: int
    emitted: int


@dataclass(frozen=True)
class GuardJob:
    """One finished job as the guard re-runs it: what it emitted, in which passes, with which recorded logits.

    `divergence`: the first output position at which it differs from AR's, None where it does not.
    """

    job_id: str
    attempt: int
    arm: str
    output_ids: tuple[int, ...]
    passes: tuple[PassShape, ...]
    recorded_logits: tuple[float, ...] = ()
    divergence: int | None = None


@dataclass(frozen=True)
class GuardSpec:
    """The guard's work on one prompt: the jobs to examine, and the AR job that they are held against.

    `prompt` is the planned prompt; `prompt_id` that of the turn the jobs ran, whose prompt is rendered from `history`,
    AR's answers to the earlier turns.
    """

    run_id: str
    shard_id: str
    workload: str
    prompt: PromptSpec
    prompt_id: str
    arms: tuple[ArmSpec, ...]
    ar: GuardJob
    jobs: tuple[GuardJob, ...]
    max_new_tokens: int
    history: tuple[tuple[int, ...], ...] = ()
    enable_thinking: bool = False
    attempt: int = 1
    deadline_s: float | None = None


def guard_id(job_id: str, attempt: int) -> str:
    """Id of the guard's job that examines this attempt of a job."""
    return f"guard:{job_id}:{attempt}"

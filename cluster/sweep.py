"""Sweep file → validated `Sweep`: what is to be run, with every default filled in.

A sweep is YAML: a file, or one of the built-in ones in `sweeps/`. An unknown key, a wrong type and an option that a
drafter does not have are errors of one sentence; `sweep_file` reads them. `Sweep.to_yaml` writes the effective sweep,
which loads to itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from dfbench.cluster import sweep_errors
from dfbench.drafters import registry
from dfbench.errors import OptionError, SweepError
from dfbench.workers.spec import EMBEDDED_MODEL, ArmSpec, CachePolicy, EngineMode, TargetKind, TargetSpec

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
"""A name that is also a safe file name: it cannot lead out of a folder."""
MOST = 2**31 - 1
"""What the records' columns hold."""
Count = Annotated[int, Field(ge=1, le=MOST)]
DType = Literal["bfloat16", "float16", "float32", "float64"]


class Section(BaseModel):
    """Base of every part of a sweep: no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Model(Section):
    """The target model: the embedded one by name, a hub id with a pinned revision, or a local folder or GGUF file.

    `digest` is what planning found: the SHA-256 of local weights. Written by hand, it is a claim that is checked.
    """

    id: str = EMBEDDED_MODEL
    revision: str | None = None
    dtype: DType = "bfloat16"
    device: str = "auto"
    trust_remote_code: bool = False
    digest: str | None = None
    options: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, given: Any) -> Any:
        return {"id": given} if isinstance(given, str) else given

    @field_validator("device")
    @classmethod
    def _torch_knows_it(cls, given: str) -> str:
        if re.fullmatch(r"auto|(cpu|cuda|mps|xpu)(:\d+)?", given) is None:
            raise ValueError(f"must be auto, cpu, cuda, or one of several such as cuda:0, not '{given}'")
        return given


class Dataset(Section):
    """A hub data set at a pinned revision, one prompt a row."""

    id: str
    revision: str
    config: str | None = None
    split: str = "test"
    column: str = "prompt"
    id_column: str | None = None


class Workload(Section):
    """Where a workload's prompts come from: a built-in of that name, a JSONL `file`, or a hub `dataset`.

    `prompts`: how many are planned, from the first; None = all but those reserved for warm-up. `template` holds
    `{text}` and is put around each plain prompt; `chat` asks plain prompts as a user message.
    """

    name: Name
    prompts: Count | None = None
    file: str | None = None
    dataset: Dataset | None = None
    template: str | None = None
    chat: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one_source(self) -> Workload:
        if self.file is not None and self.dataset is not None:
            raise ValueError("has both `file` and `dataset`: write one of them")
        if self.template is not None and "{text}" not in self.template:
            raise ValueError("`template` must hold {text}, where the prompt goes")
        return self


class Scripted(Section):
    """The scripted target: a model's stand-in for tests and queue benchmarks, which makes up its own prompts.

    See `workers.target.scripted_rule` for the text it gives. `step_ms` is slept for every pass.
    """

    seed: Annotated[int, Field(ge=-MOST, le=MOST)] = 0
    vocab: Annotated[int, Field(ge=4, le=MOST)] = 64
    period: Count = 17
    eos_at: Annotated[int, Field(ge=0, le=MOST)] = 0
    step_ms: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    prompts: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    prompt_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 16


class Recorded(Section):
    """The recorded target: answers with the `output_ids` of its workloads' rows."""

    vocab_size: Count | None = None
    eos_ids: list[int] = []


class Arm(Section):
    """One arm: a drafter with all its options, where it comes from, and what it keeps between prompts."""

    name: Name
    drafter: str
    cache: CachePolicy = "cold"
    options: dict[str, Any]
    source: str

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, given: Any) -> Any:
        return resolve_arm(given)

    def spec(self) -> ArmSpec:
        """What a worker needs to know of it."""
        return ArmSpec(self.name, self.drafter, self.options, self.cache)


def resolve_arm(given: Any) -> dict[str, Any]:
    """An arm as written, a drafter's name or a flat mapping, with preset and defaults filled in by the registry."""
    if isinstance(given, str):
        given = {"drafter": given}
    if not isinstance(given, dict):
        raise ValueError("must be a drafter's name or a mapping with `drafter`")
    options = dict(given)
    name, drafter = options.pop("name", None), options.pop("drafter", None)
    drafter = drafter if drafter is not None else name
    if not isinstance(drafter, str):
        raise ValueError("must name a `drafter`")
    arm = {"name": name if name is not None else drafter, "drafter": drafter}
    if "cache" in options:
        arm["cache"] = options.pop("cache")
    claimed = options.pop("source", None)
    origin = registry.source(drafter)
    own = registry.find(drafter).Options.model_fields
    for key in options:
        if key not in own and sweep_errors.top_level(Sweep, str(key)):
            raise OptionError(
                f"arm '{arm['name']}': '{key}' is the same for all arms: write it at the top level of the sweep."
            )
    arm["options"] = _with_digests(drafter, registry.parse_options(drafter, options).model_dump(mode="json"))
    arm["source"] = f"{origin.distribution} {origin.version}"
    if claimed not in (None, arm["source"]):
        raise ValueError(f"says source '{claimed}' but '{arm['source']}' is installed: install that, or leave it out")
    return arm


def _with_digests(drafter: str, options: dict[str, Any]) -> dict[str, Any]:
    """A file is known by its content: its digest is part of a job's identity, its place is not."""
    for file in registry.files(drafter, options):
        path = file.path
        if path is None or file.sha256 is not None:
            continue
        try:
            with Path(path).expanduser().open("rb") as handle:
                file.holder[file.digest] = hashlib.file_digest(handle, "sha256").hexdigest()
        except OSError as error:
            raise OptionError(
                f"drafter '{drafter}': option '{file.option}': {path} cannot be read: {error.strerror}; build that "
                "file, or write where it is."
            ) from error
    return options


class Sweep(Section):
    """Everything that decides what a run does. The defaults here are the ones that the docs list."""

    name: Name
    model: Model = Model()
    target: TargetKind = "torch"
    scripted: Scripted = Scripted()
    recorded: Recorded = Recorded()
    engine: EngineMode = "cached"
    kv_repair: Literal["compact", "refeed"] = "compact"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    logits_dtype: DType | None = None
    max_queries: Count = 128
    buckets: list[Count] = []
    workloads: Annotated[list[Workload], Field(min_length=1)]
    arms: Annotated[list[Arm], Field(min_length=1)]
    max_new_tokens: Count = 256
    ignore_eos: bool = False
    enable_thinking: bool = False
    warmup: Annotated[int, Field(ge=0, le=1000)] = 1
    repeats: Count = 1
    calibrate: bool = True
    workers: Count | None = None
    workers_per_node: Count | None = None
    device_filter: str | None = None
    max_attempts: Count = 3
    job_deadline_s: Annotated[float, Field(gt=0)] = 3600.0
    progress_deadline_s: Annotated[float, Field(gt=0)] = 300.0
    notes: list[str] = []

    @model_validator(mode="after")
    def _consistent(self) -> Sweep:
        for kind, items in (("arm", self.arms), ("workload", self.workloads)):
            names = [item.name for item in items]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"two {kind}s are called '{twice}': give each its own `name`")
        if self.target != "torch" and self.model.options:
            raise ValueError(f"`model.options` are for a model, and the target is {self.target}: leave them out")
        made_up = self.target == "scripted"
        for workload in self.workloads:
            if made_up and (workload.file or workload.dataset):
                raise ValueError(
                    f"workload '{workload.name}': a scripted target makes up its own prompts: leave out its source"
                )
            if self.target == "recorded" and not workload.file:
                raise ValueError(f"workload '{workload.name}': a recorded target needs the `file` that it replays")
        return self

    def target_spec(self) -> TargetSpec:
        """How a worker loads the target."""
        options: dict[str, Any] = dict(self.model.options)
        if self.target == "scripted":
            options = self.scripted.model_dump(exclude={"prompts", "prompt_tokens"})
        elif self.target == "recorded":
            options = self.recorded.model_dump()
        return TargetSpec(
            kind=self.target,
            model=self.model.id,
            revision=self.model.revision,
            dtype=self.model.dtype,
            device=self.model.device,
            engine=self.engine,
            kv_repair=self.kv_repair,
            attention=self.attention,
            logits_dtype=self.logits_dtype,
            max_queries=self.max_queries,
            buckets=tuple(self.buckets),
            trust_remote_code=self.model.trust_remote_code,
            options=options,
        )

    def to_dict(self) -> dict[str, Any]:
        """The effective sweep as plain data, arms flat as a person writes them."""
        plain = self.model_dump(mode="json")
        for arm in plain["arms"]:
            arm.update(arm.pop("options"))
        return plain

    def to_yaml(self) -> str:
        """The effective sweep as a file that loads to this very sweep."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=110)


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8. Two equal values give equal bytes."""
    return _CANONICAL.encode(value).encode()


def validate(data: dict[str, Any], source: str = "the sweep") -> Sweep:
    """Plain data → `Sweep`. Raises SweepError or OptionError: one sentence, naming the place and the nearest key."""
    try:
        sweep = Sweep.model_validate(data)
    except ValidationError as error:
        raise SweepError(f"{source}: {sweep_errors.sentence(Sweep, error)}") from error
    try:
        canonical(sweep.to_dict())
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise SweepError(
            f"{source} holds a value that cannot be written down again: write plain text, finite numbers and lists or "
            "mappings that do not hold themselves."
        ) from error
    return sweep

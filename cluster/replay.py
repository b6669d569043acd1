"""`dfbench replay`: a source of recorded answers becomes an ordinary run with the recorded target.

    source ─► prompts.parquet ─► shards of (chunk of prompts × arms) ─► ledger ─► the driver of every other run

Greedy verification makes the output independent of the drafter, so what AR gave once tells how many tokens any drafter
would have had accepted at each step. The source is read once, as a stream; memory holds one chunk of it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dfbench.cluster import plan as plans
from dfbench.cluster import run_place, runs, sources_run
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.runspec import PROMPTS, PROMPTS_FILE, PlannedShard, RunSpec, write_prompts
from dfbench.cluster.sources import IdMask, LogSource, Recording, SourceOptions, masked, safe_name
from dfbench.cluster.sources_files import find_files
from dfbench.cluster.sources_run import RunSource
from dfbench.cluster.sweep import Arm, Sweep, canonical, validate
from dfbench.cluster.sweep_file import parse_yaml
from dfbench.drafters import registry
from dfbench.errors import OptionError, RunError, SweepError, UsageError
from dfbench.workers.models import prompt_sha
from dfbench.workers.spec import JobSpec, PromptSpec

Source = LogSource | RunSource

UNLIMITED = 2**20
"""Cap of answers that ended by themselves and whose own cap the log does not tell."""
SHARD_TOKENS = 32_000
"""Tokens that one shard replays, all its arms together: enough to be worth a call, few enough to share out."""


@dataclass(frozen=True)
class ReplayOptions:
    """What may be said about a replay beside its source and arms. `name`: of the run."""

    source: SourceOptions = field(default_factory=SourceOptions)
    name: str | None = None
    max_new_tokens: int | None = None
    shard_tokens: int = SHARD_TOKENS


@dataclass(frozen=True)
class Replay:
    """A replay that can be placed and created: what it reads, the effective sweep, and what identifies it."""

    source: Source
    sweep: Sweep
    sha: str
    options: ReplayOptions


def open_source(path: Path, options: SourceOptions) -> Source:
    """A run directory (or its name under `runs/`), a file of logs, or a folder of them. Raises UsageError."""
    for place in (path, runs.RUNS / path):
        if run_place.exists(place):
            return RunSource(place, options)
    return LogSource(path, options)


def prepare(source: Source, arms: list[Arm], options: ReplayOptions) -> Replay:
    """Check what was asked for. Raises UsageError for what cannot be replayed; writes nothing."""
    for arm in arms:
        _check_arm(arm)
    if options.source.hash_ids:
        _check_hashable(arms)
    name = options.name or f"replay-{safe_name(source.path)}"
    cap = options.max_new_tokens or (source.cap_of_jobs() if isinstance(source, RunSource) else UNLIMITED)
    vocabulary = None if options.source.hash_ids else source.vocabulary
    base: dict[str, Any] = {
        "name": name,
        "target": "recorded",
        "model": {"id": source.label},
        "recorded": {"vocab_size": vocabulary, "eos_ids": sorted(source.eos_ids)},
        "workloads": [{"name": "source", "file": str(source.path)}],
        "arms": ["ar"],
        "max_new_tokens": cap,
        "warmup": 0,
        "calibrate": False,
    }
    if isinstance(source, RunSource):
        base["max_queries"] = source.run.target.max_queries
        base["ignore_eos"] = source.run.ignore_eos
        base["enable_thinking"] = source.run.enable_thinking
    sweep = validate(base, "the replay").model_copy(update={"arms": arms})
    return Replay(source, sweep, _sha(source, sweep, options), options)


def parse_arms(given: list[str]) -> list[Arm]:
    """Arms from names (`pld`, `pld:hf` for a preset) and YAML files of them, one by one or with commas between.

    Raises SweepError or OptionError.
    """
    entries: list[Any] = []
    for item in (name for part in given for name in part.split(",") if name):
        path = Path(item).expanduser()
        if path.suffix in (".yaml", ".yml", ".json") or path.is_file():
            entries += _arms_of_file(path)
        else:
            drafter, _, preset = item.partition(":")
            name = f"{drafter}-{preset}" if preset else drafter
            entries.append({"name": name, "drafter": drafter, **({"preset": preset} if preset else {})})
    if not entries:
        raise SweepError("no arms: name drafters with --arms, such as --arms pld --arms cacheback, or a YAML file.")
    for entry in entries:
        if isinstance(entry, dict) and isinstance(meant := entry.get("drafter", entry.get("name")), str):
            registry.find(meant)  # a name that does not exist is said as such
    sweep = validate(
        {"name": "arms", "target": "scripted", "workloads": [{"name": "none"}], "arms": entries}, "the arms"
    )
    return sweep.arms


def _arms_of_file(path: Path) -> list[Any]:
    if not path.is_file():
        raise SweepError(f"the arms file {path} does not exist: write a YAML list of arms, or name drafters.")
    text = path.read_text(encoding="utf-8-sig")
    listed = text.lstrip().startswith("-")
    data = parse_yaml("arms:\n" + text if listed else text, str(path))
    arms = data.get("arms")
    if not isinstance(arms, list) or not arms:
        raise SweepError(f"{path} holds no list of arms: write `- pld` or `- {{name: …, drafter: …}}` a line.")
    return arms


def _check_arm(arm: Arm) -> None:
    try:
        top_k = registry.create(arm.drafter, arm.options).top_k
    except UsageError:  # a file that lies on the workers, or suits another tokenizer: they will say so
        top_k = registry.find(arm.drafter).top_k
    if top_k:
        raise OptionError(
            f"arm '{arm.name}': '{arm.drafter}' learns from the logits of rejected drafts, which no recording has: "
            "run it live with `dfbench submit`, or leave it out."
        )


def _check_hashable(arms: list[Arm]) -> None:
    for arm in arms:
        if any("frozen" in key and value for key, value in arm.options.items()):
            raise OptionError(f"arm '{arm.name}' reads a table of real token ids: leave out --hash-ids, or that arm.")


def _sha(source: Source, sweep: Sweep, options: ReplayOptions) -> str:
    """Digest of what makes this the same replay: the source's files as they are, the arms, the ways of reading."""
    if isinstance(source, RunSource):
        state: Any = sources_run.recorded_shas(source.path)
    else:
        state = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in find_files(source.path)]
    parts = [state, sweep.to_dict(), vars(options.source), options.shard_tokens]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def create(run_dir: Path, replay: Replay) -> None:
    """Read the source into a new run. Raises UsageError where nothing in it can be replayed; then nothing is left.

    Raises RunError where another process writes there at this moment, and leaves what that one writes.
    """
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with run_place.driver_lock(run_dir):
            if run_place.exists(run_dir):
                raise RunError(f"{run_dir} was taken by another replay just now: give the command again.")
            try:
                _write(run_dir, replay)
            except BaseException:
                _clear(run_dir, made)
                raise
    except OSError as error:
        raise RunError(f"the run cannot be written to {run_dir}: {error.strerror or error}.") from error


def _clear(run_dir: Path, made: list[Path]) -> None:
    for name in (PROMPTS_FILE, f".{PROMPTS_FILE}.part", runs.SHARDS_PART, runs.SWEEP_FILE, run_place.LOCK_FILE):
        (run_dir / name).unlink(missing_ok=True)
    for folder in made:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _write(run_dir: Path, replay: Replay) -> None:
    mask = IdMask() if replay.options.source.hash_ids else None
    sweep = _hidden_ends(replay.sweep, mask)
    recordings: Iterable[Recording] = replay.source
    planner = _Planner(sweep, replay)
    spool = run_dir / runs.SHARDS_PART
    with spool.open("w", encoding="utf-8") as shards:
        write_prompts(run_dir, planner.pass_through(masked(recordings, mask) if mask else recordings, shards))
    sweep = sweep.model_copy(update={"workloads": _workloads(planner, sweep)})
    (run_dir / runs.SWEEP_FILE).write_text(sweep.to_yaml(), encoding="utf-8")
    estimate = json.dumps({reason: tally.count for reason, tally in replay.source.summary.notes.items()})
    made = Ledger.create(run_dir, _run_spec(run_dir, replay, sweep), read_shards(spool), estimate=estimate)
    made.close()
    spool.unlink()


def _hidden_ends(sweep: Sweep, mask: IdMask | None) -> Sweep:
    """The sweep with its ends of text renamed as all other ids are."""
    if mask is None:
        return sweep
    recorded = sweep.recorded.model_copy(update={"eos_ids": sorted(mask.ids(sweep.recorded.eos_ids))})
    return sweep.model_copy(update={"recorded": recorded})


def _workloads(planner: _Planner, sweep: Sweep) -> list[Any]:
    first = sweep.workloads[0]
    return [first.model_copy(update={"name": name}) for name in planner.workloads]


def _run_spec(run_dir: Path, replay: Replay, sweep: Sweep) -> RunSpec:
    source, summary = replay.source, replay.source.summary
    target = sweep.target_spec()
    engine = "recorded, estimate" if summary.estimate else "recorded"
    live = source.run.target if isinstance(source, RunSource) else None
    labels = {"model": source.label, "engine": engine, "dtype": live.dtype if live else "none"}
    options = {**target.options, "labels": labels, "keep_ids": source.options.keep_text}
    target = replace(target, options=options)
    return RunSpec(
        run_id=run_dir.resolve().name,
        sweep=sweep.name,
        sweep_sha=replay.sha,
        target=target,
        arms=tuple(arm.spec() for arm in sweep.arms),
        ignore_eos=sweep.ignore_eos,
        extra={"replay": {"source": str(source.path), **summary.to_dict()}},
    )


class _Planner:
    """Turns recordings into prompts, and gathers these into shards on the way."""

    def __init__(self, sweep: Sweep, replay: Replay) -> None:
        eos_ids = frozenset(sweep.recorded.eos_ids)
        # Job ids digest prompts and outputs: where texts are to stay unknown, they must not be guessable from them.
        self._secret = (
            "" if replay.options.source.keep_text and not replay.options.source.hash_ids else secrets.token_hex()
        )
        self._arms = sweep.arms
        self._keys = [plans.arm_key(sweep, arm, eos_ids) + self._secret for arm in sweep.arms]
        self._cap = sweep.max_new_tokens
        self._carried = any(arm.cache == "carried" for arm in sweep.arms)
        self._most = replay.options.shard_tokens
        self._open: dict[str, _Chunk] = {}
        self.workloads: dict[str, int] = {}
        """Each workload with the number of its prompts so far."""

    def pass_through(self, recordings: Iterable[Recording], shards: Any) -> Iterator[PromptSpec]:
        """Every recording as a prompt; complete shards are written to `shards`, one JSON line each."""
        for recording in recordings:
            prompt = self._prompt(recording)
            yield prompt
            chunk = self._open.setdefault(prompt.workload, _Chunk(prompt.workload))
            self._plan(prompt, recording.turn, chunk)
            if chunk.tokens >= self._most and not self._carried:
                shards.write(self._open.pop(prompt.workload).to_json(self._cap))
        for chunk in self._open.values():
            shards.write(chunk.to_json(self._cap))

    def _prompt(self, recording: Recording) -> PromptSpec:
        text = recording.text or next((m["content"] for m in reversed(recording.messages) if m["role"] == "user"), "")
        return PromptSpec(
            workload=recording.workload,
            prompt_id=recording.prompt_id,
            source=recording.place,
            text=text,
            prompt_ids=tuple(recording.prompt_ids),
            prompt_sha=prompt_sha(recording.prompt_ids) if not self._secret else "",
            messages=recording.messages,
            recorded_ids=tuple(recording.output_ids),
        )

    def _plan(self, prompt: PromptSpec, turn: int, chunk: _Chunk) -> None:
        """The prompt's jobs: its arms in an order that rotates from each prompt of a workload to the next."""
        index = self.workloads.get(prompt.workload, 0)
        self.workloads[prompt.workload] = index + 1
        for place in range(len(self._arms)):
            which = (place + index) % len(self._arms)
            arm = self._arms[which]
            past = chunk.history if arm.cache == "carried" else ""
            job = plans.job_id(self._keys[which], prompt, repeat=0, history=past)
            chunk.jobs.append(JobSpec(job, prompt.workload, prompt.prompt_id, arm.name, arm_order=place, turn=turn))
        chunk.prompts.append(prompt.prompt_id)
        chunk.tokens += len(prompt.recorded_ids or ()) * len(self._arms)
        if self._carried:
            chunk.history = hashlib.sha256(f"{chunk.history}{chunk.jobs[-1].job_id}".encode()).hexdigest()


@dataclass
class _Chunk:
    """A shard under way. `history` digests what a carried arm has seen."""

    workload: str
    prompts: list[str] = field(default_factory=list)
    jobs: list[JobSpec] = field(default_factory=list)
    tokens: int = 0
    history: str = ""

    def to_json(self, cap: int) -> str:
        shard_id = hashlib.sha256(canonical([job.job_id for job in self.jobs])).hexdigest()[: plans.ID_DIGITS]
        jobs = [[j.job_id, j.prompt_id, j.arm, j.arm_order, j.turn] for j in self.jobs]
        return json.dumps([shard_id, self.workload, self.prompts, jobs, cap]) + "\n"


def read_shards(spool: Path) -> Iterator[PlannedShard]:
    """The shards that a planner wrote, one by one."""
    with spool.open(encoding="utf-8") as lines:
        for line in lines:
            shard_id, workload, prompts, jobs, cap = json.loads(line)
            specs = [JobSpec(j, workload, p, arm, arm_order=order, turn=turn) for j, p, arm, order, turn in jobs]
            yield PlannedShard(shard_id, workload, prompts, specs, cap)


def forget_ids(run_dir: Path) -> None:
    """Take every token id out of a finished run's prompts: counts and step rows stay.

    Raises RunError where a driver is at work on the run, which needs them.
    """
    with run_place.driver_lock(run_dir):
        _forget_ids(run_dir)


def _forget_ids(run_dir: Path) -> None:
    path, partial = run_dir / PROMPTS_FILE, run_dir / f".{PROMPTS_FILE}.part"
    with pq.ParquetFile(path) as file, pq.ParquetWriter(partial, PROMPTS, compression="zstd") as writer:
        for batch in file.iter_batches(batch_size=4096):
            rows = pa.Table.from_batches([batch])
            empty = pa.array([[]] * rows.num_rows, PROMPTS.field("prompt_ids").type)
            rows = rows.set_column(rows.schema.get_field_index("prompt_ids"), PROMPTS.field("prompt_ids"), empty)
            none = pa.nulls(rows.num_rows, PROMPTS.field("recorded_ids").type)
            rows = rows.set_column(rows.schema.get_field_index("recorded_ids"), PROMPTS.field("recorded_ids"), none)
            writer.write_table(rows.cast(PROMPTS))
    partial.replace(path)

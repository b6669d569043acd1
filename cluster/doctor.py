"""`dfbench doctor`: what this machine has, what is wrong with it, and what to do about each thing.

`fix` must be put right before a sweep can run; `warn` says what will not work, or will spoil timings; `ok` is fine.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement

from dfbench.cluster import head, run_place
from dfbench.errors import ClusterError, ModelError, RunError

PYTHON = (3, 11)
GB = 10**9
DISK_NEEDED, DISK_WANTED = 1 * GB, 10 * GB
MEMORY_NEEDED, MEMORY_WANTED = 2 * GB, 6 * GB
SHM_WANTED = 1 * GB
HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what was seen, how bad it is, and what to do where it is not fine."""

    name: str
    level: Literal["ok", "warn", "fix"]
    seen: str
    advice: str = ""


def examine(runs: Path, *, start_ray: bool = True) -> Iterator[Finding]:
    """Every check, quick ones first. `runs`: where run directories go."""
    checks: list[Callable[[], Finding]] = [
        python,
        packages,
        lambda: run_folder(runs),
        lambda: disk(runs),
        memory,
        shared_memory,
        load,
        embedded_model,
        hub,
        open_head,
        device,
    ]
    for check in checks:
        yield check()
    yield from device_problems()
    if start_ray:
        yield ray_starts()


def python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    """Whether this Python is new enough."""
    seen = ".".join(map(str, version))
    if version >= PYTHON:
        return Finding("python", "ok", seen)
    return Finding(
        "python", "fix", seen, f"install Python {PYTHON[0]}.{PYTHON[1]} or newer, and make a new .venv with it"
    )


def packages(requirements: list[str] | None = None) -> Finding:
    """Whether everything that dfbench requires is here, in a version that it works with."""
    wanted = importlib.metadata.requires("dfbench") or [] if requirements is None else requirements
    wrong, seen = [], []
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(str(requirement))
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(str(requirement))
        if requirement.name in ("ray", "torch", "transformers", "duckdb"):
            seen.append(f"{requirement.name} {version}")
    if wrong:
        listed = " ".join(f"'{requirement.split(';')[0].strip()}'" for requirement in wrong)
        return Finding("packages", "fix", f"{len(wrong)} missing or of another version", f"run: pip install {listed}")
    return Finding("packages", "ok", ", ".join(seen))


def run_folder(runs: Path, mounts: str | None = None) -> Finding:
    """Whether runs can be kept here: a local, writable file system."""
    try:
        run_place.require_usable(runs, mounts)
    except RunError as error:
        return Finding("run folder", "fix", str(runs.absolute()), str(error).rstrip("."))
    return Finding("run folder", "ok", f"{runs.absolute()} ({run_place.file_system(runs, mounts) or 'local'})")


def disk(runs: Path, free: int | None = None) -> Finding:
    """Room for records, and for what Ray spills."""
    if free is None:
        place = runs.absolute()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
    return _amount("disk", free, DISK_NEEDED, DISK_WANTED, "make room, or use --run on another disk")


def memory(free: int | None = None) -> Finding:
    """Memory that a model could be loaded into."""
    free = psutil.virtual_memory().available if free is None else free
    return _amount("memory", free, MEMORY_NEEDED, MEMORY_WANTED, "close other programs, or use a smaller model")


def shared_memory(free: int | None = None, place: Path = Path("/dev/shm")) -> Finding:
    """Where Ray keeps objects; in containers it is often tiny, and Ray then falls back to a slow disk."""
    if free is None:
        if not place.is_dir():
            return Finding("shared memory", "ok", f"no {place} on this system")
        free = shutil.disk_usage(place).free
    advice = "give the container more, for example docker run --shm-size=2g"
    return _amount("shared memory", free, 64 * 10**6, SHM_WANTED, advice)


def _amount(name: str, free: int, needed: int, wanted: int, advice: str) -> Finding:
    level: Literal["ok", "warn", "fix"] = "fix" if free < needed else "warn" if free < wanted else "ok"
    return Finding(name, level, f"{free / GB:.1f} GB free", "" if level == "ok" else advice)


def load(average: float | None = None, cores: int | None = None) -> Finding:
    """Whether other programs keep the processor busy."""
    average = os.getloadavg()[0] if average is None else average
    cores = cores or os.cpu_count() or 1
    seen = f"load {average:.1f} on {cores} cores"
    if average <= 0.5 * cores:
        return Finding("load", "ok", seen)
    return Finding("load", "warn", seen, "other programs are at work: timings will be noisy until they end")


def embedded_model() -> Finding:
    """The default model, which `quick` runs."""
    from dfbench.workers import models

    try:
        return Finding("embedded model", "ok", str(models.embedded_model()))
    except ModelError as error:
        return Finding("embedded model", "fix", "not installed", str(error).rstrip("."))


def hub(endpoint: str | None = None) -> Finding:
    """Whether models and data sets can be downloaded; nothing built in needs that but the sweep qwen3-8b."""
    endpoint = endpoint or os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    host = urlsplit(endpoint).hostname or endpoint
    advice = "models and data sets must be local: `--model PATH`, `--workload NAME=FILE.jsonl`"
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("0", "", "false", "no"):
        return Finding("hub", "warn", "HF_HUB_OFFLINE is set", advice)
    try:
        with socket.create_connection((host, urlsplit(endpoint).port or 443), timeout=HUB_TIMEOUT_S):
            return Finding("hub", "ok", f"{host} answers")
    except OSError as error:
        return Finding("hub", "warn", f"{host} cannot be reached ({error.strerror or error})", advice)


def open_head(address: str | None = None) -> Finding:
    """A Ray head that asks for no token runs code for whoever reaches it."""
    address = address or head.default_address()
    try:
        found = head.read_head(address)
    except ClusterError as error:
        if "token" in str(error):
            return Finding("ray head", "warn", f"{address} asks for a token", str(error).rstrip("."))
        return Finding("ray head", "ok", f"none at {address}")
    if not found.open:
        return Finding("ray head", "ok", f"{found.address} asks for a token")
    if head.is_loopback(found.address):
        return Finding(
            "ray head", "warn", f"{found.address} asks for no token", "other users of this machine can use it"
        )
    return Finding(
        "ray head",
        "fix",
        f"{found.address} asks for no token: whoever reaches it can run code on every node",
        "end it and start it with `dfbench up`, which makes a token",
    )


def device() -> Finding:
    """What a model would run on, and whether torch can use it."""
    import torch

    from dfbench.workers import telemetry

    seen = telemetry.devices()
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return Finding("device", "ok", f"{names} (torch {torch.__version__}, CUDA {torch.version.cuda})")
    if seen:
        names = ", ".join(found.name for found in seen)
        advice = "install a torch with CUDA: make setup TORCH=torch==2.13.0"
        return Finding("device", "fix", f"{names}, which torch {torch.__version__} cannot use", advice)
    return Finding("device", "ok", f"no GPU; the CPU, {torch.get_num_threads()} threads (torch {torch.__version__})")


def device_problems() -> Iterator[Finding]:
    """What would spoil timings on each device now."""
    from dfbench.workers import telemetry

    for found in telemetry.devices():
        name = f"device {found.index}"
        for problem in telemetry.problems(found):
            yield Finding(
                name, "warn", f"{found.name}: {problem}", "let it cool down, or raise its limits, before timing"
            )
        if found.processes:
            seen = f"{found.name}: {len(found.processes)} other processes use it"
            yield Finding(name, "warn", seen, "end them before timing")


def ray_starts() -> Finding:
    """Whether a Ray of our own starts on this machine; it is ended again at once."""
    import ray

    from dfbench.cluster import pool, session

    if ray.is_initialized():
        return Finding("ray", "ok", "already started in this process")
    try:
        pool.connect("local", workers=1)
        cpus = sum(node.cpus for node in pool.live_nodes())
    except ClusterError as error:  # It says what to do itself.
        return Finding("ray", "fix", f"it does not start: {error}".rstrip("."))
    except Exception as error:  # Whatever Ray raises on its way up is the finding.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        advice = f"see the newest folder in {session.temp_folder()} for its logs"
        return Finding("ray", "fix", f"it does not start: {reason}", advice)
    finally:
        session.end()
    return Finding("ray", "ok", f"starts here, {cpus} cores")

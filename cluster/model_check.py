"""Whether a machine has a model or can have it, and on which device it fits, without loading or hashing anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dfbench.errors import ModelError
from dfbench.workers import memory, models, telemetry
from dfbench.workers.spec import EMBEDDED_MODEL, TargetSpec

_HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Availability:
    """`where` is a phrase such as "is here"; `config` is its config.json where that can be read now."""

    where: str
    config: Mapping[str, Any] | None = None


def availability(spec: TargetSpec) -> Availability:
    """Where the model would come from. Raises ModelError where it can neither be found nor be had."""
    if spec.model == EMBEDDED_MODEL:
        models.embedded_model()
        return Availability("is here")
    path = Path(spec.model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return Availability("is here")
    if path.is_dir():
        return _in_folder(spec.model, path)
    if spec.model.startswith((".", "/", "~")) or spec.model.count("/") != 1:
        raise ModelError(f"the model '{spec.model}' is not on this machine: copy it there, or name a hub id.")
    return _in_cache(spec) or _on_hub(spec)


def fit(spec: TargetSpec, found: Availability) -> tuple[str, str | None]:
    """What to say about memory, and the problem if the model fits no device of this machine."""
    if found.config is None:
        return f"{spec.model} {found.where}", None
    device, free = device_memory()
    need = memory.footprint(found.config, spec)
    context = need.largest_context(free)
    if context:
        return f"{spec.model} {found.where}, fits {device} with up to {context} tokens of context", None
    return (
        f"{spec.model} {found.where}",
        f"{spec.model} needs {need.total(1) / 1e9:.1f} GB and {device} has {free / 1e9:.1f} GB free",
    )


def device_memory() -> tuple[str, int]:
    """Name and free bytes of the device that an actor would use here."""
    known = [(device.name, device.memory_free) for device in telemetry.devices() if device.memory_free is not None]
    return known[0] if known else ("the CPU", int(psutil.virtual_memory().available))


def _in_folder(name: str, folder: Path) -> Availability:
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.gguf")):
        raise ModelError(f"the folder '{name}' holds no weights (*.safetensors): name the model's folder.")
    try:
        return Availability("is here", json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return Availability("is here")


def _in_cache(spec: TargetSpec) -> Availability | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(spec.model, revision=spec.revision, local_files_only=True))
        return _in_folder(spec.model, folder)
    except (OSError, ValueError, ModelError):
        return None


def _on_hub(spec: TargetSpec) -> Availability:
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        info = HfApi().model_info(spec.model, revision=spec.revision, timeout=_HUB_TIMEOUT_S, files_metadata=True)
    except Exception as error:  # Whatever the hub client raises: it cannot be had from here.
        raise ModelError(
            f"the model '{spec.model}' is neither on this machine nor to be had from the hub ({type(error).__name__}): "
            "copy it to this machine."
        ) from error
    size = sum(file.size or 0 for file in info.siblings or () if file.rfilename.endswith(".safetensors"))
    free = _free_disk(Path(HF_HUB_CACHE))
    if size > free:
        raise ModelError(
            f"the model '{spec.model}' is a download of {size / 1e9:.1f} GB, and the disk has {free / 1e9:.1f} GB free."
        )
    return Availability(f"can be downloaded ({size / 1e9:.1f} GB)")


def _free_disk(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free

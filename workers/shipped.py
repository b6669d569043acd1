"""Files that drafters need (frozen tables, cost curves), sent to the workers by content.

An arm names them by SHA-256, and a worker's machine keeps what it was sent: no path has to exist on every node.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from dfbench.drafters import registry
from dfbench.errors import DfbenchError, OptionError
from dfbench.workers.model_cache import cache_root
from dfbench.workers.spec import ArmSpec


class Shipped(NamedTuple):
    """One file on its way to a worker."""

    sha256: str
    content: bytes


def named(arms: Iterable[ArmSpec]) -> Iterator[tuple[str, Path]]:
    """SHA-256 and path of every file that these arms' options name and that lies on this machine, each once."""
    seen: set[str] = set()
    for arm in arms:
        try:
            files = registry.files(arm.drafter, arm.params)
        except OptionError:
            continue  # A drafter that cannot be had fails its own jobs, not the sweep.
        for file in files:
            path, digest = file.path, file.sha256
            if path and digest and digest not in seen and Path(path).expanduser().is_file():
                seen.add(digest)
                yield digest, Path(path).expanduser()


def keep(files: Iterable[Shipped]) -> None:
    """Put files where `here` finds them, whole or not at all. Raises DfbenchError for one that arrived damaged."""
    for file in files:
        if hashlib.sha256(file.content).hexdigest() != file.sha256:
            raise DfbenchError(f"a file with SHA-256 {file.sha256} is not what it was when the sweep was planned.")
        target = folder() / file.sha256
        if target.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".part-", delete=False) as partial:
            partial.write(file.content)
        Path(partial.name).replace(target)


def here() -> dict[str, Path]:
    """What this machine was sent, by SHA-256."""
    if not folder().is_dir():
        return {}
    return {path.name: path for path in folder().iterdir() if not path.name.startswith(".")}


def folder() -> Path:
    """Where shipped files lie; it can be deleted at any time."""
    return cache_root() / "files"

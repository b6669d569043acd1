"""A sweep and every file it names, packed so that it means the same on another machine.

Files are named after their content: the same sweep sent twice is the same bundle, so the head goes on with its run.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from dfbench.cluster.sweep import Sweep
from dfbench.drafters import registry
from dfbench.errors import ClusterError, SweepError

SWEEP_FILE = "sweep.yaml"
FILES = "files"
LIMIT = 400 * 10**6
"""Bytes that may travel; Ray refuses more than 512 MiB."""


def pack(sweep: Sweep, folder: Path) -> str:
    """Write the sweep and its files into an empty folder; returns the digest that names the bundle.

    Raises SweepError for a file that cannot be read and ClusterError when the bundle would be too large.
    """
    data = sweep.to_dict()
    for workload in data["workloads"]:
        _take(workload, "file", folder)
    for arm in data["arms"]:
        arm.pop("source", None)  # Where a drafter comes from is for the machine that runs it to say.
        for file in registry.files(arm["drafter"], arm):
            _take(file.holder, file.option, folder)
    (folder / SWEEP_FILE).write_text(yaml.safe_dump(data, sort_keys=True, allow_unicode=True), encoding="utf-8")
    _check_size(folder)
    # The files' names hold their digests, so the sweep's text stands for the whole bundle.
    return hashlib.sha256((folder / SWEEP_FILE).read_bytes()).hexdigest()[:16]


def _take(item: dict[str, Any], key: str, folder: Path) -> None:
    """Copy the file that an entry names, and name the copy instead. Paths in a sweep count from the sweep's folder."""
    if item.get(key) is None:
        return
    source = Path(item[key]).expanduser()
    try:
        with source.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        # A name from a sweep must not become a path: only its harmless characters are kept, for people to recognise.
        name = f"{digest[:16]}-{re.sub(r'[^A-Za-z0-9._-]', '_', source.name)[-60:]}"
        (folder / FILES).mkdir(exist_ok=True)
        shutil.copyfile(source, folder / FILES / name)
    except OSError as error:
        raise SweepError(f"{source} cannot be sent to the head: {error.strerror}.") from error
    item[key] = f"{FILES}/{name}"


def _check_size(folder: Path) -> None:
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > LIMIT:
        raise ClusterError(
            f"the sweep's files are {size / 1e6:.0f} MB and {LIMIT / 1e6:.0f} MB can be sent: copy them to the head "
            "and submit there."
        )

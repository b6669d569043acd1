"""A sweep or a replay and every file it names, packed so that it means the same on another machine.

Files are named after their content: the same sweep sent twice is the same bundle, so the head goes on with its run.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import yaml

from dfbench.cluster.commit import sha256
from dfbench.cluster.ledger_schema import LEDGER_FILE
from dfbench.cluster.run_place import exists
from dfbench.cluster.runspec import PROMPTS_FILE
from dfbench.cluster.scratch import is_full
from dfbench.cluster.sources_files import find_files, readable
from dfbench.cluster.sweep import Arm, Sweep
from dfbench.drafters import registry
from dfbench.errors import ClusterError, SweepError

SWEEP_FILE = "sweep.yaml"
FILES = "files"
ARMS_FILE = "arms.yaml"
PLACE = "uploads"
"""Where the head keeps bundles, in its home folder, each in a folder that is called by its digest."""
LIMIT = 400 * 10**6
"""Bytes that may travel; Ray refuses more than 512 MiB."""
_TABLES = frozenset({"jobs", "calibration"})
_TRIES = 3


def pack(sweep: Sweep, folder: Path) -> str:
    """Write the sweep and its files into an empty folder; returns the digest that names the bundle.

    Raises SweepError for a file that cannot be read and ClusterError when the bundle would be too large.
    """
    data = sweep.to_dict()
    for workload in data["workloads"]:
        _take(workload, "file", folder)
    for arm in data["arms"]:
        _take_files(arm, folder)
    (folder / SWEEP_FILE).write_text(yaml.safe_dump(data, sort_keys=True, allow_unicode=True), encoding="utf-8")
    _check_size(folder)
    # The files' names hold their digests, so the sweep's text stands for the whole bundle.
    return hashlib.sha256((folder / SWEEP_FILE).read_bytes()).hexdigest()[:16]


def pack_replay(arms: Sequence[Arm], sources: dict[str, Path], folder: Path) -> tuple[str, dict[str, str]]:
    """Write arms, and files or folders by what they are for, into an empty folder: a run is a folder too.

    Returns the digest that names the bundle, and what to call each of them in a command on the head, `arms` among them.
    Raises as `pack` does.
    """
    _check_size(*(source for source in sources.values() if not exists(source)))
    listed = [arm.model_dump(mode="json") for arm in arms]
    for arm in listed:
        arm.update(arm.pop("options"))
        _take_files(arm, folder)
    for role, source in sources.items():
        (folder / role).mkdir()
        _copy(source, folder / role / _harmless(source.absolute().name))
    copied = [(file.relative_to(folder).as_posix(), sha256(file)) for file in find_files(folder)]
    name = hashlib.sha256(repr((listed, sorted(copied))).encode()).hexdigest()[:16]
    place = f"{PLACE}/{name}"
    for arm in listed:
        for file in registry.files(arm["drafter"], arm):
            if file.holder.get(file.option) is not None:
                file.holder[file.option] = f"{place}/{file.holder[file.option]}"
    (folder / ARMS_FILE).write_text(yaml.safe_dump(listed, sort_keys=True, allow_unicode=True), encoding="utf-8")
    _check_size(folder)
    named = {role: f"{place}/{role}/{_harmless(source.absolute().name)}" for role, source in sources.items()}
    return name, {**named, "arms": f"{place}/{ARMS_FILE}"}


def _copy(source: Path, target: Path) -> None:
    """A file; of a folder what a replay reads of it; of a run what is committed, as its ledger stands at one moment."""
    try:
        if source.is_file():
            shutil.copyfile(source, target)
        elif not source.is_dir():
            raise SweepError(f"{source} is a pipe or a device, which cannot be sent: name a file or a folder.")
        elif exists(source):
            _copy_run(source, target)
        else:
            _copy_files(source, target)
    except (OSError, sqlite3.Error) as error:
        _not_sent(source, error)


def _copy_files(source: Path, target: Path) -> None:
    """A folder's logs. What a replay leaves out here (hidden files, folders behind links) is left out there."""
    files = find_files(source)
    if not files:
        raise SweepError(f"{source} holds no recorded answers: it is empty.")
    for file in files:
        copy = target / readable(file.relative_to(source))
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(file, copy)
        except OSError as error:
            _not_sent(file, error)


def _copy_run(source: Path, target: Path) -> None:
    """What others read of a run: its ledger, its prompts and the files of `_TABLES`.

    A driver may merge files meanwhile: then the ledger is asked again.
    """
    for attempt in range(_TRIES):
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        with (
            closing(sqlite3.connect(source / LEDGER_FILE)) as ledger,
            closing(sqlite3.connect(target / LEDGER_FILE)) as copy,
        ):
            ledger.backup(copy)
            files = copy.execute("select name, tbl from files where live").fetchall()
        try:
            for name in (PROMPTS_FILE, *(name for name, table in files if table in _TABLES)):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, target / name)
            return
        except FileNotFoundError as error:
            if attempt == _TRIES - 1:
                _not_sent(Path(str(error.filename)), error)


def _not_sent(file: Path, error: Exception) -> NoReturn:
    if is_full(error):  # the copy's place, not the file
        raise error
    reason = getattr(error, "strerror", None) or error
    raise SweepError(f"{readable(file)} cannot be sent to the head: {reason}.") from error


def _take_files(arm: dict[str, Any], folder: Path) -> None:
    """Copy the files that an arm's drafter reads, and name the copies instead."""
    arm.pop("source", None)  # Where a drafter comes from is for the machine that runs it to say.
    for file in registry.files(arm["drafter"], arm):
        _take(file.holder, file.option, folder)


def _take(item: dict[str, Any], key: str, folder: Path) -> None:
    """Copy the file that an entry names, and name the copy instead. Paths in a sweep count from the sweep's folder."""
    if item.get(key) is None:
        return
    source = Path(item[key]).expanduser()
    try:
        name = f"{sha256(source)[:16]}-{_harmless(source.name)}"
        (folder / FILES).mkdir(exist_ok=True)
        shutil.copyfile(source, folder / FILES / name)
    except OSError as error:
        _not_sent(source, error)
    item[key] = f"{FILES}/{name}"


def _harmless(name: str) -> str:
    """A name from a sweep must not become a path: only harmless characters are kept, for people to recognise."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[-60:].lstrip(".") or "_"


def _check_size(*places: Path) -> None:
    size = sum(file.stat().st_size for place in places for file in find_files(place))
    if size > LIMIT:
        raise ClusterError(
            f"the files to be sent are {size / 1e6:.0f} MB and {LIMIT / 1e6:.0f} MB can be sent: copy them to the head "
            "and give the command there."
        )

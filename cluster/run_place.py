"""The place of a run: a directory on a local disk, with one seat for a driver."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dfbench.cluster.ledger_schema import LEDGER_FILE, now
from dfbench.errors import RunError

LOCK_FILE = "driver.lock"
_LOOKS, _LOOK_S = 4, 0.02

NETWORK_FILE_SYSTEMS = frozenset(
    (
        *("nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "9p", "afs", "lustre", "gpfs", "beegfs"),
        *("ceph", "glusterfs", "davfs", "ocfs2", "gfs2", "orangefs", "pvfs2", "fuse.sshfs", "fuse.glusterfs"),
        *("fuse.cephfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs", "fuse.davfs2"),
    )
)


def exists(run_dir: Path) -> bool:
    """Whether this directory holds a run."""
    return (run_dir / LEDGER_FILE).is_file()


def file_system(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that `path` is (or would be) on; "" where this machine does not tell."""
    if mounts is None:
        table = Path("/proc/self/mounts")
        mounts = table.read_text() if table.is_file() else ""
    place = str(path.absolute() if not path.exists() else path.resolve())
    best, kind = -1, ""
    for line in mounts.splitlines():
        _, point, found, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), found
    return kind


def require_usable(run_dir: Path, mounts: str | None = None) -> None:
    """Raise RunError unless a run may live here: a writable directory on a local file system. Writes nothing."""
    kind = file_system(run_dir, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise RunError(
            f"{run_dir} is on a network file system ({kind}), where the ledger's locks do not work: "
            "write --run with a directory on a local disk, and use `dfbench export` to copy the run."
        )
    there = run_dir
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise RunError(f"{there} is not a directory: write --run with the name of one.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunError(f"{there} is not writable: write --run with a directory that is.")


def unwritable(run_dir: Path, error: Exception) -> str:
    """What could not be written to, as a sentence begins: the run, unless the error names a file elsewhere."""
    file = getattr(error, "filename", None)
    if not isinstance(file, str) or Path(file).resolve().is_relative_to(run_dir.resolve()):
        return f"the run cannot be written to {run_dir}"
    return f"the run cannot go on, since nothing can be written to {Path(file).parent}"


@contextmanager
def driver_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run's only driver seat; the death of the process gives it back. Raises RunError when it is taken."""
    with (run_dir / LOCK_FILE).open("a+") as handle:
        try:
            _seize(handle)
            _require_same(handle, run_dir / LOCK_FILE)
        except OSError as error:
            raise RunError(f"another driver{_holder(handle, run_dir)}") from error
        handle.truncate(0)
        handle.write(json.dumps({"pid": os.getpid(), "since": now()}))
        handle.flush()
        yield


def driver_alive(run_dir: Path) -> bool:
    """Whether a driver holds the run now."""
    try:
        handle = (run_dir / LOCK_FILE).open("rb")  # also where nothing can be written, and never made anew
    except FileNotFoundError:
        return False
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _seize(handle: IO[str]) -> None:
    """Take the seat. `driver_alive` holds it for an instant to see whether it is taken: that is waited for."""
    for look in range(_LOOKS):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if look == _LOOKS - 1:
                raise
            time.sleep(_LOOK_S)


def _require_same(handle: IO[str], path: Path) -> None:
    """Raise OSError where who held the seat has removed it since, so that the next one takes another."""
    if not path.exists() or not os.path.samestat(os.fstat(handle.fileno()), path.stat()):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))


def _holder(handle: IO[str], run_dir: Path) -> str:
    """Who has the seat and what to do about it, as the rest of a sentence."""
    handle.seek(0)
    try:
        pid = int(json.loads(handle.read())["pid"])
    except (ValueError, KeyError):
        return f" is at work on {run_dir}: wait for it, or stop it first."
    if _is_suspended(pid):
        return f" (process {pid}) of {run_dir} is suspended: let it go on with `kill -CONT {pid}`, or end it first."
    return f" (process {pid}) is at work on {run_dir}: wait for it, or stop it first."


def _is_suspended(pid: int) -> bool:
    """Whether a process was stopped, as Ctrl-Z does, and would go on; false where this machine does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""The folder in which a Ray of our own keeps its sockets and logs: whether there is room for it, and its removal.

Ray leaves one behind for every start. What this process started and has ended, it removes; what it did not, never.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._common.utils import get_default_ray_temp_dir

from dfbench.errors import ClusterError

ROOM = 2**20
"""Bytes that a Ray writes there at least; logs and sockets, since objects are in shared memory."""
_GONE_WITHIN_S = 10.0


def temp_folder() -> Path:
    """Where Ray makes its folders: `ray` in RAY_TMPDIR, else TMPDIR, else /tmp."""
    return Path(str(get_default_ray_temp_dir()))  # type: ignore[no-untyped-call]


def require_room() -> None:
    """Raise ClusterError where Ray could not write: it would wait a minute for its files, then say something else."""
    folder = temp_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(ROOM))
            probe.flush()
    except OSError as error:
        raise unusable(folder, error) from error


def unusable(folder: Path, error: OSError) -> ClusterError:
    """What to say where Ray cannot use its folder."""
    return ClusterError(
        f"Ray cannot write to its folder {folder} ({error.strerror or error}): make room there, or set TMPDIR (or "
        "RAY_TMPDIR) to a folder where it can."
    )


def folders() -> set[Path]:
    """The folders of all Rays that were ever started under this process's number."""
    return set(temp_folder().glob(f"session_*_{os.getpid()}"))


def end(*, keep: bool = False) -> Path | None:
    """End or leave the Ray of this process. What is kept of one that was started here, else None.

    A folder stays, too, while anything of that Ray lives, or where another process could have a share in it.
    """
    node = _own_node()
    if node is None:
        ray.shutdown()
        return None
    folder, processes = Path(node.get_session_dir_path()), _processes(node)
    ray.shutdown(wait_for_processes=True)
    if keep:
        return folder
    _, left = psutil.wait_procs(processes, timeout=_GONE_WITHIN_S)
    if not left and folder.name.endswith(f"_{os.getpid()}"):
        remove(folder)
    return None


def remove(folder: Path) -> None:
    """Remove a session's folder, and the links beside it that lead there."""
    shutil.rmtree(folder, ignore_errors=True)
    for link in folder.parent.iterdir():
        with contextlib.suppress(OSError):
            if link.is_symlink() and folder in (target := folder.parent / link.readlink(), target.parent):
                link.unlink()


def _own_node() -> Any:
    """Ray's account of the node that this process started; None where it joined one, or has none."""
    node = import_module("ray._private.worker")._global_node
    return node if node is not None and node.is_head() else None


def _processes(node: Any) -> list[psutil.Process]:
    """Everything that belongs to a node: what was started for it, and what that started, workers above all."""
    found: list[psutil.Process] = []
    for started in (info for infos in node.all_processes.values() for info in infos):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(started.process.pid)
            found += [process, *process.children(recursive=True)]
    return found

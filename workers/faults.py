"""Named points at which a test can make a process die, wait or fail: nothing, and no cost, unless asked for.

    DFBENCH_FAULT=commit.before_rename:kill            SIGKILL this process at that point
    DFBENCH_FAULT=worker.job:kill@3                    … when the point is reached for the third time
    DFBENCH_FAULT=worker.job:raise;commit.inside:wait  several points; `raise` fails with OSError, `wait` stops here
    DFBENCH_FAULT=worker.job:break                     fails as a device does that will not work again
    DFBENCH_FAULT=worker.job:hold@3                    every process that gets there stays until `worker.job.go` appears
    DFBENCH_FAULT_DIR=folder                           note each fault in a file there, and let each happen only once;
                                                       `hold` notes `worker.job.PID` for each process and needs it

Points: commit.{before_write,before_rename,after_rename,inside,after}, compact.{before_switch,after_switch},
worker.{load,job,part}, driver.{dispatched,collected}.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter
from pathlib import Path

_seen: Counter[str] = Counter()


def reach(point: str) -> None:
    """Say that this point is reached; the fault that `DFBENCH_FAULT` has for it happens now."""
    wanted = os.environ.get("DFBENCH_FAULT")
    if not wanted:
        return
    for entry in wanted.split(";"):
        name, _, action = entry.partition(":")
        if name == point:
            action, _, count = action.partition("@")
            _seen[point] += 1
            if _seen[point] >= int(count or 1):
                if action == "hold":
                    _hold(point)
                elif _claim(point):
                    _act(action, point)


def _claim(point: str) -> bool:
    """Whether the fault is still to happen: a file that appears once makes sure that it happens once."""
    folder = os.environ.get("DFBENCH_FAULT_DIR")
    if not folder:
        return True
    try:
        with (Path(folder) / point).open("x") as note:
            note.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def _hold(point: str) -> None:
    folder = Path(os.environ["DFBENCH_FAULT_DIR"])
    if not (folder / f"{point}.go").exists():
        (folder / f"{point}.{os.getpid()}").touch()
    while not (folder / f"{point}.go").exists():
        time.sleep(0.01)


def _act(action: str, point: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "wait":
        time.sleep(3600)
    elif action == "raise":
        raise OSError(errno.ENOSPC, f"fault at {point}")
    elif action == "break":
        raise RuntimeError(f"CUDA error: an illegal memory access was encountered (fault at {point})")

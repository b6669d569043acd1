"""Ray's processes on this machine: found by what they serve, ended by their ids.

Never by `ray stop`, which ends every Ray process of the user, a colleague's cluster included.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_HEAD_PROGRAMS = ("monitor.py", "dashboard.py", "ray.util.client.server")


def raylets(head: bool) -> Iterator[tuple[psutil.Process, str]]:
    """This user's Ray nodes on this machine, heads or workers, each with the address of its head."""
    for process in psutil.process_iter(["cmdline", "uids"]):
        words = process.info["cmdline"] or []
        uids = process.info["uids"]
        if not words or Path(words[0]).name != "raylet" or uids is None or uids.real != os.getuid():
            continue
        if ("--head" in words) == head:
            yield process, _flag(words, "--gcs-address")


def head_processes(address: str) -> list[psutil.Process]:
    """The processes that make up the head at `address`, apart from its raylet."""
    found = []
    for process in psutil.process_iter(["cmdline", "uids"]):
        words = process.info["cmdline"] or []
        if not words or process.info["uids"] is None or process.info["uids"].real != os.getuid():
            continue
        if Path(words[0]).name == "gcs_server" and _flag(words, "--gcs_server_port") == address.rpartition(":")[2]:
            found.append(process)
        elif any(word.endswith(_HEAD_PROGRAMS) for word in words) and address in _addresses(words):
            found.append(process)
    return found


def _addresses(words: list[str]) -> tuple[str, str]:
    return _flag(words, "--gcs-address"), _flag(words, "--address")


def end(processes: list[psutil.Process], patience_s: float) -> None:
    """Ask the processes to end, and make those that have not after `patience_s`."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(processes, timeout=patience_s)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5)


def _flag(words: list[str], name: str) -> str:
    return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")

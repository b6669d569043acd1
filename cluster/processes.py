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
_LABEL = "dfbench/dfbench"


def raylets(head: bool, labelled: bool = False) -> Iterator[tuple[psutil.Process, str]]:
    """This user's Ray nodes on this machine, heads or workers, each with the address of its head.

    `labelled`: only those that dfbench's commands started, not the private Ray of some driver.
    """
    for process, words in _own():
        wanted = Path(words[0]).name == "raylet" and ("--head" in words) == head
        if wanted and (not labelled or any(_LABEL in word for word in words)):
            yield process, _flag(words, "--gcs-address")


def own_address(raylet: psutil.Process) -> str:
    """The address at which a node on this machine serves; "" when it has just ended."""
    try:
        return _flag(raylet.cmdline(), "--node_ip_address")
    except psutil.NoSuchProcess:
        return ""


def head_processes(port: int) -> list[psutil.Process]:
    """The processes that make up the head that serves this port of this machine, apart from its node."""
    return [process for process, words in _own() if _serves(words, port) or _belongs(words, port)]


def _serves(words: list[str], port: int) -> bool:
    return Path(words[0]).name == "gcs_server" and _flag(words, "--gcs_server_port") == str(port)


def _belongs(words: list[str], port: int) -> bool:
    """Whether this is one of the programs that run beside a head, which is on the same machine."""
    if not any(word.endswith(_HEAD_PROGRAMS) for word in words):
        return False
    return any(_flag(words, flag).endswith(f":{port}") for flag in ("--gcs-address", "--address"))


def _own() -> Iterator[tuple[psutil.Process, list[str]]]:
    """This user's processes with their command lines."""
    for process in psutil.process_iter(["cmdline", "uids"]):
        words, uids = process.info["cmdline"], process.info["uids"]
        if words and uids is not None and uids.real == os.getuid():
            yield process, words


def _flag(words: list[str], name: str) -> str:
    return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")


def end(processes: list[psutil.Process], patience_s: float) -> None:
    """Ask the processes to end, and make those that have not after `patience_s`."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(processes, timeout=patience_s)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5)

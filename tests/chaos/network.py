"""A cable that can be cut: a network namespace for a node, reached through a router that is another one.

Both ends of the cable stay up when the router's link goes down, as with a real switch: addresses and local services
keep working on either side, and packets between them are lost. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

TOOLS = ("ip", "unshare", "nsenter")


class NotPossible(Exception):
    """This machine has or allows no network namespaces."""


@dataclass(frozen=True)
class Cable:
    """`near` is an address of this machine, `far` one in the namespace beyond the router."""

    near: str
    far: str
    router: int
    beyond: int

    def cut(self) -> None:
        _inside(self.router, "ip", "link", "set", "far", "down")

    def mend(self) -> None:
        _inside(self.router, "ip", "link", "set", "far", "up")

    @contextlib.contextmanager
    def node(self, head: str, log: Path, cpus: int = 1) -> Iterator[int]:
        """A node of the cluster of this head, over there; gives the id of the process above all of its own."""
        place = tempfile.mkdtemp(prefix="dfc", dir="/tmp")  # Ray's sockets need a short path.
        words = ["ray.scripts.scripts", "start", "--block", f"--address={head}", f"--node-ip-address={self.far}"]
        words += [f"--num-cpus={cpus}", f"--temp-dir={place}", "--object-store-memory=100000000"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["nsenter", "-t", str(self.beyond), "-n", sys.executable, "-m", *words],
                env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield process.pid
        finally:
            _end(process)
            shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def cable() -> Iterator[Cable]:
    """A router and a namespace beyond it, for as long as the context lasts. Raises NotPossible."""
    if os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        raise NotPossible(f"needs root and {', '.join(TOOLS)}")
    with contextlib.ExitStack() as stack:
        router, beyond = (stack.enter_context(_namespace()) for _ in range(2))
        made = Cable(*(f"10.78.{os.getpid() % 250}.{last}" for last in (1, 6)), router, beyond)
        try:
            _lay(made)
        except subprocess.CalledProcessError as error:
            raise NotPossible(f"no network namespaces here: {error.stderr.decode().strip()}") from error
        yield made


def _lay(made: Cable) -> None:
    network, link = made.near.rpartition(".")[0], f"df{os.getpid()}"
    _call("ip", "link", "add", link, "type", "veth", "peer", "name", "near", "netns", str(made.router))
    _inside(made.router, "ip", "link", "add", "far", "type", "veth", "peer", "name", "cable", "netns", str(made.beyond))
    _call("ip", "addr", "add", f"{made.near}/30", "dev", link)
    _call("ip", "link", "set", link, "up")
    _inside(made.router, "ip", "addr", "add", f"{network}.2/30", "dev", "near")
    _inside(made.router, "ip", "addr", "add", f"{network}.5/30", "dev", "far")
    for name in ("near", "far"):
        _inside(made.router, "ip", "link", "set", name, "up")
    _inside(made.router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    _inside(made.beyond, "ip", "addr", "add", f"{made.far}/30", "dev", "cable")
    for name in ("lo", "cable"):
        _inside(made.beyond, "ip", "link", "set", name, "up")
    _inside(made.beyond, "ip", "route", "add", "default", "via", f"{network}.5")
    _call("ip", "route", "add", f"{network}.4/30", "via", f"{network}.2")


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """A network namespace; the process id of the one that keeps it."""
    keeper = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE)
    try:
        assert keeper.stdout is not None
        if not keeper.stdout.readline():
            raise NotPossible("no network namespaces here")
        yield keeper.pid
    finally:
        keeper.kill()
        keeper.wait()
        if keeper.stdout is not None:
            keeper.stdout.close()


def _inside(pid: int, *words: str) -> None:
    _call("nsenter", "-t", str(pid), "-n", *words)


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a node and everything below it, whatever state it is in."""
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
        for one in (*below, process):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(below, timeout=10)
    process.wait()

"""Driving a cluster from a machine that is no member of it, such as a laptop: the work is done on the head.

    submit ─► bundle ─► Ray Jobs ─► `dfbench submit` on the head ─► its output here (or --detach)
    status, cancel, report, … ─► Ray Jobs ─► the same command on the head ─► its output here

On the head everything lives in one folder (`~/dfbench`, or what DFBENCH_HOME says there): `runs/` and `uploads/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dfbench import __version__
from dfbench.cluster import bundle, headjobs, processes, runs
from dfbench.cluster.head import Head, default_address, read_head
from dfbench.cluster.join import gcs_address, head_versions
from dfbench.cluster.scratch import scratch
from dfbench.cluster.stack import label_value
from dfbench.cluster.sweep import Arm, Sweep
from dfbench.errors import ClusterError

Say = Callable[[str], None]
HOME_VARIABLE = "DFBENCH_HOME"
INTERRUPTED = 130
ASK = ("status", "sql", "report", "guard", "retry")
"""Commands to give next about a run on a head; there are others."""


@dataclass(frozen=True)
class SubmitOptions:
    """What else `dfbench submit` is told on the head."""

    run: str | None = None
    new: bool = False
    allow_version_change: bool = False
    dry_run: bool = False
    patience: float | None = None

    def arguments(self) -> list[str]:
        """As the command line takes them."""
        flags = {"--new": self.new, "--allow-version-change": self.allow_version_change, "--dry-run": self.dry_run}
        named = ["--run", self.run] if self.run else []
        named += ["--patience", f"{self.patience:g}"] if self.patience is not None else []
        return named + [flag for flag, wanted in flags.items() if wanted]


def home() -> Path:
    """The folder where a head keeps the runs that it drives for others."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / "dfbench")


def needed(address: str) -> bool:
    """Whether the head at `address` has to drive, because this machine is no node of its cluster; not for "local"."""
    if address in ("auto", "local"):
        return False
    head = read_head(address)
    members = {at for is_head in (True, False) for _, at in processes.raylets(is_head)}
    return gcs_address(head) not in members


def submit(sweep: Sweep, address: str, options: SubmitOptions, say: Say, *, detach: bool = False) -> int:
    """Send a sweep to the head, which drives it. Returns the exit status there; with `detach`, once it has begun."""
    if address == "local":
        raise ClusterError("--detach needs a cluster to leave the work to: name its head with --address.")
    head = _checked(address)
    with scratch() as folder:
        name = bundle.pack(sweep, folder)
        sent = ["submit", f"{bundle.PLACE}/{name}/{bundle.SWEEP_FILE}", "--address", "auto", *options.arguments()]
        job = headjobs.start(head, sent, headjobs.Upload(name, folder))
    if options.dry_run:
        return _answered(head, job, say)
    if not detach:
        return _followed(head, job, say)
    ended = headjobs.begin(head, job, say)
    if ended is not None:
        return ended
    say(f"{sweep.name} runs on {head.address} as {job}")
    say(f"to see it: dfbench status --address {head.address}")
    say(f"to stop it: dfbench cancel --address {head.address}")
    return 0


def replay(source: Path, arms: Sequence[Arm], curve: str | None, options: Sequence[str], address: str, say: Say) -> int:
    """Send a replay to the head, with its source, arms and cost curve where they lie here. Returns the exit status.

    What does not lie here is taken for something on the head, such as a run that it drove.
    """
    head = _checked(address)
    from dfbench.cluster.verify_cost import EXAMPLE

    given = {"source": source, **({"curve": Path(str(curve))} if curve not in (None, EXAMPLE) else {})}
    here = {role: found for role, path in given.items() if (found := _lies_here(path)) is not None}
    with scratch() as folder:
        name, there = bundle.pack_replay(arms, here, folder)
        sent = ["replay", there.get("source", str(source)), "--arms", there["arms"], "--address", "auto", *options]
        if curve is not None:
            sent += ["--verify-cost", there.get("curve", curve)]
        job = headjobs.start(head, sent, headjobs.Upload(name, folder))
    return _followed(head, job, say)


def _lies_here(path: Path) -> Path | None:
    return next((place for place in (path.expanduser(), runs.RUNS / path) if place.exists()), None)


def _followed(head: Head, job: str, say: Say) -> int:
    """Follow a job that drives, and goes on when nobody follows."""
    try:
        ended = headjobs.follow(head, job, say)
    except KeyboardInterrupt:
        say(f"no longer following; the sweep goes on. To see it: dfbench status --address {head.address}")
        return INTERRUPTED
    if ended in (0, 1):
        say(f"the run is on {head.address}: dfbench {', '.join(ASK)} and cancel take --address {head.address}")
    return ended


def command(arguments: Sequence[str], address: str, say: Say) -> int:
    """Run a dfbench command in the head's folder; its output comes here. Returns its exit status."""
    head = _checked(address)
    return _answered(head, headjobs.start(head, arguments), say)


def _answered(head: Head, job: str, say: Say) -> int:
    """Follow a job that only looks, and is of no use once nobody follows or (BrokenPipeError of `say`) reads."""
    try:
        return headjobs.follow(head, job, say)
    except (KeyboardInterrupt, BrokenPipeError):
        headjobs.stop(head, job)
        raise


def forward(argv: Sequence[str], address: str, say: Say, *, drives: bool = False) -> int:
    """Run this very command line on the head, without its --address; one that drives does so on its cluster."""
    kept = [word for place, word in enumerate(argv) if not _names_address(argv, place)]
    if not drives:
        return command(kept, address, say)
    head = _checked(address)
    return _followed(head, headjobs.start(head, [*kept, "--address", "auto"]), say)


def _names_address(argv: Sequence[str], place: int) -> bool:
    before = argv[place - 1] if place else ""
    return argv[place] == "--address" or argv[place].startswith("--address=") or before == "--address"


def _checked(address: str) -> Head:
    """The head, once it is sure to understand us. Raises ClusterError."""
    head = read_head(default_address() if address == "auto" else address)
    if not head.dashboard:
        raise ClusterError(
            f"the head at {head.address} takes no jobs: start it with `dfbench up`, or with its dashboard."
        )
    theirs = head_versions(head).get("dfbench/dfbench")
    if theirs is not None and theirs != label_value(__version__):
        raise ClusterError(f"dfbench is {__version__} here and {theirs} on the head: install what the head has.")
    return head

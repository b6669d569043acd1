"""Driving a cluster from a machine that is no member of it, such as a laptop: the work is done on the head.

    submit ─► bundle ─► Ray Jobs ─► `dfbench submit` on the head ─► its output here (or --detach)
    status, cancel, retry, sql ─► Ray Jobs ─► the same command on the head ─► its output here

On the head everything lives in one folder (`~/dfbench`, or what DFBENCH_HOME says there): `runs/` and `uploads/`.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dfbench import __version__
from dfbench.cluster import bundle, processes
from dfbench.cluster.head import Head, auth_token, default_address, read_head
from dfbench.cluster.join import gcs_address, head_versions
from dfbench.cluster.stack import label_value
from dfbench.cluster.sweep import Sweep
from dfbench.errors import ClusterError

Say = Callable[[str], None]
HOME_VARIABLE = "DFBENCH_HOME"
_BEGINS = ("::dfbench-", "output::")
_POLL_S = (0.3, 5.0)
_STARTS_WITHIN_S = 120.0
INTERRUPTED = 130


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
    """Send a sweep to the head, which drives it. Returns the exit status there, or 0 at once with `detach`."""
    if address == "local":
        raise ClusterError("--detach needs a cluster to leave the work to: name its head with --address.")
    head = _checked(address)
    with tempfile.TemporaryDirectory(prefix="dfbench-") as folder:
        name = bundle.pack(sweep, Path(folder))
        arguments = ["submit", f"uploads/{name}/{bundle.SWEEP_FILE}", "--address", "auto", *options.arguments()]
        job = _start(head, arguments, folder=folder, upload=name)
    if detach:
        say(f"{sweep.name} runs on {head.address} as {job}")
        say(f"to see it: dfbench status --address {head.address}")
        say(f"to stop it: dfbench cancel --address {head.address}")
        return 0
    try:
        return follow(head, job, say)
    except KeyboardInterrupt:
        say(f"no longer following; the sweep goes on. To see it: dfbench status --address {head.address}")
        return INTERRUPTED


def command(arguments: Sequence[str], address: str, say: Say, *, detach: bool = False) -> int:
    """Run a dfbench command in the head's folder; its output comes here. Returns its exit status."""
    head = _checked(address)
    job = _start(head, arguments)
    if detach:
        say(f"runs on {head.address} as {job}")
        return 0
    return follow(head, job, say)


def forward(argv: Sequence[str], address: str, say: Say) -> int:
    """Run this very command line on the head, without its --address; `retry` drives there."""
    kept = [word for place, word in enumerate(argv) if not _names_address(argv, place)]
    if kept[0] == "retry":
        kept += ["--address", "auto"]
    return command(kept, address, say)


def _names_address(argv: Sequence[str], place: int) -> bool:
    before = argv[place - 1] if place else ""
    return argv[place] == "--address" or argv[place].startswith("--address=") or before == "--address"


def follow(head: Head, job: str, say: Say) -> int:
    """Pass on a job's output line by line until it ends; returns its exit status."""
    client, said, pause, began = _client(head), 0, _POLL_S[0], time.monotonic()
    while True:
        info = client.get_job_info(job)
        text = _output(client.get_job_logs(job), info)
        ended = info.status.is_terminal()
        whole = text if ended else text[: text.rfind("\n") + 1]
        fresh, said = whole[said:], len(whole)
        for line in fresh.splitlines():
            say(line)
        if ended:
            return _exit_status(info, text)
        if not text and info.status.value == "PENDING" and time.monotonic() - began > _STARTS_WITHIN_S:
            raise ClusterError(
                f"the head at {head.address} does not start the job: {info.message or 'no reason given'}."
            )
        pause = _POLL_S[0] if fresh else min(pause * 1.3, _POLL_S[1])
        time.sleep(pause)


def _exit_status(info: Any, text: str) -> int:
    if info.driver_exit_code is not None:
        return int(info.driver_exit_code)
    if info.status.value == "SUCCEEDED":
        return 0
    if info.status.value == "STOPPED":
        raise ClusterError("the job was stopped on the head; the run is kept, and the same submit goes on with it.")
    raise ClusterError(f"the head could not run it: {info.message or text or 'no reason given'}")


def _output(log: str, info: Any) -> str:
    """What the command itself said: everything after the line that our script prints just before it.

    Ray's own line about the entrypoint goes through another buffer and may come after that.
    """
    log = log.replace(f"Running entrypoint for job {info.submission_id}: {info.entrypoint}\n", "")
    _, begins, said = log.partition("".join(_BEGINS) + "\n")
    return said if begins else ""


def _start(head: Head, arguments: Sequence[str], folder: str | None = None, upload: str = "") -> str:
    job = f"dfbench-{arguments[0]}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
    client = _client(head)
    try:
        return str(
            client.submit_job(
                entrypoint=_script(arguments, upload),
                submission_id=job,
                runtime_env={"working_dir": folder} if folder else None,
            )
        )
    except RuntimeError as error:
        raise ClusterError(f"the head at {head.address} took no job: {_first_line(error)}") from error


def _script(arguments: Sequence[str], upload: str) -> str:
    """What the head's shell does. The upload is kept, since a run goes on from it after this job is long gone.

    The driver starts without the job's own runtime environment: its workers use what is installed on each node.
    """
    steps = ["set -e", 'home="${DFBENCH_HOME:-$HOME/dfbench}"', 'mkdir -p "$home/uploads" "$home/runs"']
    if upload:
        keep = 'cp -r . "$kept.$$" && mv -T "$kept.$$" "$kept"'
        steps.append(f'kept="$home/uploads/{upload}"; if [ ! -d "$kept" ]; then {keep}; fi')
    steps += [
        'cd "$home"',
        f"printf '%s%s\\n' {shlex.quote(_BEGINS[0])} {shlex.quote(_BEGINS[1])}",
        f"exec env -u RAY_JOB_CONFIG_JSON_ENV_VAR COLUMNS={shutil.get_terminal_size().columns} "
        f"dfbench {shlex.join(arguments)}",
    ]
    return "; ".join(steps)


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


def _client(head: Head) -> Any:
    """Ray's own job client, with our token and never through a proxy."""
    from ray.job_submission import JobSubmissionClient

    for chatty in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    host = str(head.dashboard).rpartition(":")[0]
    os.environ["NO_PROXY"] = ",".join(filter(None, [os.environ.get("NO_PROXY"), host]))
    token = None if head.open else auth_token()
    headers = {"Authorization": f"Bearer {token}"} if token else None
    try:
        return JobSubmissionClient(f"http://{head.dashboard}", headers=headers)
    except (ConnectionError, RuntimeError) as error:
        raise ClusterError(
            f"the head's dashboard at {head.dashboard} cannot be reached from here: open that port, or start the head "
            "with `dfbench up`, which binds it to the network."
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

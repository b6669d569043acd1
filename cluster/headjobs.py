"""Commands that run on a cluster's head as Ray jobs: started there, followed from here, stopped.

Ray's job server keeps a job going whatever becomes of who started it; its output is read again and again.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import shlex
import shutil
import tarfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dfbench.cluster.bundle import PLACE
from dfbench.cluster.head import Head, auth_token
from dfbench.cluster.scratch import scratch
from dfbench.errors import ClusterError

Say = Callable[[str], None]
_BEGINS = ("::dfbench-", "output::")
_POLL_S = (0.3, 5.0)
_STARTS_WITHIN_S = 120.0
_BEGINS_WITHIN_S = 30.0
_ANSWERS_WITHIN_S = 60.0
_TIMEOUTS_S = (10.0, 120.0)
"""For a connection and for an answer: Ray's client sets none, and a cut cable would hold it for many minutes."""
_NO_DFBENCH = 127
_TAR = "upload.tar"


class Upload(NamedTuple):
    """A folder that goes along with a command, and is kept on the head under this name. See `bundle.PLACE`."""

    name: str
    folder: Path


def start(head: Head, arguments: Sequence[str], upload: Upload | None = None) -> str:
    """Start a dfbench command in the head's home folder; the job's name. Raises ClusterError where it takes none."""
    job = f"dfbench-{arguments[0]}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
    with scratch() as place:
        runtime = {"working_dir": str(archive(upload.folder, place))} if upload else None
        script = _script(arguments, upload.name if upload else "")
        try:
            return str(client(head).submit_job(entrypoint=script, submission_id=job, runtime_env=runtime))
        except (OSError, RuntimeError) as error:
            raise ClusterError(f"the head at {head.address} took no job: {_first_line(error)}") from error


def archive(folder: Path, place: Path) -> Path:
    """A folder as a zip file in `place` that holds one tar file, the same for the same content.

    Given a folder, Ray leaves out what its .gitignore files name and folders called venv or __pycache__; given a zip
    file, names with a backslash or a drive's colon.
    """
    packed, made, outer = place / _TAR, place / "upload.zip", zipfile.ZipInfo(_TAR)
    outer.compress_type = zipfile.ZIP_DEFLATED
    with tarfile.open(packed, "w", format=tarfile.PAX_FORMAT) as out:
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            entry = tarfile.TarInfo(file.relative_to(folder).as_posix())
            entry.size, entry.mode = file.stat().st_size, 0o600
            with file.open("rb") as content:
                out.addfile(entry, content)
    with (
        zipfile.ZipFile(made, "w", compresslevel=1) as around,
        packed.open("rb") as content,
        around.open(outer, "w") as inside,
    ):
        shutil.copyfileobj(content, inside)
    return made


def follow(head: Head, job: str, say: Say) -> int:
    """Pass on a job's output line by line until it ends; returns its exit status. Raises ClusterError."""
    output = _Output(head, job)
    while not output.ended:
        output.read()
        for line in output.fresh():
            say(line)
        output.rest()
    return output.exit_status()


def begin(head: Head, job: str, say: Say) -> int | None:
    """Pass on a job's output until it has said something or half a minute is over; its exit status if it ended."""
    output, began = _Output(head, job), time.monotonic()
    while not output.ended:
        output.read()
        lines = output.fresh()
        for line in lines:
            say(line)
        if lines and not output.ended:
            return None
        if time.monotonic() - began > _BEGINS_WITHIN_S:
            say("the head has not said yet where the run is: until it does, status does not know of it")
            return None
        output.rest()
    return output.exit_status()


def stop(head: Head, job: str) -> None:
    """Have the head end a job, if it can be reached."""
    try:
        client(head).stop_job(job)
    except (ClusterError, OSError, RuntimeError):
        logging.getLogger(__name__).debug("the job %s was not stopped", job, exc_info=True)


class _Output:
    """What a job has said so far, as often as it is `read`."""

    def __init__(self, head: Head, job: str) -> None:
        self._head, self._job, self._client = head, job, client(head)
        self._info: Any = None
        self._log = self._text = ""
        self._said = 0
        self._began = self._answered = time.monotonic()
        self._pause = _POLL_S[0]

    @property
    def ended(self) -> bool:
        return self._info is not None and self._info.status.is_terminal()

    def read(self) -> None:
        """Ask the head. Raises ClusterError when it has not answered for a while or does not start the job."""
        try:
            self._info = self._client.get_job_info(self._job)
            self._log = self._client.get_job_logs(self._job)
            self._text = _said(self._log, self._info)
        except (OSError, RuntimeError) as error:
            self._unanswered(error)
            return
        self._answered = time.monotonic()
        if not self._text and self._info.status.value == "PENDING" and self._answered - self._began > _STARTS_WITHIN_S:
            raise ClusterError(
                f"the head at {self._head.address} does not start the job: {self._info.message or 'no reason given'}."
            )

    def _unanswered(self, error: Exception) -> None:
        if "does not exist" in str(error):
            raise ClusterError(
                f"the head at {self._head.address} was started anew: the same submit goes on from what is committed."
            ) from error
        if time.monotonic() - self._answered > _ANSWERS_WITHIN_S:
            raise ClusterError(
                f"the head at {self._head.address} has not answered for {_ANSWERS_WITHIN_S:.0f} s: if it is up, it "
                f"goes on with what it was asked; to see that: dfbench status --address {self._head.address}"
            ) from error

    def fresh(self) -> list[str]:
        """Whole lines that were not given before; at the end, what follows the last of them too."""
        whole = self._text if self.ended else self._text[: self._text.rfind("\n") + 1]
        fresh, self._said = whole[self._said :], max(self._said, len(whole))
        self._pause = _POLL_S[0] if fresh else min(self._pause * 1.3, _POLL_S[1])
        return fresh.splitlines()

    def rest(self) -> None:
        """Wait a little, longer when nothing comes."""
        if not self.ended:
            time.sleep(self._pause)

    def exit_status(self) -> int:
        """How the job ended. Raises ClusterError where it was not the command that ended it."""
        info = self._info
        if info.driver_exit_code == _NO_DFBENCH and not self._text:
            raise ClusterError(
                f"the head at {self._head.address} finds no `dfbench`: install it there, and start the head with "
                "`dfbench up`, or with a PATH that leads to it."
            )
        if info.status.value == "FAILED" and info.driver_exit_code and "".join(_BEGINS) not in self._log:
            last = self._log.strip().rpartition("\n")[2] or "no reason given"
            raise ClusterError(f"the head at {self._head.address} could not keep what was sent: {last}")
        if info.driver_exit_code is not None:
            return int(info.driver_exit_code)
        if info.status.value == "SUCCEEDED":
            return 0
        if info.status.value == "STOPPED":
            raise ClusterError("the job was stopped on the head; the run is kept, and the same submit goes on with it.")
        raise ClusterError(f"the head could not run it: {info.message or self._text or 'no reason given'}")


def _said(log: str, info: Any) -> str:
    """What the command itself said: everything after the line that our script prints just before it.

    Ray's own line about the entrypoint goes through another buffer and may come after that.
    """
    log = log.replace(f"Running entrypoint for job {info.submission_id}: {info.entrypoint}\n", "")
    _, begins, said = log.partition("".join(_BEGINS) + "\n")
    return said if begins else ""


def _script(arguments: Sequence[str], upload: str) -> str:
    """What the head's shell does. The upload is kept, since a run goes on from it after this job is long gone.

    The driver starts without the job's own runtime environment: its workers use what is installed on each node.
    """
    steps = ["set -e", f"command -v dfbench >/dev/null || exit {_NO_DFBENCH}"]
    steps += ['home="${DFBENCH_HOME:-$HOME/dfbench}"', f'mkdir -p "$home/{PLACE}" "$home/runs"']
    if upload:
        # Somebody else may send the same at the same time: whoever is first keeps it.
        drop = '{ rm -rf "$kept.$$"; [ -d "$kept" ]; }'
        keep = f'mkdir "$kept.$$" && tar -xf {_TAR} -C "$kept.$$" && mv -T "$kept.$$" "$kept" 2>/dev/null || {drop}'
        steps.append(f'kept="$home/{PLACE}/{upload}"; if [ ! -d "$kept" ]; then {keep}; fi')
    steps += [
        'cd "$home"',
        f"printf '%s%s\\n' {shlex.quote(_BEGINS[0])} {shlex.quote(_BEGINS[1])}",
        f"exec env -u RAY_JOB_CONFIG_JSON_ENV_VAR COLUMNS={shutil.get_terminal_size().columns} "
        f"dfbench {shlex.join(arguments)}",
    ]
    return "; ".join(steps)


def client(head: Head) -> Any:
    """Ray's own job client, with our token and never through a proxy."""
    from ray.job_submission import JobSubmissionClient

    for chatty in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    host = str(head.dashboard).rpartition(":")[0]
    os.environ["NO_PROXY"] = ",".join(filter(None, [os.environ.get("NO_PROXY"), host]))
    token = None if head.open else auth_token()
    headers = {"Authorization": f"Bearer {token}"} if token else None
    try:
        made = JobSubmissionClient(f"http://{head.dashboard}", headers=headers)
    except (ConnectionError, RuntimeError) as error:
        raise ClusterError(
            f"the head's dashboard at {head.dashboard} cannot be reached from here: open that port, or start the head "
            "with `dfbench up`, which binds it to the network."
        ) from error
    made._do_request = functools.partial(made._do_request, timeout=_TIMEOUTS_S)  # type: ignore[method-assign]
    return made


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

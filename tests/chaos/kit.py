"""What chaos trials are made of: runs, drivers as processes of their own, a cluster to break, and the final check.

A driver process is `python kit.py RUN [--address A] …`. It prints one JSON line when it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

BOUND_S = 150.0
"""Nothing may hang longer than this, whatever is killed."""

MARK = "DFBENCH_TRIAL"
OPTIONS = {
    "cooldown_s": 1.0,
    "silence_s": 60.0,
    "patience_s": 60.0,
    "commit_s": 0.2,
    "max_attempts": 9,
    "poison_after": 99,
}
"""A busy machine may keep a worker from answering for a while; only trials about silence shorten it."""


@dataclass(frozen=True)
class Held:
    """Every process that reaches `point` for the `at`-th time stays there until `release`."""

    point: str
    at: int
    notes: Path

    @property
    def fault(self) -> str:
        return f"{self.point}:hold@{self.at}"

    def pids(self) -> set[int]:
        """The processes that have come to be held."""
        return {int(path.suffix[1:]) for path in self.notes.glob(f"{self.point}.[0-9]*")}

    def release(self) -> None:
        (self.notes / f"{self.point}.go").touch()


class Drive:
    """A driver in a process of its own, on a run, perhaps with a fault to happen in it or in its workers."""

    def __init__(
        self,
        run: Path,
        address: str,
        *,
        fault: str = "",
        notes: Path | None = None,
        held: Held | None = None,
        clock_back_s: float = 0,
        **options: Any,
    ) -> None:
        """With `clock_back_s`, `set_clock_back` sets the driver's wall clock back by so much."""
        if held is not None:
            fault, notes = held.fault, held.notes
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, MARK: self.mark}
        if fault:
            environment |= {"DFBENCH_FAULT": fault, "DFBENCH_FAULT_DIR": str(notes)}
        command = [sys.executable, __file__, str(run), "--address", address, "--options", json.dumps(OPTIONS | options)]
        command += ["--clock-back", str(clock_back_s)]
        self.output = run.parent / f"driver-{self.mark[:6]}.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, timeout: float = BOUND_S) -> int:
        """The exit status; killing the process and failing when it takes longer than the bound."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"a driver hung for {timeout:.0f} s:\n{self.text()[-3000:]}") from None

    def over(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def set_clock_back(self) -> None:
        self.process.send_signal(signal.SIGUSR1)

    def text(self) -> str:
        return self.output.read_text(errors="replace")


def wait_for(condition: Any, what: str, timeout: float = BOUND_S) -> None:
    """Wait until something holds; an AssertionError when it does not in time."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {timeout:.0f} s"
        time.sleep(0.02)


def events(run: Path, name: str) -> list[dict[str, Any]]:
    """The events of this name in the run's log."""
    path = run / "log" / "driver.jsonl"
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if line["event"] == name]


def committed(run: Path) -> int:
    """How many jobs the ledger calls done, seen from outside."""
    from dfbench.cluster.ledger import Ledger

    with Ledger.open(run, readonly=True) as ledger:
        return ledger.counts().done


def live_files(run: Path) -> list[Path]:
    """The record files that the ledger names."""
    from dfbench.cluster.ledger import Ledger

    with Ledger.open(run, readonly=True) as ledger:
        return [run / file.name for file in ledger.files()]


def done(run: Path) -> bool:
    """Whether the ledger says that nothing is left."""
    from dfbench.cluster.ledger import Ledger

    with Ledger.open(run, readonly=True) as ledger:
        return ledger.state == "done"


def tally(run: Path) -> tuple[int, int]:
    """(lost, duplicated) jobs of a finished run, by the rows on disk; and everything must be sound."""
    import pyarrow.parquet as pq

    from dfbench.cluster import upkeep
    from dfbench.cluster.ledger import Ledger

    with Ledger.open(run, readonly=True) as ledger:
        seen: list[str] = []
        for file in ledger.files("jobs"):
            table = pq.read_table(run / file.name, columns=["job_id", "warmup", "pair_only"])
            seen += [row["job_id"] for row in table.to_pylist() if not row["warmup"] and not row["pair_only"]]
        total = ledger.counts().total
        assert ledger.counts().failed == 0, [f for f, _ in ledger.failures()][-3:]
        assert ledger.state == "done"
    findings = upkeep.verify(run)
    assert findings == [], findings[:5]
    return total - len(set(seen)), len(seen) - len(set(seen))


def workers_of(run: Path) -> list[int]:
    """Process ids of all workers the run ever had that are still there."""
    from dfbench.cluster.ledger import Ledger

    with Ledger.open(run, readonly=True) as ledger:
        pids = [int(worker.facts["pid"]) for worker in ledger.workers()]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and b"ray::" in _cmdline(pid)]


def _cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def main() -> int:
    """Drive a run; the exit status is 0 when it is done, 1 otherwise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--address", default="local")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--clock-back", type=float, default=0)
    given = parser.parse_args()
    if given.clock_back:
        _set_clock_back(given.clock_back)
    from dfbench.cluster import driver
    from dfbench.errors import DfbenchError

    try:
        result = driver.run(given.run, driver.Options(address=given.address, **given.options), on_note=print)
    except DfbenchError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    print(json.dumps({"state": result.state, "done": result.counts.done, "failed": result.counts.failed}))
    return 0 if result.state == "done" and not result.counts.failed else 1


def _set_clock_back(seconds: float) -> None:
    """From SIGUSR1 on, this process's wall clock is behind by so much: `time.time` and the ledger's own."""
    import datetime as datetimes

    from dfbench.cluster import ledger_schema

    real_time, real_ns = time.time, time.time_ns
    back = 0.0

    def fall(*_: object) -> None:
        nonlocal back
        back = seconds

    class Clock:
        @staticmethod
        def now(zone: Any) -> datetimes.datetime:
            return datetimes.datetime.now(zone) - datetimes.timedelta(seconds=back)

    signal.signal(signal.SIGUSR1, fall)
    time.time = lambda: real_time() - back
    time.time_ns = lambda: real_ns() - int(back * 1e9)
    ledger_schema.datetime = Clock  # type: ignore[misc, assignment]


if __name__ == "__main__":
    sys.exit(main())

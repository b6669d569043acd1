"""A run's log folder: one JSON line an event in `driver.jsonl`, and one text file a shard."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from dfbench.cluster.ledger_schema import now
from dfbench.workers.redact import redact

LOG_FOLDER = "log"


class Events:
    """Appends to the run's log. A log that cannot be written never stops a run: its disk may be full."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / LOG_FOLDER
        (self._folder / "shards").mkdir(parents=True, exist_ok=True)
        self._file = (self._folder / "driver.jsonl").open("a", encoding="utf-8", buffering=1)

    def event(self, name: str, **facts: Any) -> None:
        """One line in the driver's log."""
        with contextlib.suppress(OSError):
            self._file.write(redact(json.dumps({"at": now(), "event": name, **facts}, ensure_ascii=False)) + "\n")

    def shard(self, shard_id: str, text: str) -> None:
        """A few lines in the shard's own log."""
        with contextlib.suppress(OSError), shard_log(self._folder.parent, shard_id).open("a", encoding="utf-8") as log:
            log.write(f"{now()} {text.rstrip()}\n")

    def close(self) -> None:
        self._file.close()


def shard_log(run_dir: Path, shard_id: str) -> Path:
    """Where the log of this shard is; ids that could leave the folder are tamed."""
    return run_dir / LOG_FOLDER / "shards" / (re.sub(r"[^A-Za-z0-9._-]", "_", shard_id).lstrip(".") + ".log")

"""What the HTML report needs from this side of the contract: the text of tokens, and the sweep's notes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dfbench.cluster import sweep_file
from dfbench.cluster.ledger import Ledger
from dfbench.errors import DfbenchError

if TYPE_CHECKING:
    import duckdb

    from dfbench.analysis.report_divergences import Decode

logger = logging.getLogger(__name__)

REPORT_FILE = "report.html"


def write_report(con: duckdb.DuckDBPyConnection, run_dir: Path, file: Path) -> None:
    """Write the HTML report of an opened run. Raises RunError when the file cannot be written."""
    from dfbench.analysis import report

    report.write(con, file, decode=decoder(con, run_dir), notes=notes(run_dir))


def decoder(con: duckdb.DuckDBPyConnection, run_dir: Path) -> Decode | None:
    """Token ids → text, by the tokenizer of the run's model where it is on this machine's disk; None elsewhere.

    Loaded only when there are divergences to show. A run may come from anywhere, so it cannot have its model's own
    code run here, nor anything downloaded.
    """
    if not con.sql("select 1 from divergences limit 1").fetchall():
        return None
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from dfbench.workers import models

    try:
        with Ledger.open(run_dir, readonly=True) as ledger:
            target = ledger.run.target
        if target.kind != "torch":
            return None
        tokenizer = models.load_tokenizer(models.resolve(replace(target, trust_remote_code=False)))
    except DfbenchError as error:
        logger.info("tokens show as ids: %s", error)
        return None

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


def notes(run_dir: Path) -> list[str]:
    """The notes of the run's sweep: its assumptions; none where the sweep cannot be read."""
    try:
        return list(sweep_file.load_run(run_dir).notes)
    except DfbenchError as error:
        logger.info("the sweep's notes are left out: %s", error)
        return []

"""No false alarm: sound sweeps of the embedded model through the guard, in float32 and bfloat16, chain and tree.

`make guard-clean` runs 60 prompt-arm pairs. Exit status 1 if the guard has any finding, if float32 outputs differ from
AR's at all, or if no bfloat16 output does: then nothing was tested.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from dfbench import analysis
from dfbench.analysis.guard import Verdict, judge
from dfbench.cluster import driver, guard, plan, runs
from dfbench.cluster.sweep import validate

ARMS: list[Any] = [
    "ar",
    {"name": "pld", "drafter": "pld"},
    {"name": "cacheback-tree", "drafter": "cacheback", "preset": "released"},
]
WORKLOADS = ("code", "copyctx", "chat")


def examined(
    folder: Path, dtype: str, workloads: tuple[str, ...], prompts: int, tokens: int, arms: list[Any] = ARMS
) -> Verdict:
    """One sweep and the guard's verdict on it."""
    sweep = {
        "name": f"clean-{dtype}",
        "model": {"id": "smollm2-135m-instruct", "dtype": dtype},
        "workloads": [{"name": name, "prompts": prompts} for name in workloads],
        "arms": arms,
        "max_new_tokens": tokens,
        "warmup": 0,
        "calibrate": False,
    }
    made = plan.plan(validate(sweep, f"clean-{dtype}"))
    run_dir = folder / dtype
    runs.create(run_dir, made)
    driver.run(run_dir)
    driver.run(guard.prepare(run_dir))
    guard.adopt(run_dir)
    with analysis.open_run(run_dir) as con:
        return judge(con)


def complaints(verdicts: dict[str, Verdict]) -> list[str]:
    """What is wrong with these verdicts by dtype, one sentence each."""
    found = [
        f"{dtype}: {finding.check}: {finding.message}"
        for dtype, verdict in verdicts.items()
        for finding in verdict.findings
    ]
    if "float32" in verdicts and verdicts["float32"].total("divergences"):
        found.append("float32: outputs part from AR's.")
    if "bfloat16" in verdicts and not verdicts["bfloat16"].total("divergences"):
        found.append("bfloat16: no output parts from AR's, so nothing was tested: take more prompts or tokens.")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=5, help="prompts a workload")
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        verdicts = {}
        for dtype in ("float32", "bfloat16"):
            verdicts[dtype] = verdict = examined(Path(folder), dtype, WORKLOADS, given.prompts, given.tokens)
            print(f"{dtype}: {verdict.line()}")
    pairs = sum(verdict.total("pairs_compared") for verdict in verdicts.values())
    wrong = complaints(verdicts)
    print(f"{pairs} pairs, {len(wrong)} complaints")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The long form of the chaos suite: `make chaos`. Prints every trial, then the totals; the exit status is 1 on a loss.

python tests/chaos/run.py                       five rounds of every trial: more than a hundred trials
python tests/chaos/run.py --rounds 1 --seed 7   one round of another seed
python tests/chaos/run.py --only "disk full"    one kind of trial
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from network import NotPossible
from raykit import Cluster
from trials import TRIALS, Report, attempt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=sorted(TRIALS))
    parser.add_argument("--keep", type=Path, help="keep the runs of failed trials here")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dfbench-chaos-"))
    names = [given.only] if given.only else list(TRIALS)
    trials = [(name, given.seed + number) for number in range(given.rounds) for name in names]
    reports: list[Report] = []
    broken: list[str] = []
    skipped = 0
    cluster = Cluster(cpus=1)
    try:
        for number, (name, seed) in enumerate(trials):
            place = folder / str(number)
            try:
                report = attempt(name, place, cluster, seed)
            except NotPossible as error:
                print(f"{number + 1:>4} {name:<45} seed {seed:<4} skipped: {error}", flush=True)
                skipped += 1
                continue
            except Exception as error:
                broken.append(f"{name} (seed {seed}): {error}")
                print(f"{number + 1:>4} {name:<45} seed {seed:<4} BROKEN {error}", flush=True)
                if given.keep:
                    shutil.copytree(place, given.keep / str(number), dirs_exist_ok=True)
                cluster.close()
                cluster = Cluster(cpus=1)
                continue
            reports.append(report)
            reached = ", ".join(report.reached) or "not reached"
            print(f"{number + 1:>4} {name:<45} seed {seed:<4} {report.seconds:5.1f} s  {reached}", flush=True)
            shutil.rmtree(place, ignore_errors=True)
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
    return summary(len(trials) - skipped, reports, broken)


def summary(trials: int, reports: list[Report], broken: list[str]) -> int:
    """Print the totals; 0 when every trial kept every promise."""
    lost, duplicated = sum(r.lost for r in reports), sum(r.duplicated for r in reports)
    reached = sum(bool(report.reached) for report in reports)
    survived = sum(not (report.lost or report.duplicated) for report in reports)
    print(f"\n{trials} trials, {reached} faults reached, {survived} survived, {lost} lost, {duplicated} duplicated")
    for line in broken:
        print(f"broken: {line}")
    return int(survived < trials or bool(lost or duplicated))


if __name__ == "__main__":
    sys.exit(main())

"""What a pass of q tokens costs on a device: the verification cost curve, and the speedup that step widths predict.

    t_ar  = Σ over output positions of cost(context, 1)
    t_arm = Σ over the arm's steps of cost(context, queries of the step)
    speedup_model = Σ t_ar ÷ Σ t_arm, pooled over prompts

The drafter's own time is not in it, nor anything else that a pass does not cost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dfbench.cluster import run_place, runs
from dfbench.cluster.commit import next_number, write_files
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.run_place import driver_lock
from dfbench.errors import UsageError
from dfbench.workers.records import CALIBRATION

Array = np.ndarray[Any, np.dtype[Any]]

EXAMPLE = "example"
PLAIN_NS = 1e6
"""What a plain step is said to take where only multiples of it are known."""
LONGEST_NS = 1e18
MOST_TOKENS = 2**31
_EXAMPLE_COSTS = {1: 1.0, 4: 1.04, 8: 1.15, 16: 1.3, 32: 2.1, 64: 3.2, 96: 4.3}
"""SmolLM2-135M in bf16 on two quiet CPU cores; the last point continues the line of the two before it."""


@dataclass(frozen=True)
class VerifyCost:
    """Median ns of one pass, `ns[i, j]` at `contexts[i]` cached tokens and `queries[j]` tokens in the pass.

    `label` says whose curve it is. Between points it is linear; beyond the contexts it is constant, beyond the queries
    it goes on as between the last two. `measured`: the calibration rows it is made of, where it was measured.
    """

    label: str
    contexts: Array
    queries: Array
    ns: Array
    measured: pa.Table | None = None

    def cost(self, contexts: Array, queries: Array) -> Array:
        """ns of each of several passes; both arrays of one shape."""
        at = np.clip(np.asarray(contexts, float), self.contexts[0], self.contexts[-1])
        upper = np.clip(np.searchsorted(self.contexts, at), 1, max(len(self.contexts) - 1, 1))
        if len(self.contexts) == 1:
            return self._along(np.zeros(len(at), int), queries)
        lower = upper - 1
        share = (at - self.contexts[lower]) / (self.contexts[upper] - self.contexts[lower])
        return np.asarray(self._along(lower, queries) * (1 - share) + self._along(upper, queries) * share)

    def rows(self, run_id: str) -> pa.Table:
        """The curve as rows of a run's calibration table: as they were measured, else one a point, under its label."""
        if self.measured is not None:
            at = self.measured.schema.get_field_index("run_id")
            return self.measured.set_column(at, CALIBRATION.field(at), pa.array([run_id] * self.measured.num_rows))
        about = {"run_id": run_id, "worker_id": "", "device": self.label, "model": "", "dtype": "", "engine": ""}
        grid = [
            {"context": int(context), "queries": int(queries), "ns": round(self.ns[i, j])}
            for i, context in enumerate(self.contexts)
            for j, queries in enumerate(self.queries)
        ]
        rows = [{**about, "stack": "", "kind": "forward", "sample": 0, **point} for point in grid]
        return pa.Table.from_pylist(rows, schema=CALIBRATION)

    def _along(self, rows: Array, queries: Array) -> Array:
        """Costs at these rows of the grid, linear in the queries."""
        wanted = np.asarray(queries, float)
        right = np.clip(np.searchsorted(self.queries, wanted), 1, len(self.queries) - 1)
        left = right - 1
        share = (wanted - self.queries[left]) / (self.queries[right] - self.queries[left])
        return np.asarray(self.ns[rows, left] * (1 - share) + self.ns[rows, right] * share)


def times(cost: VerifyCost, prompt_tokens: int, positions: Array, queries: Array, tokens: int) -> tuple[float, float]:
    """Model times in ns of one prompt: (AR's for `tokens` decoded tokens, the arm's for its steps).

    `positions`: output position of the first token that each step emits; the cache then holds the prompt and all
    output before the root.
    """
    every = np.arange(1, tokens + 1)
    ar = cost.cost(prompt_tokens + every - 1, np.ones(tokens)).sum() if tokens else 0.0
    arm = cost.cost(prompt_tokens + positions - 1, queries).sum() if len(positions) else 0.0
    return float(ar), float(arm)


def load(source: str) -> VerifyCost:
    """A curve from a run that was calibrated, a Parquet file of calibration rows, a JSON file, or `example`.

    JSON: {"label": …, "contexts": […], "queries": […], "ns": [[…], …]}, or {"queries": […], "relative": […]} for
    multiples of a plain step. Raises UsageError, in one sentence.
    """
    if source == EXAMPLE:
        return relative("example curve: SmolLM2-135M, bf16, two CPU cores", _EXAMPLE_COSTS)
    path = Path(source).expanduser()
    for place in (path, runs.RUNS / path):
        if run_place.exists(place):
            return from_rows(_run_rows(place), str(place))
    if not path.is_file():
        raise UsageError(
            f"--verify-cost '{source}' is neither a run nor a file: write a run that `dfbench calibrate` or `submit` "
            f"made, a Parquet or JSON file of a curve, or '{EXAMPLE}'."
        )
    if path.suffix == ".json":
        return _from_json(path)
    try:
        return from_rows(pq.read_table(path), str(path))
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{path} is not a Parquet file of calibration rows: write --verify-cost with one.") from error


def relative(label: str, costs: dict[int, float]) -> VerifyCost:
    """A curve from multiples of a plain step, the same at every context; one step is called 1 ms."""
    queries = sorted(costs)
    ns = [costs[q] * PLAIN_NS for q in queries]
    return VerifyCost(label, np.array([0.0]), np.array(queries, float), np.array([ns]))


def _run_rows(run_dir: Path) -> pa.Table:
    with Ledger.open(run_dir, readonly=True) as ledger:
        files = [run_dir / file.name for file in ledger.files("calibration")]
    if not files:
        raise UsageError(
            f"{run_dir} holds no calibration: name a run that was submitted with `calibrate: true`, "
            f"run `dfbench calibrate`, or write '{EXAMPLE}'."
        )
    return pa.concat_tables([pq.read_table(file) for file in files])


_CURVE = ("model", "dtype", "engine", "device", "stack")
"""What one curve's rows have in common, in the order of its name."""
_MEANT = {"kind", "context", "queries", "ns", *_CURVE} - {"stack"}
"""The columns of calibration rows that make a curve; which software it was need not be said."""


def from_rows(rows: pa.Table, where: str) -> VerifyCost:
    """Medians of calibration rows (records.CALIBRATION), which must be of one device, model, dtype, engine and
    software. The curve's label is the name that the view `speedup_model` gives it.
    """
    missing = _MEANT - set(rows.column_names)
    if missing:
        raise UsageError(f"{where} has no column '{min(missing)}': it holds no calibration rows.")
    for name in sorted(_MEANT):
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, name, rows[name].cast(CALIBRATION.field(name).type))
    rows = rows.filter(pc.equal(rows["kind"], "forward"))
    if rows.num_rows and (pc.min(rows["ns"]).as_py() or 0) < 1:
        raise UsageError(f"the calibration of {where} holds passes that took no time: run `dfbench calibrate` again.")
    frame = rows.to_pandas()
    kinds = frame[[name for name in _CURVE if name in frame]].drop_duplicates()
    if len(kinds) != 1:
        found = f"{len(kinds)} devices, models, engines or software versions" if len(kinds) else "no forward passes"
        raise UsageError(f"the calibration of {where} holds {found}: name a run or file with exactly one.")
    grid = frame.pivot_table(index="context", columns="queries", values="ns", aggfunc="median")
    grid = grid.dropna(axis="index").sort_index().sort_index(axis="columns")
    if grid.empty or grid.shape[1] < 2:
        raise UsageError(f"the calibration of {where} has fewer than two query widths: run `dfbench calibrate` again.")
    return VerifyCost(
        ", ".join(filter(None, kinds.iloc[0])),
        grid.index.to_numpy(float),
        grid.columns.to_numpy(float),
        grid.to_numpy(float),
        rows.select(CALIBRATION.names).cast(CALIBRATION) if set(CALIBRATION.names) <= set(rows.column_names) else None,
    )


def keep(run_dir: Path, curve: VerifyCost) -> None:
    """Write the curve into a run's calibration table, so that the view `speedup_model` has it; once, and in the place
    of an earlier one of the same name, whose costs would mix with its own."""
    with driver_lock(run_dir), Ledger.open(run_dir) as ledger:
        rows = curve.rows(ledger.run.run_id)
        old = ledger.files("calibration")
        held = pa.concat_tables(
            [CALIBRATION.empty_table(), *(pq.read_table(run_dir / file.name).cast(CALIBRATION) for file in old)]
        )
        if _keys(rows, CALIBRATION.names) <= _keys(held, CALIBRATION.names):
            return
        mine = _keys(rows, _CURVE)
        others = [key not in mine for key in zip(*(held[name].to_pylist() for name in _CURVE), strict=True)]
        rows = pa.concat_tables([held.filter(pa.array(others, pa.bool_())), rows])
        files = write_files(
            run_dir, {"calibration": rows}, generation=ledger.next_generation(), number=next_number(ledger)
        )
        ledger.replace_files(files, {file.name: set() for file in files}, [file.name for file in old])


def _keys(rows: pa.Table, columns: Iterable[str]) -> set[tuple[Any, ...]]:
    return set(zip(*(rows[name].to_pylist() for name in columns), strict=True))


def _from_json(path: Path) -> VerifyCost:
    try:
        given = json.loads(path.read_text(encoding="utf-8-sig"))
        queries = _increasing(given["queries"], 1, at_least=2)
        if "relative" in given:
            contexts, ns = np.array([0.0]), _costs([given["relative"]]) * PLAIN_NS
        else:
            contexts, ns = _increasing(given["contexts"], 0, at_least=1), _costs(given["ns"])
        if ns.shape != (len(contexts), len(queries)) or not ((ns >= 1) & (ns < LONGEST_NS)).all():
            raise ValueError("shape")
        label = given.get("label", path.name)
        if not (isinstance(label, str) and label.strip() and label.isprintable()):
            raise ValueError("label")
        return VerifyCost(label, contexts, queries, ns)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(
            f'{path} is not a cost curve: write {{"queries": [1, 4, …], "relative": [1, 1.04, …]}} or '
            '{"contexts": […], "queries": [1, …], "ns": [[…], …]} with increasing whole numbers, queries from 1, and '
            "costs above 0."
        ) from error


def _increasing(values: Any, first: int, at_least: int) -> Array:
    """Whole numbers, each larger than the one before; of queries, the first is 1: what all others are measured by."""
    whole = isinstance(values, list) and all(type(value) is int and value < MOST_TOKENS for value in values)
    if not whole or len(values) < at_least or values[0] < first or (first and values[0] != first):
        raise ValueError("not whole numbers")
    array = np.array(values, float)
    if not (np.diff(array) > 0).all():
        raise ValueError("not increasing")
    return array


def _costs(rows: Any) -> Array:
    """Lists of numbers as an array; text and truth values are none."""
    if not all(type(value) in (int, float) for row in rows for value in row):
        raise TypeError("not numbers")
    return np.array(rows, float)

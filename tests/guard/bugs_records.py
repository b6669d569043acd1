"""Planted bugs around the model: in the plan, in what is written, in the ledger and in the views."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dfbench.analysis import store
from dfbench.cluster import commit, sums
from dfbench.cluster.ledger import Ledger
from dfbench.workers import actor, records
from dfbench.workers.spec import ArmSpec, PromptSpec

Patch = pytest.MonkeyPatch


def two_prompts_swapped(patch: Patch) -> None:
    """In one arm only."""
    record = actor.Worker._record

    def mutant(self: actor.Worker, shard: Any, job: Any, arm: ArmSpec, prompt: PromptSpec, *rest: Any) -> Any:
        known = {made.prompt_id: made for made in swapped_prompts}
        other = {"p0": "p1", "p1": "p0"}.get(prompt.prompt_id)
        if arm.name == "pld" and other:
            prompt = known[other]
        return record(self, shard, job, arm, prompt, *rest)

    patch.setattr(actor.Worker, "_record", mutant)


swapped_prompts: list[PromptSpec] = []


def unchecked(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """The same bug where nothing checks rows at the commit."""

    def both(patch: Patch) -> None:
        plant(patch)
        patch.setattr(commit, "breaches", lambda *tables: {})

    return both


def an_arm_without_outputs(patch: Patch) -> None:
    """The ledger says done, the files lack the rows."""
    write = commit.write_files

    def mutant(run_dir: Path, tables: dict[str, pa.Table], **where: Any) -> Any:
        kept = {name: table.filter(pc.not_equal(table["arm"], "pld")) for name, table in tables.items() if table}
        return write(run_dir, tables | kept, **where)

    patch.setattr(commit, "write_files", mutant)


def an_output_cut_short(patch: Patch) -> None:
    """Rows of one output are lost on the way to disk, and nothing checks them."""
    write = commit.write_files

    def mutant(run_dir: Path, tables: dict[str, pa.Table], **where: Any) -> Any:
        jobs = tables["jobs"].to_pylist() if "jobs" in tables else []
        for job in jobs:
            if job["arm"] == "pld" and job["prompt_id"] == "p2":
                job["output_ids"] = job["output_ids"][:-3]
        if not jobs:
            return write(run_dir, tables, **where)
        return write(run_dir, tables | {"jobs": pa.Table.from_pylist(jobs, schema=records.JOBS)}, **where)

    patch.setattr(commit, "write_files", mutant)


def draftless_steps_dropped(patch: Patch) -> None:
    """The commit adds up only the steps that had a draft; AR has none, and keeps its own."""
    _wrong_sums(
        patch, "steps", lambda made: pc.if_else(pc.equal(made["arm"], "ar"), made["steps"], made["drafted_steps"])
    )


def drafts_counted_twice(patch: Patch) -> None:
    """In the sums alone: MAT and speedup do not show it."""
    _wrong_sums(patch, "proposed", lambda made: pc.multiply(made["proposed"], 2))


def ar_passes_one_place_off(patch: Patch) -> None:
    """Each pass of an arm is compared with the AR pass before it: the bound comes out a little wrong."""
    beside = sums._beside_ar

    def mutant(jobs: pa.Table, rows: Any) -> dict[str, pa.Array]:
        times = rows["step_ns"]
        rows._columns["step_ns"] = np.roll(times, 1)
        found = beside(jobs, rows)
        rows._columns["step_ns"] = times
        return found

    patch.setattr(sums, "_beside_ar", mutant)


def _wrong_sums(patch: Patch, name: str, wrong: Callable[[pa.Table], Any]) -> None:
    sound = commit.sums_of

    def mutant(jobs: pa.Table, steps: pa.Table) -> pa.Table:
        made = sound(jobs, steps)
        return made.set_column(made.schema.get_field_index(name), made.schema.field(name), wrong(made))

    patch.setattr(commit, "sums_of", mutant)


def sums_lost(run: Path) -> None:
    """As in a run of schema 1: step rows alone."""
    with Ledger.open(run) as ledger:
        ledger.replace_files([], {}, [file.name for file in ledger.files("sums")])


def edit(view: store.View, old: str, new: str) -> store.View:
    """The view with `new` for `old` wherever its SQL stands."""
    return view._replace(
        **{
            field: text.replace(old, new)
            for field, text in view._asdict().items()
            if isinstance(text, str) and old in text
        }
    )


def edited_view(name: str, old: str, new: str) -> Callable[[Patch], None]:
    """The view with a mistake in it."""

    def plant(patch: Patch) -> None:
        sound = store.views()
        assert any(view.name == name and old in view.sql for view in sound)
        wrong = tuple(edit(view, old, new) if view.name == name else view for view in sound)
        patch.setattr(store, "views", lambda: wrong)

    return plant


def other_settings_in_the_ledger(run: Path) -> None:
    """A job id that ignores an option: a run resumed with another value of it keeps the old rows as done."""
    with Ledger.open(run) as ledger:
        spec = ledger.meta("run")
        assert '"stop_at_eos": false' in spec
        ledger.set_meta("run", spec.replace('"stop_at_eos": false', '"stop_at_eos": true'))

"""What a run's figures are counted in: prompts, or, where prompts have several turns, turns and conversations."""

from __future__ import annotations

from typing import NamedTuple

import duckdb


class Counted(NamedTuple):
    """`answers`: what is decoded one by one. `units`: what intervals resample, since turns of one belong together."""

    answers: str = "prompts"
    units: str = "prompts"


PROMPTS = Counted()
TALKS = Counted("turns", "conversations")


def counted(con: duckdb.DuckDBPyConnection) -> Counted:
    """The names for an opened run, by its macro `counted_in`."""
    [(units,)] = con.sql("select counted_in()").fetchall()
    return TALKS if units == TALKS.units else PROMPTS

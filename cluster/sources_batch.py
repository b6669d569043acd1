"""Batch API files: requests in one file, answers in another, in any order, joined by `custom_id` on disk.

The halves wait in a temporary SQLite file, so memory does not grow with the number of requests.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import TracebackType
from typing import Any, NamedTuple

from dfbench.cluster import sources_formats as formats
from dfbench.cluster.scratch import scratch
from dfbench.cluster.sources_formats import Exchange, Json, Skip


class Joined(NamedTuple):
    """An exchange or a skip, with the place of the answer (of the request, where there is no answer)."""

    place: str
    item: Exchange | Skip


class BatchJoin:
    """Collects batch lines with `add`, gives joined exchanges with `pairs`. A context manager: removes its file."""

    def __enter__(self) -> BatchJoin:
        with ExitStack() as stack:
            folder = stack.enter_context(scratch())
            self._db = stack.enter_context(closing(sqlite3.connect(folder / "halves.db", isolation_level=None)))
            self._db.executescript(
                "pragma journal_mode=off; pragma synchronous=off;"
                "create table half(custom_id text, side text, place text, body text, primary key(custom_id, side));"
                "begin"
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def add(self, document: Json, place: str) -> Skip | None:
        """Keep one line. A second one of the same id and side is refused."""
        custom_id, side = document.get("custom_id"), formats.kind_of(document)
        if not isinstance(custom_id, str) or not custom_id:
            return Skip("a batch line without a custom_id")
        try:
            self._db.execute("insert into half values (?, ?, ?, ?)", (custom_id, side, place, json.dumps(document)))
        except sqlite3.IntegrityError:
            return Skip(f"a second {side} line of one custom_id")
        return None

    def pairs(self) -> Iterator[Joined]:
        """Every answer with its request, in the order of the answers; then the halves that are left over."""
        rows = self._db.execute(
            "select o.place, i.body, o.body from half o left join half i on i.custom_id = o.custom_id and i.side = ?"
            " where o.side = ? order by o.rowid",
            (formats.BATCH_INPUT, formats.BATCH_OUTPUT),
        )
        for place, asked, answered in rows:
            if asked is None:
                yield Joined(place, Skip("a batch answer whose request is in no file"))
                continue
            for item in _joined(json.loads(asked), json.loads(answered)):
                yield Joined(place, item)
        unanswered = self._db.execute(
            "select place from half i where side = ? and not exists"
            " (select 1 from half o where o.custom_id = i.custom_id and o.side = ?) order by rowid",
            (formats.BATCH_INPUT, formats.BATCH_OUTPUT),
        )
        for (place,) in unanswered:
            yield Joined(place, Skip("a batch request whose answer is in no file"))


def _joined(asked: dict[str, Any], answered: dict[str, Any]) -> Iterator[Exchange | Skip]:
    if answered.get("error"):
        yield Skip("a failed request")
        return
    document = {"custom_id": asked["custom_id"], "workload": asked.get("workload")}
    yield from formats.pair(asked.get("body"), answered.get("response"), document, "batch input + output")

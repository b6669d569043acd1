"""Tables that DuckDB reads as it reads any other, and that are made when a query first asks for them.

DuckDB scans any object that offers an Arrow stream. So what is costly to make (the ledger as Arrow, totals over ten
million steps) is made on first use, once, and opening a run stays quick.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa


class LazyTable:
    """An Arrow table with a known schema whose rows `make` gives on first use."""

    def __init__(self, schema: pa.Schema, make: Callable[[], pa.Table]) -> None:
        self._schema = schema
        self._make = make
        self._table: pa.Table | None = None
        self._lock = threading.Lock()

    def __arrow_c_schema__(self) -> Any:
        return self._schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.table().__arrow_c_stream__(requested_schema)

    def table(self) -> pa.Table:
        """The rows; made once, also when several threads ask."""
        with self._lock:
            if self._table is None:
                self._table = self._make()
            return self._table

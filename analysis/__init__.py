"""DuckDB SQL over the records of a run, and what is said about the numbers."""

from dfbench.analysis.runsql import write_run_sql
from dfbench.analysis.store import open_run

__all__ = ["open_run", "write_run_sql"]

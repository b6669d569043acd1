"""DuckDB SQL over the records of a run, and what is said about the numbers."""

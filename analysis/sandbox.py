"""What keeps a query inside its run: a read-only file system, and a configuration that cannot be changed.

DuckDB's `allowed_paths` alone does not do: a path that may be read may also be written (`COPY … (use_tmp_file false)`
overwrites a record file; seen with DuckDB 2.0.1). So the record files are reachable only through `run://` names, which
this file system resolves to the files of the ledger and opens for reading alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
from fsspec import AbstractFileSystem

PROTOCOL = "run"


class _Reader:
    """A file open for reading. Each thread has its own position: DuckDB's threads share the handle."""

    def __init__(self, path: Path) -> None:
        self._file = -1
        self._file = os.open(path, os.O_RDONLY)
        self._at = threading.local()

    def seek(self, offset: int, whence: int = 0) -> int:
        base = {0: 0, 1: self.tell(), 2: os.fstat(self._file).st_size}[whence]
        self._at.offset = base + offset
        return self.tell()

    def tell(self) -> int:
        return getattr(self._at, "offset", 0)

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            size = os.fstat(self._file).st_size - self.tell()
        data = os.pread(self._file, size, self.tell())
        self._at.offset = self.tell() + len(data)
        return data

    def flush(self) -> None:
        """Nothing is ever written."""

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        """DuckDB lets go of its files without closing them."""
        self.close()


class RunFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """`run://name` for each of the given files below a run directory, for reading only."""

    protocol = PROTOCOL
    cachable = False

    def __init__(self, root: Path, names: Iterable[str]) -> None:
        super().__init__()
        self._root = root.resolve()
        self._names = frozenset(names)

    def _path(self, path: str) -> Path:
        name = path.removeprefix(f"{PROTOCOL}://")
        if name not in self._names:
            raise FileNotFoundError(f"{name} is not a committed file of this run")
        return self._root / name

    def open(self, path: str, mode: str = "rb", **_: Any) -> _Reader:
        if mode != "rb":
            raise PermissionError("the files of a run can be read only")
        return _Reader(self._path(path))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        stat = self._path(path).stat()
        return {"name": path, "size": stat.st_size, "type": "file", "mtime": stat.st_mtime}

    def exists(self, path: str, **_: Any) -> bool:
        return path.removeprefix(f"{PROTOCOL}://") in self._names

    def glob(self, path: str, **_: Any) -> list[str]:
        return [path] if self.exists(path) else []

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self._path(path).stat().st_mtime, UTC)

    def isdir(self, path: str) -> bool:
        return False


def lock(con: duckdb.DuckDBPyConnection, names: Iterable[str]) -> None:
    """Take from a connection every way out: files but the run's, extensions, spill files, settings."""
    allowed = ", ".join(f"'{PROTOCOL}://{name}'" for name in names)
    con.execute("set temp_directory = ''")
    con.execute("set autoinstall_known_extensions = false")
    con.execute("set autoload_known_extensions = false")
    con.execute(f"set allowed_paths = [{allowed}]")
    con.execute("set enable_external_access = false")
    con.execute("set lock_configuration = true")

"""Folders for work in progress, where the system keeps temporary files: TMPDIR, or /tmp."""

from __future__ import annotations

import errno
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dfbench.errors import DfbenchError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards. Raises DfbenchError, naming its place, where that has no room for a file."""
    try:
        made = tempfile.TemporaryDirectory(prefix="dfbench-", ignore_cleanup_errors=True)
    except OSError as error:
        raise DfbenchError(
            f"no folder for temporary files can be written to ({error.strerror or error}): make room in /tmp, or set "
            "TMPDIR to a folder where there is some."
        ) from error
    with made as folder:
        try:
            yield Path(folder)
        except (OSError, sqlite3.OperationalError) as error:
            if not is_full(error):
                raise
            raise DfbenchError(
                f"{Path(folder).parent}, for temporary files, has no room ({error}): make some, or set TMPDIR to "
                "another folder."
            ) from error


def is_full(error: Exception) -> bool:
    """Whether an error is about where something was written to, and not about what was read."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY)

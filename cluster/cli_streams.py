"""Standard output and error that a command may outlive, as in `dfbench submit … | head -1`.

Whoever reads may go away at any time. What is driven goes on without them, and what is printed has no other end than
it would have had: the exit status is the command's own.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

import typer

_ALONE = 0
"""How many `unheard` are open: work that no trouble with a stream may stop."""


class _Outlet(io.FileIO):
    """A standard stream's file. `gone`: its reader or terminal is no more, and what is written is dropped."""

    gone = False

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)
        self._terminal = self.isatty()

    def write(self, data: Any, /) -> int:
        if self.gone:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            if error.errno == errno.EPIPE or (error.errno == errno.EIO and self._terminal):
                self.gone = True
                _stand_in(self.fileno())  # libraries and children write to that number too
            elif not _ALONE:
                raise
        return memoryview(data).nbytes


def open_streams() -> None:
    """Make standard streams that can be relied on; once, before anything is printed.

    Ray needs streams that were closed, and a file of ours must not take their number. A terminal that cannot show a
    character gets its number in place of an error.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)


def reader_gone() -> bool:
    """Whether nobody reads standard output any more, as far as writing has shown."""
    outlet = _outlet(sys.stdout)
    return outlet is not None and outlet.gone


def watched(line: str) -> None:
    """Print a line of something that is only of use to who reads it. Raises BrokenPipeError when nobody does."""
    typer.echo(line)
    if reader_gone():
        raise BrokenPipeError


def give_up() -> None:
    """Drop what a stream that refuses it still holds, after that was said: Python would try once more at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            if (outlet := _outlet(stream)) is not None:
                outlet.gone = True


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Work that goes on whatever becomes of the streams: a full disk behind them, a terminal that is gone."""
    global _ALONE
    _ALONE += 1
    try:
        yield
    finally:
        _ALONE -= 1


def _lasting(stream: Any) -> Any:
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    if not _is_standard(stream) or _outlet(stream) is not None:
        stream.reconfigure(errors="backslashreplace")
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Outlet(stream.fileno())),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _is_standard(stream: io.TextIOWrapper) -> bool:
    try:
        return stream.fileno() in (1, 2)
    except io.UnsupportedOperation:
        return False


def _outlet(stream: Any) -> _Outlet | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Outlet) else None


def _stand_in(number: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, number)
    os.close(nothing)

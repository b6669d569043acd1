"""Files of logs → JSON documents, one at a time: plain, gzip or zstd; one a line, one after another, or one array.

Nothing is dropped in silence: what cannot be read comes out as a `Fault` at its place, and reading goes on where that
is possible. Memory is bounded by the largest single document, never by the file.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import zstandard

CHUNK = 1 << 20
_BITE = 1 << 12
_LOOK_AHEAD = 1 << 16
MAX_DOCUMENT = 1 << 28
"""Bytes of one line or array element; a longer one is reported and skipped."""

_GZIP, _ZSTD, _UTF8_BOM = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xef\xbb\xbf"
# A bracket, or a string as far as this buffer holds it; the group is the quote that ends it.
_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(")?|[{}\[\]]', re.DOTALL)
_REST_OF_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+(")?', re.DOTALL)


class Document(NamedTuple):
    """One JSON object and its place: `line 7` or `element 3`."""

    place: str
    value: dict[str, Any]


class Fault(NamedTuple):
    """Something in a file that is not a usable document, and why."""

    place: str
    reason: str


class _Broken(Exception):
    """The byte stream ends early or is damaged; what came before it is good."""


def find_files(path: Path) -> list[Path]:
    """The file itself, or every regular file below a folder, in name order; hidden ones are left out."""
    if path.is_file():
        return [path]
    below = (p for p in path.rglob("*") if p.is_file())
    return sorted(p for p in below if not any(part.startswith(".") for part in p.relative_to(path).parts))


def readable(path: Path) -> str:
    """A file's name as text: bytes that are no UTF-8 are written as `\\xff`, since records hold text."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def documents(path: Path) -> Iterator[Document | Fault]:
    """Every JSON object of a file in order, and every place that holds none. Raises OSError for an unreadable file."""
    with path.open("rb") as file:
        yield from _documents(_Stream(_chunks(file)))


class _Stream:
    """Chunks of decoded bytes with a look ahead; remembers damage instead of raising it in the middle of a line."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._ahead = b""
        self.damage = ""

    def read(self) -> bytes:
        """The next chunk, empty at the end."""
        if self._ahead:
            chunk, self._ahead = self._ahead, b""
            return chunk
        try:
            return next(self._chunks, b"")
        except _Broken as error:
            self.damage = str(error)
            return b""

    def first_line(self) -> bytes:
        """The beginning of the first line that is not empty; consumes only what precedes it."""
        head = self.read()
        while (not head.strip() or b"\n" not in head) and len(head) < _LOOK_AHEAD and (more := self.read()):
            head += more
        self._ahead = head = head.removeprefix(_UTF8_BOM)
        return head.lstrip().split(b"\n", 1)[0].rstrip()

    def has_objects_ahead(self) -> bool:
        """Whether one of the next whole lines is a JSON object, though the first is none."""
        return any(
            line.lstrip().startswith(b"{") and isinstance(_parse(line, ""), Document)
            for line in self._ahead.split(b"\n")[1:-1]
        )


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    magic = file.read(4)
    file.seek(0)
    if magic.startswith(_GZIP):
        return _gunzip(file)
    if magic == _ZSTD:
        return _unzstd(file)
    return iter(lambda: file.read(CHUNK), b"")


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    """All members of a gzip file, at most CHUNK bytes at a time however well they were packed."""
    data = file.read(CHUNK)
    while data:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            try:
                out = member.decompress(data, CHUNK)
            except zlib.error as error:
                raise _Broken(f"the gzip data is damaged ({error})") from error
            if out:
                yield out
            data = member.unconsumed_tail or (b"" if member.eof else file.read(CHUNK))
            if not data and not member.eof and not out:
                raise _Broken("the gzip file is cut short")
        data = member.unused_data or file.read(CHUNK)
        data = data.lstrip(b"\0") or file.read(CHUNK)  # padding after the last member is legal


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    """All frames of a zstd file. Small bites of input keep what one call gives out small as well."""
    decompressor = zstandard.ZstdDecompressor()
    data = file.read(_BITE)
    while data:
        frame = decompressor.decompressobj()
        while not frame.eof:
            if not data:
                raise _Broken("the zstd file is cut short")
            try:
                out = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise _Broken(f"the zstd data is damaged ({error})") from error
            if out:
                yield out
            data = b"" if frame.eof else file.read(_BITE)
        data = frame.unused_data or file.read(_BITE)


def _documents(stream: _Stream) -> Iterator[Document | Fault]:
    head = stream.first_line()
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        yield Fault("line 1", "UTF-16 text (convert it to UTF-8)")
    elif head.startswith(b"["):
        yield from _spans(stream, "element", 1)
    elif head == b"{" or (head.startswith(b"{") and head.endswith((b"{", b"[", b","))):
        yield from _spans(stream, "object", 0)  # pretty-printed: the first line opens an object that it does not close
    elif head.startswith(b"{") or stream.has_objects_ahead():
        yield from _lines(stream)  # a rotated log may begin in the middle of a line
    elif head:
        yield Fault("line 1", "the file is not JSON")
    if stream.damage:
        yield Fault("end", stream.damage)


def _lines(stream: _Stream) -> Iterator[Document | Fault]:
    """JSON Lines."""
    for number, (line, ended) in enumerate(_split(stream), start=1):
        if line is None:
            yield Fault(f"line {number}", f"longer than {MAX_DOCUMENT >> 20} MiB")
            continue
        text = line.strip()
        if not text:
            continue
        parsed = _parse(text, f"line {number}")
        if isinstance(parsed, Fault) and not ended:
            parsed = Fault(parsed.place, "the last line is truncated")
        yield parsed


def _split(stream: _Stream) -> Iterator[tuple[bytes | None, bool]]:
    """Lines without their ends, and whether an end followed; None for one beyond MAX_DOCUMENT. LF and CRLF."""
    parts: list[bytes] = []
    held = 0
    while chunk := stream.read():
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            parts.append(piece)
            yield (b"".join(parts) if held + len(piece) <= MAX_DOCUMENT else None), True
            parts, held = [], 0
        held += len(rest)
        if rest and held <= MAX_DOCUMENT:
            parts.append(rest)
    if held:
        yield (b"".join(parts) if held <= MAX_DOCUMENT else None), False


class _Scanner:
    """Finds the objects at nesting depth `level` of a buffer that grows, by brackets and strings alone.

    `level` is 1 for the elements of an array and 0 for values that follow one another. `number` counts what was found.
    """

    def __init__(self, noun: str, level: int) -> None:
        self.noun = noun
        self.level = level
        self.number = 0
        self.depth = 0
        self.buffer = b""
        self.at = 0  # scanned so far
        self.keep = 0  # where the element under way, or the gap before the next one, begins
        self.in_string = False  # the buffer ends inside one

    def feed(self, more: bytes) -> Iterator[Document | Fault]:
        """What is complete now that `more` has arrived."""
        self.buffer, self.at, self.keep = self.buffer[self.keep :] + more, self.at - self.keep, 0
        if self.in_string and (rest := _REST_OF_STRING.match(self.buffer, self.at)):
            self.at = rest.end()
            self.in_string = rest[1] is None
        if self.in_string:
            return
        for match in _STRUCTURE.finditer(self.buffer, self.at):
            token = match[0]
            self.at = match.end()
            if token in (b"{", b"["):
                yield from self._open(match.start())
            elif token in (b"}", b"]"):
                yield from self._close(match.end())
            elif match[1] is None:
                self.in_string = True
                return
        self.at = len(self.buffer)

    def end(self) -> Iterator[Fault]:
        """What is left over when the file ends."""
        if self.depth > self.level or self.in_string:
            yield Fault(self._next(), f"the file ends inside {self.noun} {self.number}")
        else:
            yield from self._gap(len(self.buffer))
            if self.depth:
                yield Fault(self._next(), "the array does not end: the file is cut short")

    def _open(self, start: int) -> Iterator[Fault]:
        if self.depth == self.level:
            yield from self._gap(start)
            self.keep = start
        self.depth += 1
        if self.depth == self.level:  # the bracket that opens the array
            self.keep = start + 1

    def _close(self, end: int) -> Iterator[Document | Fault]:
        if self.depth == self.level:
            yield from self._gap(end - 1)
        self.depth = max(self.depth - 1, 0)
        if self.depth == self.level:
            yield _parse(self.buffer[self.keep : end], self._next())
        if self.depth <= self.level:
            self.keep = end

    def _gap(self, end: int) -> Iterator[Fault]:
        if self.buffer[self.keep : end].strip(b" \t\r\n,"):
            yield Fault(self._next(), "not a JSON object")

    def _next(self) -> str:
        self.number += 1
        return f"{self.noun} {self.number}"


def _spans(stream: _Stream, noun: str, level: int) -> Iterator[Document | Fault]:
    """The elements of an array, or objects that span lines."""
    scanner = _Scanner(noun, level)
    while more := stream.read():
        yield from scanner.feed(more)
        if len(scanner.buffer) - scanner.keep > MAX_DOCUMENT:
            yield Fault(f"{noun} {scanner.number + 1}", f"longer than {MAX_DOCUMENT >> 20} MiB; the rest is not read")
            return
    yield from scanner.end()


def _parse(text: bytes, place: str) -> Document | Fault:
    try:
        value = json.loads(text)
        if b"\\u" in text:  # an escape can name half of a character, which can be written nowhere
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        return Fault(place, "not UTF-8")
    except UnicodeEncodeError:
        return Fault(place, "half of a surrogate pair, which is no text")
    except (ValueError, RecursionError):
        return Fault(place, "not JSON")
    return Document(place, value) if isinstance(value, dict) else Fault(place, "not a JSON object")

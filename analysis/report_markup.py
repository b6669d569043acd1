"""HTML that is safe by type: a plain `str` is text and is escaped, only `Html` is markup.

Prompts, outputs and the names of arms, workloads and devices come from elsewhere, so nothing is put into a page but
through `el`, `text` and `join`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

NONE = "–"
"""What a table shows where a run has no such figure."""


class Html(str):
    """Markup that is finished: built here, or rendered by the chart library, which escapes its texts."""

    __slots__ = ()


_VOID = frozenset({"meta", "br", "link"})


def text(content: str) -> Html:
    """Markup that shows a text, whatever it holds. Control characters, which HTML forbids, show as �."""
    if isinstance(content, Html):
        return content
    shown = "".join("\ufffd" if _forbidden(character) else character for character in content)
    return Html(escape(shown, quote=True))


def _forbidden(character: str) -> bool:
    code = ord(character)
    return (code < 32 and character not in "\t\n\r") or 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000


def join(parts: Iterable[str], between: str = "") -> Html:
    """Parts one after the other; those that are text are escaped."""
    return Html(text(between).join(text(part) for part in parts))


def el(name: str, /, *children: str, **attributes: str | int | bool | None) -> Html:
    """An element. Attribute names: `class_` is class, other underscores are dashes; False and None leave one out."""
    shown = []
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            shown.append(f" {key}")
        elif value is not None and value is not False:
            shown.append(f' {key}="{text(str(value))}"')
    start = f"<{name}{''.join(shown)}>"
    return Html(start if name in _VOID else f"{start}{join(children)}</{name}>")


def prose(content: str) -> Html:
    """A sentence of ours, with what stands between backticks as code."""
    parts = content.split("`")
    if len(parts) % 2 == 0:
        return text(content)
    return join(el("code", part) if place % 2 else part for place, part in enumerate(parts))


def number(value: float | None, form: str = ".2f") -> str:
    """A figure, or – where there is none. What rounds to zero has no sign."""
    return NONE if value is None else format(value, f"z{form}")


def figure_cell(value: float | None, lo: float | None, hi: float | None, form: str = ".2f") -> Html:
    """A figure with its interval beneath."""
    if value is None or lo is None or hi is None:
        return text(number(value, form))
    interval = f"{number(lo, form)}…{number(hi, form)}"
    return join([number(value, form), el("span", interval, class_="interval")])


def table(
    caption: str,
    heads: Sequence[str],
    body: Sequence[Sequence[str]],
    *,
    left: int = 1,
    note: str = "",
    class_: str = "",
) -> Html:
    """A table that scrolls sideways where it must. The first `left` columns are words, the others figures."""
    lines = [
        el("tr", *(_cell(cell, i, left) for i, cell in enumerate(row)))
        for row in body
    ]  # fmt: skip
    whole = el(
        "table", el("caption", el("span", caption)), header_row(heads, left), el("tbody", *lines), class_=class_ or None
    )
    return join([scrolling(caption, whole), el("p", note, class_="note") if note else ""])


def header_row(heads: Sequence[str], left: int = 1) -> Html:
    """A table's head."""
    return el("thead", el("tr", *(el("th", head, scope="col", class_=_side(i, left)) for i, head in enumerate(heads))))


def _cell(content: str, place: int, left: int) -> Html:
    if place == 0:
        return el("th", content, scope="row")
    return el("td", content, class_=_side(place, left))


def _side(place: int, left: int) -> str | None:
    return None if place < left else "number"


def scrolling(label: str, content: Html) -> Html:
    """Content that may be wider than a phone: it scrolls by itself, also from the keyboard."""
    return el("div", content, class_="scroll", role="region", aria_label=label, tabindex="0")


def evidence(sql: str, rows: Sequence[dict[str, Any]], most: int = 100) -> Html:
    """What a figure stands on, folded away: its SQL and the rows that it gave."""
    parts: list[str] = [el("pre", el("code", sql))]
    if rows:
        shown = [[_plain(value) for value in row.values()] for row in rows[:most]]
        note = f"The first {most} of {len(rows)} rows; the query gives all." if len(rows) > most else ""
        parts.append(table("Its rows", list(rows[0]), shown, left=len(rows[0]), note=note, class_="rows"))
    return el("details", el("summary", "SQL and numbers"), *parts)


def _plain(value: Any) -> str:
    if value is None:
        return NONE
    return f"{value:z.6g}" if isinstance(value, float) else str(value)

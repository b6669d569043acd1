"""A pydantic error of a sweep → one sentence that says where, what, and what to write instead."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dfbench.errors import unknown

_PLAIN = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text (put it in quotes)",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "missing": "is missing: add it",
    "string_pattern_mismatch": "must be a name of letters, digits, '.', '_' and '-' that starts with a letter or digit",
    "too_short": "is empty: write at least one",
}

_FOR_TESTS = ("scripted", "recorded")
"""Sections that are hardly ever meant."""


def sentence(root: type[BaseModel], error: ValidationError) -> str:
    """The first problem of the error as a sentence; an unknown key comes with the nearest known one."""
    details = error.errors()
    first = next((detail for detail in details if detail["type"] == "extra_forbidden"), details[0])
    where = place(first["loc"])
    if first["type"] == "extra_forbidden":
        return _unknown_key(root, first["loc"])
    prefix = f"`{where}` " if where else ""
    return f"{prefix}{_what(first)}."


def place(location: Sequence[str | int]) -> str:
    """`workloads[0].prompts` for ('workloads', 0, 'prompts')."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _what(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "greater_than_equal":
        what = f"must be at least {context['ge']}"
    elif kind == "greater_than":
        what = f"must be more than {context['gt']}"
    elif kind == "less_than_equal":
        what = f"must be at most {context['le']}"
    elif kind == "literal_error":
        what = f"must be one of {context['expected']}"
    elif kind == "value_error":
        return detail["msg"].removeprefix("Value error, ").rstrip(".")
    else:
        what = _PLAIN.get(kind, detail["msg"])
    return what if kind in ("missing", "too_short") else f"{what}, not {_shown(detail['input'])}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}…"


def _unknown_key(root: type[BaseModel], location: Sequence[str | int]) -> str:
    *parents, key = location
    known = _fields_at(root, parents)
    inside = f" in `{place(parents)}`" if parents else ""
    if (level := _level_of(root, str(key))) is not None:
        return f"unknown key '{key}'{inside}: write it {level}."
    hint = unknown("key", str(key), known)
    return f"{hint[:-1]}{inside}{hint[-1]}"


def _level_of(root: type[BaseModel], key: str) -> str | None:
    """Where in a sweep a key belongs that was written in the wrong place; None for one that it has nowhere."""
    if top_level(root, key):
        return "at the top level of the sweep"
    for section, model in sorted(_sections(root).items(), key=lambda item: item[0] in _FOR_TESTS):
        if key in model.model_fields:
            return f"under `{section}`"
    from dfbench.workers.models import OPTIONS  # Only here: what it imports is slow to import.

    return "under `model.options`" if key in OPTIONS else None


def top_level(root: type[BaseModel], key: str) -> bool:
    """Whether a sweep may hold this key itself. Those that it must hold are never missing there."""
    return key in root.model_fields and not root.model_fields[key].is_required()


def _sections(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    found = {}
    for name, entry in root.model_fields.items():
        model = _model_of(entry.annotation)
        if model is not None:
            found[name] = model
    return found


def _fields_at(root: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    model = root
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_of(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The section class inside `X`, `X | None` or `list[X]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, Union, types.UnionType):
        return next((model for part in get_args(annotation) if (model := _model_of(part))), None)
    return None

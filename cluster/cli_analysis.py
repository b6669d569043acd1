"""Commands: sql, report, guard, compare, verify, compact, export."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""

"""The documentation cannot lie: what exists is in it, and what is in it exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from dfbench.analysis.query import listed
from dfbench.cluster.cli import app
from dfbench.cluster.sweep import Dataset, Model, Section, Sweep, Workload
from dfbench.drafters import registry

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
TARGETS = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_and_is_in_the_readme(name: str) -> None:
    assert COMMANDS[name].help, f"dfbench {name} has no help"
    assert f"dfbench {name}" in README, f"dfbench {name} is not in the README"


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
def test_every_drafter_is_in_the_docs(name: str) -> None:
    assert f"`{name}`" in DOCS["drafters.md"]


@pytest.mark.parametrize("text", [README, *DOCS.values()], ids=["README.md", *DOCS])
def test_commands_and_options_in_the_docs_exist(text: str) -> None:
    for command, options in re.findall(r"dfbench ([a-z][a-z-]*)((?: +[^\n`|#]*)?)", text):
        if command not in COMMANDS:
            continue  # Prose: "dfbench runs …".
        known = {option for parameter in COMMANDS[command].params for option in parameter.opts}
        subcommands = getattr(COMMANDS[command], "commands", {})
        for subcommand in subcommands.values():
            known |= {option for parameter in subcommand.params for option in parameter.opts}
        for option in re.findall(r"(?<!\S)(--[a-z][a-z-]*)", options):
            assert option in known | {"--help"}, f"dfbench {command} has no {option}"


@pytest.mark.parametrize("text", [README, *DOCS.values()], ids=["README.md", *DOCS])
def test_make_targets_in_the_docs_exist(text: str) -> None:
    scripts = {f"bench-{path.stem.removeprefix('bench_')}" for path in (ROOT / "benchmarks").glob("bench_*.py")}
    for target in re.findall(r"`make ([a-z][a-z-]*)", text):
        assert target in scripts | set(TARGETS), f"the Makefile has no target {target}"


@pytest.mark.parametrize("text", [README, *DOCS.values()], ids=["README.md", *DOCS])
def test_links_lead_somewhere(text: str) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / link).exists() or (ROOT / "docs" / link).exists(), f"{link} is not there"


def view_rows() -> list[str]:
    """What docs/views.md must say: a row for every view, from the head of its SQL file."""
    return [f"| `{view.name}` | {view.meaning} |" for view in listed()]


def test_every_view_is_in_the_docs_with_its_meaning() -> None:
    found = [line for line in DOCS["views.md"].splitlines() if line.startswith("| `")]
    assert found == view_rows(), "write the rows that `view_rows` gives into docs/views.md"


@pytest.mark.parametrize("section", [Sweep, Model, Workload, Dataset])
def test_every_key_of_a_sweep_is_in_the_docs_with_its_default(section: type[Section]) -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.*?) \|", DOCS["sweep.md"], re.MULTILINE))
    for key, field in section.model_fields.items():
        assert f"`{key}`" in DOCS["sweep.md"], f"docs/sweep.md has no key `{key}`"
        default, said = field.default, rows.get(key, "")
        if isinstance(default, str | int | float) and default is not False and said:
            shown = f"{default:g}" if isinstance(default, float) else str(default).lower()
            assert said.strip("`") == shown, f"docs/sweep.md: `{key}` is {shown}"

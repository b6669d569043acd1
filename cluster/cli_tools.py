"""Commands: drafters, workloads, corpus, doctor, calibrate (in a file of its own)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dfbench.cluster.cli_calibrate import calibrate
from dfbench.cluster.cli_options import AsJson
from dfbench.errors import OptionError, UsageError, WorkloadError, unknown

if TYPE_CHECKING:
    from dfbench.cluster.sweep import Workload

corpus = typer.Typer(help="Tables of n-grams from text, which drafters read.", no_args_is_help=True)
workloads = typer.Typer(help="The workloads there are; `build` writes one to a file.", invoke_without_command=True)


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.command()(drafters)
    app.add_typer(workloads, name="workloads")
    app.add_typer(corpus, name="corpus")
    app.command()(doctor)
    app.command()(calibrate)


def drafters(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this drafter.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every drafter with its options: name, type, default, meaning, presets."""
    from dfbench.drafters import registry

    described = [_describe_drafter(known) for known in ([name] if name is not None else registry.names())]
    if as_json:
        typer.echo(json.dumps(described, ensure_ascii=False, indent=2))
        return
    for drafter in described:
        typer.echo(f"{drafter['name']}  ({drafter['source']})\n  {drafter['summary']}")
        for option in drafter["options"]:
            typer.echo(
                f"    {option['name']}: {option['type']} = {json.dumps(option['default'])}  {option['description']}"
            )
        for preset, values in drafter["presets"].items():
            typer.echo(f"    preset {preset}: {', '.join(f'{key}={value}' for key, value in values.items())}")


def _describe_drafter(name: str) -> dict[str, Any]:
    from pydantic_core import to_jsonable_python

    from dfbench.drafters import registry

    cls, origin = registry.find(name), registry.source(name)
    options = [
        {
            "name": option,
            "type": _type_name(entry.annotation),
            "default": to_jsonable_python(entry.get_default(call_default_factory=True)),
            "description": entry.description or "",
        }
        for option, entry in cls.Options.model_fields.items()
    ]
    return {
        "name": name,
        "summary": cls.summary,
        "source": f"{origin.distribution} {origin.version}",
        "options": options,
        "presets": cls.presets,
    }


def _type_name(annotation: Any) -> str:
    """`int`, `str | null`, `recent|earliest`, `list[int]`: as a sweep file's writer thinks of it."""
    from typing import Annotated, Literal, get_args, get_origin

    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(map(str, inner))
    if origin is Annotated:
        return _type_name(inner[0])
    if annotation is type(None):
        return "null"
    if not inner:
        return str(getattr(annotation, "__name__", annotation))
    names = [_type_name(part) for part in inner if part is not Ellipsis]
    if origin in (list, tuple, set, dict):
        return f"{'map' if origin is dict else 'list'}[{', '.join(names)}]"
    return " | ".join(names)


@workloads.callback()
def list_workloads(context: typer.Context, as_json: AsJson = False) -> None:
    """Every built-in workload: what it asks, how many prompts, whose text."""
    from dfbench.cluster import workloads as sources

    if context.invoked_subcommand is not None:
        return
    listed = [
        {"name": entry.name, "prompts": len(entry.load()), "about": entry.summary, "source": entry.source}
        | {"licence": entry.licence}
        for entry in sources.built_in().values()
    ]
    if as_json:
        typer.echo(json.dumps(listed, ensure_ascii=False, indent=2))
        return
    for entry in listed:
        about = f"{entry['about']}; {entry['source']}, {entry['licence']}"
        typer.echo(f"{entry['name']:<10} {entry['prompts']:>4} prompts  {about}")
    typer.echo(
        "Any JSONL file is one too, a row a prompt with `prompt`, `messages` or `turns`: {name: mine, file: FILE}."
    )


@workloads.command("build")
def build_workload(
    name: Annotated[str, typer.Argument(help="A built-in workload, or one of the sweep's.")],
    out: Annotated[Path, typer.Option(help="File to write, JSONL.")],
    sweep: Annotated[str | None, typer.Option(help="Take the workload as this sweep defines it: qwen3-8b.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a workload to a file as it would be asked, so that it can be used where no hub is in reach."""
    from dfbench.analysis.rundir import require_not_own
    from dfbench.cluster import workloads as sources

    require_not_own(out)
    if out.exists() and not force:
        raise WorkloadError(f"{out} is there already: write another --out, or --force.")
    wanted, warmup = _workload_of(sweep, name)
    planned, reserved = sources.split(wanted, sources.load(wanted), warmup)
    rows = [*planned, *reserved]
    _write(out, "".join(sources.to_json(row) + "\n" for row in rows).encode())
    typer.echo(f"{len(rows)} prompts of {name} → {out}; use them with --workload {name}={out}")


def _workload_of(sweep: str | None, name: str) -> tuple[Workload, int]:
    """A workload and how many of its rows are reserved: of a sweep, or a built-in one as it is."""
    from dfbench.cluster import sweep_file
    from dfbench.cluster.sweep import validate

    if sweep is None:
        plain = validate({"name": "s", "workloads": [name], "arms": ["ar"]}, "the workload")
        return plain.workloads[0], 0
    whole = sweep_file.load(sweep)
    known = {entry.name: entry for entry in whole.workloads}
    if name not in known:
        raise WorkloadError(unknown(f"workload of {sweep}", name, known))
    return known[name], whole.warmup


def _write(path: Path, data: bytes) -> None:
    """A file, whole or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(data)
        scratch.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}.") from error


Texts = Annotated[list[Path], typer.Argument(help="Text files (one text each), or JSONL with a `text` a row.")]
TableFile = Annotated[Path, typer.Option(help="File to write the table to.")]
CorpusModel = Annotated[str | None, typer.Option(help="Model whose tokenizer cuts the text; the embedded by default.")]
Revision = Annotated[str | None, typer.Option(help="Revision of a hub model.")]
CorpusName = Annotated[str | None, typer.Option(help="The corpus' name, for people; by default its files'.")]


@corpus.command("build")
def build_corpus(
    texts: Texts,
    out: TableFile,
    model: CorpusModel = None,
    revision: Revision = None,
    name: CorpusName = None,
    leader: Annotated[int, typer.Option(min=1, help="Tokens that are looked up.")] = 1,
    follower: Annotated[int, typer.Option(min=1, help="Tokens that are proposed after them.")] = 3,
    leaders: Annotated[int, typer.Option(min=1, help="Most leaders kept, commonest first.")] = 1_048_576,
    followers: Annotated[int, typer.Option(min=1, help="Most followers kept of each, commonest first.")] = 128,
) -> None:
    """Count which tokens follow which in a corpus: Cacheback's frozen table."""
    from dfbench.drafters import frozen

    _check_place(out, frozen.MAGIC)
    encode, tokenizer_hash = _tokenizer(model, revision)
    table = frozen.build(
        _texts(texts),
        encode,
        tokenizer_hash=tokenizer_hash,
        corpus=name or " ".join(path.name for path in texts),
        leader=leader,
        follower=follower,
        leaders=leaders,
        followers=followers,
    )
    digest = table.save(out)
    header = table.header
    told = "1 text" if header.texts == 1 else f"{header.texts} texts"
    typer.echo(f"{told}, {header.tokens} tokens → {header.leaders} leaders, {header.entries} followers")
    typer.echo(f"{out}  sha256 {digest}; use it in an arm: {{drafter: cacheback, draft: tree, frozen: {out}}}")


@corpus.command("bigrams")
def build_bigrams(
    texts: Texts,
    out: TableFile,
    model: CorpusModel = None,
    revision: Revision = None,
    name: CorpusName = None,
    min_count: Annotated[int, typer.Option(min=1, help="Leave out what follows more rarely than this.")] = 1,
) -> None:
    """Count what follows each two tokens in a corpus: the static table of `ngram-cache`."""
    from dfbench.drafters import bigrams

    _check_place(out, bigrams.MAGIC)
    encode, tokenizer_hash = _tokenizer(model, revision)
    table = bigrams.build(
        map(encode, _texts(texts)),
        tokenizer_hash=tokenizer_hash,
        corpus=name or " ".join(path.name for path in texts),
        min_count=min_count,
    )
    digest = table.save(out)
    typer.echo(f"{sum(map(len, table.follow.values()))} continuations of {len(table.follow)} 2-grams")
    typer.echo(f"{out}  sha256 {digest}; use it in an arm: {{drafter: ngram-cache, static: {out}}}")


def _check_place(out: Path, magic: bytes) -> None:
    """Raise OptionError unless a table may be written here: in the place of another such table, and of nothing else."""
    if not out.parent.is_dir():
        raise OptionError(f"{out.parent} is not a folder: write --out with one that is there.")
    if out.is_dir():
        raise OptionError(f"{out} is a folder: write --out with the name of a file in it.")
    if out.exists():
        with out.open("rb") as there:
            if there.read(len(magic)) != magic:
                raise OptionError(f"{out} is there already and is no such table: write another --out.")


def _tokenizer(model: str | None, revision: str | None) -> tuple[Callable[[str], list[int]], str]:
    """How a text is cut, without special tokens, and the tokenizer's hash."""
    from dfbench.workers import models
    from dfbench.workers.spec import EMBEDDED_MODEL, TargetSpec

    tokenizer = models.load_tokenizer(models.resolve(TargetSpec(model=model or EMBEDDED_MODEL, revision=revision)))

    def encode(text: str) -> list[int]:
        return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]

    return encode, models.tokenizer_hash(tokenizer)


def _texts(paths: list[Path]) -> Iterator[str]:
    """The texts of plain files, and of JSONL rows' `text` (or `prompt`)."""
    for path in paths:
        try:
            if path.suffix != ".jsonl":
                yield path.read_text(encoding="utf-8-sig")
                continue
            with path.open(encoding="utf-8-sig") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _text_of(line, f"{path}, line {number}")
        except (OSError, UnicodeDecodeError) as error:
            raise WorkloadError(f"the text file {path} cannot be read as UTF-8: {error}.") from error


def _text_of(line: str, place: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # A ValueError too is an integer of thousands of digits.
        raise WorkloadError(f"{place} is not JSON: write one JSON object a line.") from error
    text = row.get("text", row.get("prompt")) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise WorkloadError(f"{place} has no `text`: every row needs one.")
    return text


def doctor(
    as_json: AsJson = False,
    no_ray: Annotated[bool, typer.Option("--no-ray", help="Do not try whether Ray starts (some seconds).")] = False,
) -> None:
    """Check this machine and say what to fix. Exit status 1 if something must be fixed."""
    from dataclasses import asdict

    from dfbench.cluster import doctor as doctoring
    from dfbench.cluster.runs import RUNS

    findings = []
    for finding in doctoring.examine(RUNS, start_ray=not no_ray):
        findings.append(finding)
        if not as_json:
            advice = f" → {finding.advice}" if finding.advice else ""
            typer.echo(f"{finding.level:<4} {finding.name}: {finding.seen}{advice}")
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False, indent=2))
    if any(finding.level == "fix" for finding in findings):
        raise typer.Exit(1)

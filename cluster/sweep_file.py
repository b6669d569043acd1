"""Where sweeps come from: YAML files, built-in sweeps, run directories, and `--set key=value` on top."""

from __future__ import annotations

from collections.abc import Hashable
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from dfbench.cluster.sweep import Sweep, validate
from dfbench.drafters import registry
from dfbench.errors import SweepError, unknown


def built_in() -> dict[str, str]:
    """Names of the built-in sweeps and their YAML text."""
    folder = files("dfbench.cluster") / "sweeps"
    return {
        entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".yaml")
    }


def read(source: str) -> dict[str, Any]:
    """The plain data of a sweep file or of the built-in sweep of that name, not validated. Raises SweepError."""
    known = built_in()
    path = Path(source).expanduser()
    if source in known and not path.is_file():
        text, folder = known[source], None
    elif path.is_file():
        try:
            text, folder = path.read_text(encoding="utf-8-sig"), path.parent
        except (OSError, UnicodeDecodeError) as error:
            raise SweepError(f"the sweep file {source} cannot be read as UTF-8 text: {error}.") from error
    elif path.is_dir():
        raise SweepError(f"{source} is a folder: write the sweep file's own path.")
    elif path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise SweepError(f"there is no sweep file {source}.")
    else:
        near = unknown("sweep", source, known).rstrip(".?").partition(": write one of")[0]
        raise SweepError(f"{near}; a sweep is a YAML file or one of {', '.join(sorted(known))}.")
    return _with_folder(parse_yaml(text, source), folder)


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """YAML text as a mapping; duplicate keys are errors. Raises SweepError."""
    try:
        data = yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise SweepError(f"{source} is not YAML{where}: {_why(error)}.") from error
    except RecursionError as error:
        raise SweepError(f"{source} is nested too deeply: write a mapping of plain settings.") from error
    if data is None:
        raise SweepError(f"{source} is empty: write at least `name`, `workloads` and `arms`.")
    if not isinstance(data, dict):
        raise SweepError(f"{source} must be a mapping with `name`, `workloads` and `arms`, not a {_kind(data)}.")
    return data


def _why(error: Exception) -> str:
    return getattr(error, "problem", None) or "it cannot be parsed"


def load(source: str, overrides: list[str] | None = None) -> Sweep:
    """The sweep of a file or built-in name, with `key=value` overrides."""
    data = read(source)
    for override in overrides or []:
        apply_override(data, override)
    return validate(data, source)


def load_run(run_dir: Path) -> Sweep:
    """The effective sweep that a run was begun with, sources of its drafters as they were then."""
    path = run_dir / "sweep.yaml"
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise SweepError(f"{run_dir} has no readable sweep.yaml: name a run directory that `submit` made.") from error
    arms = data.get("arms")
    listed = arms if isinstance(arms, list) else []
    recorded = [arm.pop("source", None) if isinstance(arm, dict) else None for arm in listed]
    sweep = validate(data, str(path))
    kept = [
        arm.model_copy(update={"source": source} if source else {})
        for arm, source in zip(sweep.arms, recorded, strict=True)
    ]
    return sweep.model_copy(update={"arms": kept})


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one dotted key in plain sweep data: `model.dtype=float32`, `workloads.code.prompts=5`, `arms.pld.full=true`.

    The value is YAML. A member of a list is named by its `name` or its index. Raises SweepError.
    """
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        raise SweepError(f"--set '{override}' has no '=': write key=value, for example max_new_tokens=64.")
    try:
        value = yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, RecursionError) as error:
        raise SweepError(f"--set '{override}': the value is not YAML: {_why(error)}.") from error
    *parents, last = path.strip().split(".")
    at: Any = data
    for depth, key in enumerate(parents):
        at = _descend(at, key, ".".join(parents[: depth + 1]))
    if isinstance(at, list):
        at[_member(at, last, path)] = value
    else:
        at[last] = value


def _descend(at: Any, key: str, path: str) -> Any:
    """The container below `key`, made where a mapping lacks it and spelled out where it is shorthand."""
    if isinstance(at, list):
        index = _member(at, key, path)
        if isinstance(at[index], str):
            at[index] = {"name": at[index]}
        child = at[index]
    else:
        if isinstance(at.get(key), str) and key == "model":
            at[key] = {"id": at[key]}
        child = at.setdefault(key, {})
    if not isinstance(child, dict | list):
        raise SweepError(f"--set {path}: '{key}' holds a single value, so nothing can be set below it.")
    return child


def _member(items: list[Any], key: str, path: str) -> int:
    names = [(item.get("name") or item.get("drafter")) if isinstance(item, dict) else item for item in items]
    if key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    raise SweepError(f"--set {path}: {unknown('member', key, [str(name) for name in names])}")


def _with_folder(data: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Paths in a sweep file count from that file's folder: those of workloads, and files that arms name."""
    if folder is None:
        return data
    for workload in _mappings(data.get("workloads")):
        _place(workload, "file", folder)
    for arm in _mappings(data.get("arms")):
        drafter = arm.get("drafter", arm.get("name"))
        for file in registry.files(drafter, arm) if drafter in registry.names() else ():
            _place(file.holder, file.option, folder)
    return data


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _place(item: dict[str, Any], key: str, folder: Path) -> None:
    if isinstance(item.get(key), str):
        item[key] = str(folder.resolve() / Path(item[key]).expanduser())


def _kind(value: Any) -> str:
    return "list" if isinstance(value, list) else "single value"


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses a mapping with the same key twice, where YAML would silently keep the last, and that says
    where a value is none of its type, such as the date 2026-13-45."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            raise yaml.MarkedYAMLError(
                problem=f"'{str(node.value)[:60]}' is not a value of its type; quote what is text",
                problem_mark=node.start_mark,
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key '{key}' is there twice", problem_mark=key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)

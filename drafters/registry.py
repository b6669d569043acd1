"""Name → drafter: the built-in ones and those that other packages offer through the entry point `dfbench.drafters`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from dfbench import __version__
from dfbench.drafters.base import Drafter, DrafterContext, Options
from dfbench.errors import OptionError, unknown

ENTRY_POINT_GROUP = "dfbench.drafters"

BUILT_IN = {
    "ar": "dfbench.drafters.ar:Autoregressive",
    "pld": "dfbench.drafters.pld:PromptLookup",
    "hf-pld": "dfbench.drafters.hf_pld:HfPromptLookup",
    "cacheback": "dfbench.drafters.cacheback:Cacheback",
    "recycling": "dfbench.drafters.recycling:TokenRecycling",
    "sam": "dfbench.drafters.sam:SamDecoding",
    "suffix": "dfbench.drafters.suffix:Suffix",
    "ngram-cache": "dfbench.drafters.ngram_cache:NgramCache",
    "ngram-trie": "dfbench.drafters.ngram_trie:NgramTrie",
    "hybrid": "dfbench.drafters.hybrid:HybridDrafter",
}


@dataclass(frozen=True)
class Source:
    """Where a drafter comes from: part of a job's identity."""

    distribution: str
    version: str


def names() -> list[str]:
    """Every known drafter name, built-in ones first."""
    return [*BUILT_IN, *sorted(set(_plugins()) - set(BUILT_IN))]


def find(name: str) -> type[Drafter]:
    """The drafter class of this name, imported on use. Raises OptionError for an unknown or broken one."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
    plugin = _plugins().get(name)
    if plugin is None:
        raise OptionError(unknown("drafter", name, names()))
    try:
        loaded = plugin.load()
    except Exception as error:
        raise OptionError(f"the drafter '{name}' ({plugin.value}) cannot be imported: {error}.") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Drafter)):
        raise OptionError(f"the drafter '{name}' ({plugin.value}) is not a dfbench.drafters.base.Drafter class.")
    return loaded


def source(name: str) -> Source:
    """The distribution and version that provide this drafter."""
    plugin = _plugins().get(name) if name not in BUILT_IN else None
    if plugin is None or plugin.dist is None:
        return Source("dfbench", __version__)
    return Source(plugin.dist.name, plugin.dist.version)


class NamedFile(NamedTuple):
    """A place in a drafter's options that may name a file: `holder[option]`, its SHA-256 in `holder[digest]`."""

    holder: dict[str, Any]
    option: str
    digest: str

    @property
    def path(self) -> str | None:
        return self.holder.get(self.option)

    @property
    def sha256(self) -> str | None:
        return self.holder.get(self.digest)


def files(name: str, options: dict[str, Any]) -> list[NamedFile]:
    """Every place in these options that may name a file, those of drafters inside the drafter included."""
    found = [NamedFile(options, option, digest) for option, digest in find(name).file_options.items()]
    for value in options.values():
        if isinstance(value, dict) and isinstance(value.get("drafter"), str) and value["drafter"] in names():
            inner = value.get("options")
            found += files(value["drafter"], inner) if isinstance(inner, dict) else []
    return found


def parse_options(name: str, given: dict[str, Any]) -> Options:
    """The drafter's options with defaults and preset filled in. Raises OptionError naming what is wrong."""
    cls = find(name)
    given = dict(given)
    preset = given.pop("preset", None)
    if preset is not None:
        if not isinstance(preset, str) or preset not in cls.presets:
            raise OptionError(f"drafter '{name}': {unknown('preset', str(preset), cls.presets)}")
        given = {**cls.presets[preset], **given}
    known = cls.Options.model_fields
    for key in given:
        if key not in known:
            raise OptionError(f"drafter '{name}': {unknown('option', str(key), [*known, 'preset'])}")
        _check_kind(name, key, known[key].annotation, given[key])
    try:
        return cls.Options(**given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "options"
        message = first["msg"].removeprefix("Value error, ")
        raise OptionError(f"drafter '{name}': option '{where}': {message} (got {first['input']!r}).") from error


def _check_kind(name: str, option: str, annotation: Any, value: Any) -> None:
    """Raise OptionError for what pydantic would convert in silence: `true` or '3' for a number, 1 for true."""
    kinds = {annotation, *get_args(annotation)}
    if kinds & {int, float} and (isinstance(value, bool | str) or (isinstance(value, int) and abs(value) >= 2**63)):
        wanted = "a number"
    elif bool in kinds and not isinstance(value, bool):
        wanted = "true or false"
    else:
        return
    shown = "one of more than 18 digits" if isinstance(value, int) and abs(value) >= 2**63 else repr(value)
    raise OptionError(f"drafter '{name}': option '{option}' must be {wanted}, not {shown}.")


def create(name: str, given: dict[str, Any], context: DrafterContext | None = None) -> Drafter:
    """A drafter ready for `start`, from its name and options."""
    return find(name)(parse_options(name, given), context or DrafterContext())


@cache
def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}

"""What a drafter is: the one interface that every draft-free method implements, and the draft it returns.

The decode loop talks to a drafter in one order, for every prompt:

    reset()              forget everything learned (the loop's caller, when the arm's cache policy is cold)
    start(prompt)        a new request: index the prompt
    observe([first])     the token that prefill gave
    propose(budget)      a draft of at most `budget` nodes; changes nothing
    observe(emitted, …)  what the target emitted for it: accepted drafts and the bonus token
    propose … observe …  until the request ends

The loop keeps the clock and cuts a draft to the depth that may still be emitted; a drafter does neither.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict

from dfbench.errors import DraftError, OptionError, WorkloadError


class Draft(NamedTuple):
    """Guessed tokens below the root, the last committed token.

    `tokens[i]` is a token id. `parents[i]` is the index of node i's parent, -1 for the root, and is always less
    than i. `parents is None` says that the draft is a chain: node i's parent is node i - 1.
    `match_len` and `score` say why: the length of the match it was copied from, and the number of tokens
    that the drafter expects to be accepted (None where the method has no such estimate).
    `chances[i]`, where the method knows: its estimate that node i and all nodes above it are accepted.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    match_len: int = 0
    score: float | None = None
    chances: Sequence[float] | None = None

    def depths(self) -> list[int]:
        """Depth of every node; children of the root have depth 1."""
        if self.parents is None:
            return list(range(1, len(self.tokens) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def cut(self, depth: int) -> Draft:
        """The same draft without the nodes deeper than `depth`; the order of what stays is kept."""
        if self.parents is None:
            return self if len(self.tokens) <= depth else self._keep(range(max(depth, 0)), None)
        depths = self.depths()
        if not depths or max(depths) <= depth:
            return self
        kept = [i for i, d in enumerate(depths) if d <= depth]
        place = {-1: -1} | {old: new for new, old in enumerate(kept)}
        return self._keep(kept, [place[self.parents[i]] for i in kept])

    def _keep(self, kept: Sequence[int], parents: Sequence[int] | None) -> Draft:
        chances = None if self.chances is None else [self.chances[i] for i in kept]
        return self._replace(tokens=[self.tokens[i] for i in kept], parents=parents, chances=chances)

    def check(self, budget: int, vocab_size: int) -> None:
        """Raise DraftError unless the draft fits the budget, the vocabulary and the order of parents."""
        if len(self.tokens) > budget:
            raise DraftError(f"a draft of {len(self.tokens)} nodes exceeds the budget of {budget}.")
        if self.tokens and not (min(self.tokens) >= 0 and max(self.tokens) < vocab_size):
            raise DraftError(f"a draft names a token outside the vocabulary of {vocab_size}.")
        if self.parents is not None:
            if len(self.parents) != len(self.tokens):
                raise DraftError(f"a draft has {len(self.tokens)} tokens but {len(self.parents)} parents.")
            if any(not -1 <= parent < i for i, parent in enumerate(self.parents)):
                raise DraftError("a draft names a parent that does not come before its child.")


EMPTY = Draft(())


class Verified(NamedTuple):
    """What a drafter may learn from the pass itself, not only from its outcome.

    `tokens`: the tokens fed, root first, then the draft's nodes (length n + 1). `topk`: int array of shape
    [n + 1, k], the target's k most likely next tokens after each of them, best first. Rejected nodes included.
    """

    tokens: Sequence[int]
    topk: np.ndarray


class Options(BaseModel):
    """Base class of a drafter's options: typed, frozen, serialisable; an unknown option is an error.

    The defaults are the published ones. Each field's `description` is shown by `dfbench drafters`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


AnyOptions: TypeAlias = Options
"""Within `Drafter`, `Options` names the class attribute."""


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may know about the target: its vocabulary, its ends of text, its tokenizer.

    `files` maps the SHA-256 of a file that an option names (a frozen table) to where it lies on this machine.
    """

    vocab_size: int = 2**31 - 1
    eos_ids: frozenset[int] = frozenset()
    tokenizer_hash: str | None = None
    files: dict[str, Path] = field(default_factory=dict)

    def read(self, what: str, option: str, path: str | None, sha256: str | None) -> tuple[Path, bytes]:
        """Where the file of a drafter's `option` lies, by content where this machine was sent it, else by path, and its
        bytes. Raises OptionError for one that is missing, unreadable or not the one meant; `what` names its kind."""
        place = self.files.get(sha256) if sha256 else None
        if place is None:
            if path is None:
                raise OptionError(f"no {what} with SHA-256 {sha256} is on this machine: write its path as `{option}`.")
            place = Path(path).expanduser()
        try:
            data = place.read_bytes()
        except OSError as error:
            raise OptionError(f"the {what} {place} cannot be read: {error.strerror}.") from error
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise OptionError(f"the {what} {place} does not have the SHA-256 {sha256}: correct `{option}_sha256`.")
        return place, data


def check_prompt(prompt: Sequence[int], context: DrafterContext) -> None:
    """Raise WorkloadError for a prompt that is empty or holds an id outside the vocabulary: nothing may be copied."""
    if not prompt:
        raise WorkloadError("a prompt has no tokens: write at least one.")
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < context.vocab_size:
            raise WorkloadError(
                f"a prompt holds the token id {token}, which a vocabulary of {context.vocab_size} does not have: "
                "tokenise it with the target's own tokenizer."
            )


class Drafter(ABC):
    """One draft-free method. Subclasses set the class attributes and implement the four verbs."""

    name: ClassVar[str]
    """The name in sweeps and on the command line."""
    summary: ClassVar[str]
    """One sentence: what it does and where it was published."""
    Options: ClassVar[type[Options]] = Options
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    """Named sets of options; an arm's `preset` fills what it does not say itself."""
    top_k: int = 0
    """How many of the target's most likely ids per verified node `observe` gets; 0 = none, and no cost."""
    file_options: ClassVar[dict[str, str]] = {}
    """Options that name a file → the option that holds its SHA-256, by which a worker finds it (`context.files`)."""

    def __init__(self, options: AnyOptions, context: DrafterContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def start(self, prompt: Sequence[int]) -> None:
        """Begin a request whose prompt is these token ids. What was learned from earlier requests may stay."""

    @abstractmethod
    def propose(self, budget: int) -> Draft:
        """A draft of at most `budget` nodes; empty is legal. Changes nothing: asked twice, it answers the same."""

    @abstractmethod
    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        """Learn the tokens that the target emitted. `verified` is given only where `top_k` asks for it."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every request; what was loaded with the options (a frozen table) stays."""

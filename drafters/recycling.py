"""Token Recycling: a matrix of each token's likely successors, refreshed by every pass, read as one static tree.

Method: Luo et al., arXiv 2408.08696. After each pass the target's top eight ids at every verified node, accepted or
not, replace that node's row; the prompt's logits are not used. The tree has 80 nodes, each named by the ranks that lead
to it. The matrix starts as zeros, so a token that was never seen proposes token 0 eight times, as in the released code
(`skip_unknown` drafts nothing there). The released code never empties the matrix: that is the cache policy `carried`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from dfbench.drafters.base import EMPTY, Draft, Drafter, DrafterContext, Options, Verified, check_prompt

WIDTH = 8

_COUNTS = """
:8
0:8 1:4 2:3 3:2 4:1 5:1 6:1 7:1
00:8 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 11:1 20:1 30:1 40:1 50:1
000:5 001:2 002:1 003:1 004:1 010:1 020:1 100:1 200:1 300:1
0000:3 0001:1 0002:1 0010:1 0100:1 1000:1
00000:2 00010:1
"""
CHILDREN = {path: int(count) for path, _, count in (entry.partition(":") for entry in _COUNTS.split())}
"""The published template "2.2.2": a node's path of ranks → how many children it has."""


class RecyclingOptions(Options):
    """Options of Token Recycling."""

    nodes: int = Field(80, ge=1, le=80, description="most nodes of the static tree, the shallow ones first")
    skip_unknown: bool = Field(False, description="draft nothing below a token whose successors were never seen")


class Level(NamedTuple):
    """One depth of the static tree: `begin` and `end` place it among the nodes, root first; a node is its parent's
    successor of that rank.
    """

    begin: int
    end: int
    parents: npt.NDArray[np.intp]
    ranks: npt.NDArray[np.intp]


class TokenRecycling(Drafter):
    """The matrix of successors and the static tree that reads it."""

    name = "recycling"
    summary = "Token Recycling: a static tree over each token's last seen top-8 successors (arXiv 2408.08696)."
    Options = RecyclingOptions
    top_k = WIDTH
    options: RecyclingOptions

    def __init__(self, options: RecyclingOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self._levels, self._parents = _template(options.nodes)
        self.reset()

    def reset(self) -> None:
        """Empty the matrix."""
        self._matrix = np.zeros((0, WIDTH), np.int32)
        self._known = np.zeros(0, np.bool_)
        self._root: int | None = None

    def start(self, prompt: Sequence[int]) -> None:
        """The prompt itself teaches nothing."""
        check_prompt(prompt, self.context)
        self._set_root(prompt[-1])

    def observe(self, emitted: Sequence[int], verified: Verified | None = None) -> None:
        """Replace the row of every verified token; of a token that was verified twice the last row stays."""
        if verified is not None and verified.topk is not None:
            tokens, topk = np.asarray(verified.tokens), verified.topk[:, :WIDTH]
            self._make_room(max(int(topk.max()), int(tokens.max())))
            self._matrix[tokens, : topk.shape[1]] = topk
            self._known[tokens] = True
        if emitted:
            self._set_root(emitted[-1])

    def propose(self, budget: int) -> Draft:
        """The static tree below the root, filled level by level."""
        root, count = self._root, min(budget, len(self._parents))
        if root is None or count <= 0:
            return EMPTY
        tokens = np.empty(len(self._parents) + 1, np.int32)
        tokens[0] = root
        for level in self._levels:
            tokens[level.begin : level.end] = self._matrix[tokens[level.parents], level.ranks]
        if self.options.skip_unknown:
            return self._known_part(tokens, budget)
        return Draft(tokens[1 : count + 1].tolist(), self._parents[:count])

    def _known_part(self, tokens: npt.NDArray[np.int32], budget: int) -> Draft:
        """The tree without what hangs below a token that has no row yet."""
        known = self._known[tokens].tolist()
        place = {-1: -1}
        kept: list[int] = []
        parents: list[int] = []
        for node, parent in enumerate(self._parents):
            if len(kept) == budget:
                break
            if parent in place and known[parent + 1]:
                place[node] = len(kept)
                parents.append(place[parent])
                kept.append(int(tokens[node + 1]))
        return Draft(kept, parents) if kept else EMPTY

    def _set_root(self, token: int) -> None:
        self._make_room(token)
        self._root = token

    def _make_room(self, token: int) -> None:
        """Give every id up to this one a row, so that no read can miss; the vocabulary may be larger than its use."""
        rows = len(self._matrix)
        if token < rows:
            return
        more = (1 << token.bit_length()) - rows
        self._matrix = np.concatenate([self._matrix, np.zeros((more, WIDTH), np.int32)])
        self._known = np.concatenate([self._known, np.zeros(more, np.bool_)])


def _template(nodes: int) -> tuple[list[Level], list[int]]:
    """The first `nodes` nodes of the template by depth: its levels, and every node's parent (-1 = root)."""
    place = {"": -1}
    parents: list[int] = []
    levels: list[Level] = []
    layer = [""]
    while layer and len(parents) < nodes:
        begin = len(parents)
        paths = [(path, rank) for path in layer for rank in range(CHILDREN.get(path, 0))][: nodes - begin]
        for path, rank in paths:
            place[f"{path}{rank}"] = len(parents)
            parents.append(place[path])
        if paths:
            of = np.array([place[path] + 1 for path, _ in paths])
            levels.append(Level(begin + 1, len(parents) + 1, of, np.array([rank for _, rank in paths])))
        layer = [f"{path}{rank}" for path, rank in paths]
    return levels, parents

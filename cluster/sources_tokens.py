"""Exchanges → token ids: as the log has them, or by a tokenizer and its chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dfbench.cluster import sources_formats as formats
from dfbench.cluster.sources_formats import Exchange, Skip
from dfbench.errors import ModelError
from dfbench.workers.spec import EMBEDDED_MODEL, TargetSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_ID = 2**31 - 1
MAX_TEXT, MAX_TOKENS = 1 << 24, 1 << 22
"""Characters and tokens of one exchange, four to sixteen times any model's context: beyond that, memory is at stake."""
CUT_AT_END = "tokens after the first end of text were cut"


class Tokenised(NamedTuple):
    """Prompt and output as ids, and why counts from them are estimates."""

    prompt_ids: list[int]
    output_ids: list[int]
    notes: tuple[str, ...] = ()


class Tokens:
    """Turns exchanges into ids. `vocab_size` bounds ids; by default it is the tokenizer's, else 2³¹ - 1."""

    def __init__(self, tokenizer: str | None, vocab_size: int | None = None, enable_thinking: bool = False) -> None:
        self.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
        self.eos_ids = frozenset[int]() if tokenizer is None else _eos_ids(self.tokenizer, tokenizer)
        known = MAX_ID if self.tokenizer is None else len(self.tokenizer)
        self.vocab_size = vocab_size if vocab_size is not None else known
        self._thinking = enable_thinking

    def of(self, exchange: Exchange) -> Tokenised | Skip:
        """The exchange's ids, or why it has none."""
        if exchange.output_ids is not None and exchange.prompt_ids is not None:
            if len(exchange.prompt_ids) + len(exchange.output_ids) > MAX_TOKENS:
                return Skip(f"more than {MAX_TOKENS:,} tokens, longer than any context")
            found = self._given(exchange.prompt_ids, exchange.output_ids)
        elif self.tokenizer is None:
            return Skip("text, but no tokenizer was named")
        elif _characters(exchange) > MAX_TEXT:
            return Skip(f"more than {MAX_TEXT >> 20} MiB of text, longer than any context")
        else:
            found = self._tokenised(exchange, self.tokenizer)
        if isinstance(found, Skip):
            return found
        if not found.prompt_ids:
            return Skip("an empty prompt")
        return found if found.output_ids else Skip("an empty answer")

    def _given(self, prompt_ids: Iterable[int], output_ids: Iterable[int]) -> Tokenised | Skip:
        prompt, output = list(prompt_ids), list(output_ids)
        if not all(0 <= i < self.vocab_size for ids in (prompt, output) for i in ids):
            return Skip(f"token ids outside the vocabulary of {self.vocab_size}")
        return self._ended(prompt, output, ())

    def _tokenised(self, exchange: Exchange, tokenizer: PreTrainedTokenizerBase) -> Tokenised | Skip:
        from dfbench.workers import models

        notes = [formats.RETOKENISED]
        if exchange.messages:
            notes.append(formats.RENDERED)
            try:
                prompt = models.render(tokenizer, exchange.messages, self._thinking)
            except ModelError as error:
                return Skip("messages that the tokenizer's chat template does not take: " + str(error).split(": ")[-1])
        else:
            prompt = models.render_text(tokenizer, exchange.prompt or "")
        output = [int(i) for i in tokenizer(exchange.text or "", add_special_tokens=False)["input_ids"]]
        if exchange.finish != "length" and tokenizer.eos_token_id is not None and output:
            output.append(int(tokenizer.eos_token_id))
            if exchange.finish is None:
                notes.append(formats.ASSUMED_END)
        return self._ended(prompt, output, tuple(notes))

    def _ended(self, prompt: list[int], output: list[int], notes: tuple[str, ...]) -> Tokenised:
        """The output up to its first end of text: decoding stops there."""
        end = next((i for i, token in enumerate(output) if token in self.eos_ids), None)
        if end is not None and end + 1 < len(output):
            return Tokenised(prompt, output[: end + 1], (*notes, CUT_AT_END))
        return Tokenised(prompt, output, notes)


def _characters(exchange: Exchange) -> int:
    asked = sum(len(message["content"]) for message in exchange.messages)
    return asked + len(exchange.prompt or "") + len(exchange.text or "")


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder, of the embedded model, or of a hub id. Raises ModelError.

    A folder needs tokenizer files only, no weights.
    """
    from dfbench.workers import models
    from dfbench.workers.model_cache import quiet

    if name == EMBEDDED_MODEL or name.endswith(".gguf"):
        return models.load_tokenizer(models.resolve(TargetSpec(model=name)))
    folder = Path(name).expanduser()
    if name.startswith((".", "/", "~")) and not folder.is_dir():
        raise ModelError(f"there is no tokenizer folder at '{name}': write one, '{EMBEDDED_MODEL}' or a hub id.")
    from transformers import AutoTokenizer

    try:
        with quiet():
            return AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else name)
    except Exception as error:  # transformers raises many kinds for a missing or broken tokenizer.
        raise ModelError(
            f"the tokenizer '{name}' cannot be had: write --tokenizer with a local folder that holds tokenizer.json,"
            f" '{EMBEDDED_MODEL}', or the id of a model on the hub."
        ) from error


def _eos_ids(tokenizer: PreTrainedTokenizerBase | None, name: str) -> frozenset[int]:
    """The tokenizer's end of text and, where the folder has a generation config, all that it names."""
    found: set[int] = set()
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    config = Path(name).expanduser() / "generation_config.json"
    if config.is_file():
        named = json.loads(config.read_text(encoding="utf-8")).get("eos_token_id")
        found.update(named if isinstance(named, list) else [] if named is None else [named])
    return frozenset(found)

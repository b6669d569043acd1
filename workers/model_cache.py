"""What is kept between runs about models: dense copies of GGUF files, and digests of weight files.

A GGUF takes half a minute to unpack and its tokenizer seconds to build; as safetensors both load in a blink. So each
file is converted once, into float32, and loaded from there. Everything here can be deleted at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import logging
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from dfbench.errors import ModelError

logger = logging.getLogger(__name__)

CONVERTER_VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOCK = 1 << 22


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/dfbench`, by default `~/.cache/dfbench`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dfbench"


def dense(gguf: Path, digest: str, name: str) -> Path:
    """Folder with the dense float32 safetensors and the tokenizer of a GGUF file, converted on first use.

    Converters may run at the same time: one works, the others wait, and the folder appears whole or not at all.
    """
    label = re.sub(r"[^A-Za-z0-9._-]", "-", Path(name).stem if "/" in name else name)
    folder = cache_root() / "models" / f"{label}-{digest[:12]}-{CONVERTER_VERSION}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _convert(gguf, folder, name)
    except OSError as error:
        raise ModelError(
            f"the model '{name}' cannot be unpacked into '{folder}' ({error.strerror or error}):"
            " free some space or point XDG_CACHE_HOME at a folder that can be written."
        ) from error
    return folder


def _convert(gguf: Path, folder: Path, name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    logger.info("unpacking %s into %s, once", gguf, folder)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with quiet(), redirect_stderr(io.StringIO()):  # gguf's own progress bar knows no switch.
            # Without `dequantize` transformers keeps the blocks and computes with them: another model, and slower.
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent),
                gguf_file=gguf.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
            )
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
        _check_plain(work)
        work.chmod(0o755)
        work.rename(folder)
    except Exception as error:  # Readers of a file that is not what it says raise anything.
        if isinstance(error, OSError) and error.errno is not None:
            raise  # The disk's fault, not the file's.
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise ModelError(f"'{name}' is not a GGUF model that transformers can load: {reason}.") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_plain(folder: Path) -> None:
    """A dense copy whose config still speaks of quantisation would be loaded as something that it is not."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.pop("quantization_config", None) is not None:
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and notices, which would go to a terminal that is not theirs."""
    from transformers.utils import logging as notices

    before, bars = notices.get_verbosity(), notices.is_progress_bar_enabled()
    notices.set_verbosity_error()  # type: ignore[no-untyped-call]
    notices.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        notices.set_verbosity(before)
        if bars:
            notices.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def weight_digest(files: Sequence[Path]) -> str:
    """SHA-256 over weight files in name order: of the file when there is one, else of the names and digests."""
    digests = [file_digest(file) for file in files]
    if len(digests) == 1:
        return digests[0]
    listing = "".join(f"{digest}  {file.name}\n" for file, digest in zip(files, digests, strict=True))
    return hashlib.sha256(listing.encode()).hexdigest()


def file_digest(file: Path) -> str:
    """SHA-256 of a file, remembered by path, size and modification time. The hub's cache names large files by it."""
    real = file.resolve()
    if real != file and _SHA256.fullmatch(real.name):
        return real.name
    status = real.stat()
    key = hashlib.sha256(f"{real}|{status.st_size}|{status.st_mtime_ns}".encode()).hexdigest()
    note = cache_root() / "digests" / key
    try:
        known = note.read_text(encoding="ascii")
        if _SHA256.fullmatch(known):
            return known
    except (OSError, ValueError):
        pass  # Not hashed before.
    digest = _hash(real)
    _remember(note, digest)
    return digest


def _hash(file: Path) -> str:
    sha = hashlib.sha256()
    with file.open("rb") as handle:
        while block := handle.read(_BLOCK):
            sha.update(block)
    return sha.hexdigest()


def _remember(note: Path, digest: str) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        part = note.with_suffix(f".{os.getpid()}")
        part.write_text(digest, encoding="ascii")
        part.replace(note)
    except OSError:
        pass  # A cache that cannot be written costs time, nothing else.

"""What the cluster's tests share: a model folder that resolves and tokenises in no time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fakehead import FakeHead

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking %} think{% endif %}{% endif %}"
)


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """Makes a model folder: a tokenizer of 300 words, a config with this context, weights that are four numbers."""

    def make(name: str = "tiny", *, context: int = 64, template: str | None = CHAT_TEMPLATE, seed: int = 0) -> Path:
        import numpy as np
        from safetensors.numpy import save_file
        from tokenizers import Tokenizer, models, pre_tokenizers

        folder = tmp_path / name
        folder.mkdir()
        words = {"<unk>": 0, "<eos>": 1, "[user]": 2, "[assistant]": 3, **{f"w{i}": i for i in range(4, 300)}}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}
        if template is not None:
            settings["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        config = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": context, "eos_token_id": 1}
        (folder / "config.json").write_text(json.dumps(config))
        save_file({"w": np.full(4, seed, np.float32)}, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture
def fake_head(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHead]:
    """A head that asks for the token `secret`, which this machine has; its own node has this machine's versions."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    head = FakeHead()
    head.add("10.0.0.1", head=True)
    yield head
    head.stop()


class Ran(NamedTuple):
    """What a command line printed and how it ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def dfbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a command line in this process, as the console script would, exit status included."""
    from dfbench.cluster import cli

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["dfbench", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        return Ran(int(code or 0), printed.out, printed.err)  # type: ignore[call-overload]

    return run

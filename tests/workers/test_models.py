"""Finding and loading models: local folders, GGUF, the hub out of reach, and every way a folder can be no model."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers import models as token_models
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dfbench.errors import ModelError, WorkloadError
from dfbench.workers import loading, model_cache, models
from dfbench.workers.engine import load_target
from dfbench.workers.spec import EMBEDDED_MODEL, PromptSpec, TargetSpec

TinyModel = Callable[..., PreTrainedModel]
WORDS = ["<s>", "</s>", "user", "assistant", "hello", "world", "think", "[UNK]"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} {{ m['role'] }} {{ m['content'] }}{% endfor %}"
    "{% if enable_thinking %} think{% endif %}{% if add_generation_prompt %} assistant{% endif %}"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "model" not in request.keywords:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    core = Tokenizer(token_models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = Whitespace()
    core.add_special_tokens(["<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="[UNK]")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path, tiny_model: TinyModel) -> Path:
    """A tiny model with tokenizer, as `save_pretrained` leaves it."""
    path = tmp_path / "tiny"
    tiny_model("llama", "sdpa", torch.float32).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def spec(path: Path | str, **settings: Any) -> TargetSpec:
    return TargetSpec(model=str(path), dtype=settings.pop("dtype", "float32"), **settings)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_local_folder_loads_and_decodes(folder: Path) -> None:
    found = models.resolve(spec(folder))
    assert (found.context_limit, found.vocab_size, found.revision, found.gguf) == (256, 29, None, None)
    target = load_target(spec(folder, dtype="bfloat16", options={"threads": torch.get_num_threads()}))
    assert target.model.dtype == torch.bfloat16
    assert 0 <= target.prefill([2, 4, 5]) < 29
    assert target.eos_ids == {1}
    assert target.context_limit == 256


def test_every_end_of_text_counts(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[5, 6])
    change(folder / "config.json", eos_token_id=4)
    found = models.resolve(spec(folder))
    assert models.eos_ids(found) == {5, 6, 1}
    change(folder / "generation_config.json", eos_token_id=None)
    assert models.eos_ids(models.resolve(spec(folder))) == {4, 1}


def test_rendering_uses_the_template_and_adds_no_second_bos() -> None:
    tokenizer = make_tokenizer()
    said = [{"role": "user", "content": "hello world"}]
    assert models.render(tokenizer, said) == [0, 2, 4, 5, 3]
    assert models.render(tokenizer, said, enable_thinking=True) == [0, 2, 4, 5, 6, 3]
    assert models.render_text(tokenizer, "hello") == [4]
    with pytest.raises(ModelError, match="no chat template"):
        models.render(make_tokenizer(None), said)
    with pytest.raises(ModelError, match="refused the messages: no"):
        models.render(make_tokenizer("{{ raise_exception('no') }}"), said)


def test_a_tokenizer_is_known_by_what_it_does() -> None:
    first, second, third = make_tokenizer(), make_tokenizer("other"), make_tokenizer()
    third.add_tokens(["more"])
    before = models.tokenizer_hash(first)
    first("hello", truncation=True, max_length=1, padding="max_length") if first.pad_token else first(
        "hello", truncation=True, max_length=1
    )
    assert models.tokenizer_hash(first) == before == models.tokenizer_hash(second)
    assert models.tokenizer_hash(third) != before


def test_the_next_turn_holds_the_answer() -> None:
    tokenizer = make_tokenizer()
    asked = ({"role": "user", "content": "hello"},)
    prompt = PromptSpec("w", "q7", "s", "hello", (0, 2, 4, 3), "x", messages=asked, followups=("world", "think"))
    second = models.next_turn(prompt, [5, 4, 1], tokenizer)
    assert second.prompt_id == "q7#2"
    assert second.messages[1] == {"role": "assistant", "content": "world hello"}
    assert second.prompt_ids == (0, 2, 4, 3, 5, 4, 2, 5, 3)
    assert second.prompt_sha == models.prompt_sha(second.prompt_ids) != prompt.prompt_sha
    third = models.next_turn(second, [4], tokenizer, enable_thinking=True)
    assert (third.prompt_id, third.text, third.followups) == ("q7#3", "think", ())
    with pytest.raises(WorkloadError, match="no further turn"):
        models.next_turn(third, [4], tokenizer)
    odd = PromptSpec("w", "task#9", "s", "hello", (0,), "x", followups=("world",))
    assert models.next_turn(odd, [4], tokenizer).prompt_id == "task#9#2"


def test_what_is_no_model_is_named(folder: Path, tmp_path: Path) -> None:
    def refused(model: Path | str, **settings: Any) -> str:
        with pytest.raises(ModelError) as caught:
            models.resolve(spec(model, **settings))
        return str(caught.value)

    assert "there is no model at" in refused(tmp_path / "nowhere")
    assert "there is no model at" in refused("./nowhere")
    assert "no config.json" in refused(tmp_path)
    assert "dtype 'int4'" in refused(folder, dtype="int4")
    assert "unknown model option 'quantisation'" in refused(folder, options={"quantisation": {}})
    assert "model option 'gguf'" in refused(folder, options={"gguf": "loose"})
    (folder / "model.safetensors").rename(folder / "kept")
    assert "no weights" in refused(folder)
    (folder / "pytorch_model.bin").touch()
    assert "pickled weights" in refused(folder)
    (folder / "config.json").write_text("{}")
    assert "names no vocab_size" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "cannot be read" in refused(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 3}))
    (folder / "kept").rename(folder / "model.safetensors")
    assert "how long its context is" in refused(folder)


def test_the_hub_out_of_reach_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*arguments: Any, **settings: Any) -> None:
        assert settings["timeout"] <= 10
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(ModelError, match=r"model 'nobody/nothing@abc' could not be had .* `--model PATH`"):
        models.resolve(spec("nobody/nothing", revision="abc"))


def test_a_revision_of_what_lies_here_is_refused(folder: Path) -> None:
    for model in (folder, EMBEDDED_MODEL):
        with pytest.raises(ModelError, match="has no revision 'main': leave `revision` out"):
            models.resolve(spec(model, revision="main"))


def test_broken_weights_devices_and_tokenizers_are_named(folder: Path) -> None:
    found = models.resolve(spec(folder))
    with pytest.raises(ModelError, match="device 'gpu'"):
        loading.load_model(found, spec(folder, device="gpu"))
    with pytest.raises(ModelError, match="not on this machine"):
        loading.load_model(found, spec(folder, device="cuda:99"))
    with pytest.raises(ModelError, match="'quantization' cannot be used"):
        loading.load_model(found, spec(folder, options={"quantization": {"quant_method": "nonsense"}}))
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="cannot be loaded"):
        loading.load_model(found, spec(folder))
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(ModelError, match="tokenizer of"):
        models.load_tokenizer(found)


def test_a_digest_is_computed_once_and_again_when_the_file_changes(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(b"one")
    first = model_cache.weight_digest([file])
    monkeypatch.setattr(model_cache, "_hash", lambda _: pytest.fail("hashed again"))
    assert model_cache.weight_digest([file]) == first
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file.write_bytes(b"other")
    assert model_cache.weight_digest([file]) != first
    blob = tmp_path / ("a" * 64)
    blob.write_bytes(b"x")
    (tmp_path / "link").symlink_to(blob)
    assert model_cache.file_digest(tmp_path / "link") == "a" * 64


def test_converters_at_the_same_time_do_the_work_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def convert(gguf: Path, folder: Path, name: str) -> None:
        calls.append(name)
        time.sleep(0.05)
        folder.mkdir()

    monkeypatch.setattr(model_cache, "_convert", convert)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(model_cache.dense(tmp_path / "m.gguf", "f" * 64, "m")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["m"]
    assert set(found) == {tmp_path / "cache" / "dfbench" / "models" / f"m-{'f' * 12}-{model_cache.CONVERTER_VERSION}"}


def test_a_broken_gguf_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF and nothing else")
    with pytest.raises(ModelError, match="not a GGUF model"):
        models.resolve(spec(file))
    assert not list((tmp_path / "cache" / "dfbench" / "models").glob("[!.]*[!k]"))


@pytest.mark.model
def test_the_embedded_model_is_found_without_importing_its_package() -> None:
    import sys

    found = models.resolve(TargetSpec())
    assert models.EMBEDDED_PACKAGE not in sys.modules
    assert found.path.is_dir() and "quantization_config" not in found.config
    assert found.digest == model_cache.file_digest(models.embedded_model())
    tokenizer = models.load_tokenizer(found)
    assert models.eos_ids(found, tokenizer) == {2}
    assert tokenizer.decode(models.render(tokenizer, [{"role": "user", "content": "Hi"}])).count("<|im_start|>") == 3


def test_a_packed_model_is_known_by_its_modules(folder: Path) -> None:
    class GgufLinear(torch.nn.Linear):
        """As transformers calls those that compute with blocks."""

    packed = dataclasses.replace(models.resolve(spec(folder)), gguf="m.gguf")
    loading._check_packed(packed, torch.nn.Sequential(GgufLinear(2, 2)))
    with pytest.raises(ModelError, match="write 'dense'"):
        loading._check_packed(packed, torch.nn.Sequential(torch.nn.Linear(2, 2)))

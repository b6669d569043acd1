"""What a worker says of itself is read off what it loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from dfbench import __version__
from dfbench.workers import provenance, telemetry
from dfbench.workers.engine import TorchTarget
from dfbench.workers.spec import TargetSpec
from dfbench.workers.target import ScriptedTarget

TinyModel = Callable[..., PreTrainedModel]


def test_the_stack_names_the_versions_that_timings_belong_to() -> None:
    assert provenance.stack().startswith(f"dfbench {__version__}, torch {torch.__version__}, transformers 5.")


def test_facts_are_of_the_loaded_model_not_of_the_request(tiny_model: TinyModel) -> None:
    asked = TargetSpec(model="asked-for", dtype="bfloat16", attention="eager", engine="recompute")
    facts = provenance.worker_facts(TorchTarget(tiny_model("llama"), asked, eos_ids=frozenset({4, 2})))
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["dtype"], facts["logits_dtype"], facts["attention"]) == ("float64", "float64", "sdpa")
    assert (facts["engine"], facts["eos_ids"], facts["quantization"]) == ("recompute", [2, 4], None)
    assert facts["modules"] == {"Embedding": 1, "Linear": 15, "LlamaRMSNorm": 5}
    assert facts["threads"] == torch.get_num_threads()
    assert f"({facts['threads']} threads)" in facts["device"]
    row = provenance.record_facts(facts, "w3")
    assert (row.worker_id, row.dtype, row.engine, row.stack) == ("w3", "float64", "recompute", provenance.stack())


def test_bytes_are_counted_once_a_storage(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    facts = provenance.worker_facts(TorchTarget(model, TargetSpec()))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    buffers = {buffer.data_ptr(): buffer.numel() * buffer.element_size() for buffer in model.buffers()}
    assert facts["weight_bytes"] == 8 * parameters + sum(buffers.values())
    assert facts["untied_input_embedding_bytes"] == 29 * 24 * 8
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 8  # keys and values, layers, heads, head size, float64


def test_a_tied_embedding_is_not_counted_apart(tiny_model: TinyModel) -> None:
    model = tiny_model("llama", "eager", torch.float32)
    head = model.lm_head.weight
    try:
        model.lm_head.weight = model.get_input_embeddings().weight
        tied = provenance.weights(model)
    finally:
        model.lm_head.weight = head
    assert tied["untied_input_embedding_bytes"] == 0
    assert provenance.weights(model)["weight_bytes"] - tied["weight_bytes"] == 29 * 24 * 4


def test_a_target_without_a_model_reports_the_machine() -> None:
    facts = provenance.worker_facts(ScriptedTarget(lambda prefix: 3))
    assert facts["target"] == "scripted" and facts["cpu_cores"] >= 1 and facts["memory_bytes"] > 0
    row = provenance.record_facts(facts, "w")
    assert (row.model, row.engine, row.dtype) == ("scripted", "scripted", "none")


def test_the_driver_is_that_of_the_device_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = dict.fromkeys(("memory_total", "memory_free", "temperature_c", "power_w", "reasons", "processes"))

    def device(index: int, uuid: str) -> telemetry.Device:
        more = {"driver": "580.1", "sm_mhz": 1000 + index, "memory_mhz": 9, "power_limit_w": 300.0}
        return telemetry.Device(index=index, uuid=uuid, name="GPU", **more, **numbers)  # type: ignore[arg-type]

    monkeypatch.setattr(telemetry, "devices", lambda: [device(0, "GPU-aa"), device(1, "GPU-bb")])
    assert provenance._driver("bb") == {"driver": "580.1", "sm_mhz": 1001, "memory_mhz": 9, "power_limit_w": 300.0}
    assert set(provenance._driver("").values()) == {None}


def test_an_installed_copy_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert provenance._commit(tmp_path) == {"commit": None, "dirty": None}
    (tmp_path / ".git").mkdir()
    answers = {"rev-parse": "abc123", "status": " M file"}
    monkeypatch.setattr(provenance, "_git", lambda root, command, *rest: answers[command])
    provenance._commit.cache_clear()
    assert provenance._commit(tmp_path) == {"commit": "abc123", "dirty": True}
    provenance._commit.cache_clear()


def test_a_weight_of_several_tensors_counts_them_all() -> None:
    from torch.testing._internal.two_tensor import TwoTensor  # Built as quantised weights are: a shell around others.

    part = torch.zeros(8, 4, dtype=torch.int8)
    weight = TwoTensor(part, TwoTensor(part.clone(), part.clone()))
    assert [each.numel() for each in provenance._plain(weight)] == [32, 32, 32]

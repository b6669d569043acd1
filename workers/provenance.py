"""What a worker really is: hardware, software, and the model's settings as the loaded objects report them.

Nothing here repeats what was asked for: where a switch was set in vain, the record shows it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dfbench import __version__
from dfbench.workers import telemetry
from dfbench.workers.loading import output_head
from dfbench.workers.records import WorkerFacts
from dfbench.workers.target import Target

if TYPE_CHECKING:
    import torch

    from dfbench.workers.engine import TorchTarget

_PACKAGES = ("torch", "transformers", "numpy", "pyarrow", "ray", "gguf", "accelerate")


@cache
def stack() -> str:
    """The software that timings belong to, in a line: dfbench, torch and transformers with their versions."""
    return f"dfbench {__version__}, torch {_version('torch')}, transformers {_version('transformers')}"


def worker_facts(target: Target) -> dict[str, Any]:
    """Everything recorded once for a worker, JSON-ready. Targets without a model have the machine's part alone."""
    facts = {**_machine(), **_software(), "target": target.kind, "stack": stack(), "device": cpu_model()}
    if target.kind == "torch":
        facts.update(_torch_facts(target))  # type: ignore[arg-type]
    return facts


def record_facts(facts: dict[str, Any], worker_id: str) -> WorkerFacts:
    """The part of `worker_facts` that every row of jobs repeats."""
    return WorkerFacts(
        worker_id=worker_id,
        device=facts["device"],
        model=facts.get("model", facts["target"]),
        revision=facts.get("revision"),
        dtype=facts.get("dtype", "none"),
        engine=facts.get("engine", facts["target"]),
        stack=facts["stack"],
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    return {
        "host": platform.node(),
        "os": platform.platform(),
        "cpu_model": cpu_model(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_mhz": round(frequency.current) if frequency else None,
        "memory_bytes": psutil.virtual_memory().total,
    }


@cache
def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _software() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "dfbench": __version__,
        **{package: _version(package) for package in _PACKAGES},
        **_commit(Path(__file__).resolve().parents[1]),
    }


@cache
def _commit(root: Path) -> dict[str, Any]:
    """Commit of the checkout that the code runs from, and whether files differ from it; null in an installed copy."""
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": head, "dirty": changed}


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _torch_facts(target: TorchTarget) -> dict[str, Any]:
    model, spec = target.model, target.spec
    head = output_head(model).weight
    return {
        **_device(target.device),
        **_numerics(),
        "model": target.resolved.name if target.resolved else spec.model,
        "model_class": type(model).__name__,
        "model_digest": target.resolved.digest if target.resolved else None,
        "revision": target.resolved.revision if target.resolved else spec.revision,
        "engine": spec.engine,
        "kv_repair": spec.kv_repair,
        "max_queries": spec.max_queries,
        "buckets": list(spec.buckets),
        "dtype": _name(model.dtype),
        "logits_dtype": _name(head.dtype),
        "quantization": _quantization(target),
        "modules": _modules(model),
        "attention": model.config._attn_implementation,
        "vocab_size": target.vocab_size,
        "context_limit": target.context_limit,
        "eos_ids": sorted(target.eos_ids),
        **weights(model),
        "kv_bytes_per_token": kv_bytes_per_token(target),
        **target.engine_facts(),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _quantization(target: TorchTarget) -> Any:
    """How the weights are packed, as the loaded config says; None for plain ones."""
    config = getattr(target.model.config, "quantization_config", None)
    if config is None:
        return None
    raw = config if isinstance(config, dict) else config.to_dict()
    return json.loads(json.dumps(raw, default=str))


def _modules(model: Any) -> dict[str, int]:
    """How many modules of each class hold weights. Packed weights that were unpacked after all show as plain ones."""
    holders = (type(module).__name__ for module in model.modules() if getattr(module, "weight", None) is not None)
    return dict(sorted(Counter(holders).items()))


def _device(device: torch.device) -> dict[str, Any]:
    import torch

    threads = torch.get_num_threads()
    if device.type != "cuda":
        return {"device": f"{cpu_model()} ({threads} threads)", "device_kind": device.type, "threads": threads}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "device_kind": "cuda",
        "threads": threads,
        "device_memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        **_driver(str(getattr(properties, "uuid", ""))),
    }


def _driver(uuid: str) -> dict[str, Any]:
    """Driver and clocks of a CUDA device, as NVML reports them; nulls where it has no answer."""
    found = [device for device in telemetry.devices() if uuid and uuid in device.uuid]
    if not found:
        return dict.fromkeys(("driver", "sm_mhz", "memory_mhz", "power_limit_w"))
    device = found[0]
    return {name: getattr(device, name) for name in ("driver", "sm_mhz", "memory_mhz", "power_limit_w")}


def _numerics() -> dict[str, Any]:
    """Switches that change what a matrix product gives in its last bits."""
    import torch

    matmul, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "tf32_cudnn": torch.backends.cudnn.allow_tf32,
        "bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": mkldnn.enabled and mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def weights(model: Any) -> dict[str, int]:
    """Bytes of all weights, each storage once, and of an input embedding that the output does not share."""
    held = (part for tensor in (*model.parameters(), *model.buffers()) for part in _plain(tensor))
    storages = {tensor.data_ptr(): tensor for tensor in held}
    embedding = model.get_input_embeddings().weight
    tied = embedding.data_ptr() == output_head(model).weight.data_ptr()
    return {
        "weight_bytes": sum(tensor.numel() * tensor.element_size() for tensor in storages.values()),
        "untied_input_embedding_bytes": 0 if tied else embedding.numel() * embedding.element_size(),
    }


def _plain(tensor: Any) -> Iterator[Any]:
    """The tensors that hold a weight: quantised ones look like one of their wide type and hold several."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain(getattr(tensor, name))


def kv_bytes_per_token(target: TorchTarget) -> int:
    """Bytes of keys and values that one token adds to the cache, read off the cache after one token."""
    from dfbench.workers.static_cache import states_of_a_token

    return sum(states.nbytes for states in states_of_a_token(target.model, target.cache_argument))

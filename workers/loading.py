"""A model's weights on their device, as transformers loads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dfbench.errors import ModelError
from dfbench.workers import memory
from dfbench.workers.model_cache import quiet
from dfbench.workers.models import ResolvedModel, first_line
from dfbench.workers.spec import TargetSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def pick_device(name: str) -> torch.device:
    """`auto` is the first CUDA device where there is one, else the CPU. Raises ModelError for one that is not here."""
    import torch

    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device '{name}' is not known: write auto, cpu or cuda:0.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device '{name}' is not on this machine: write auto or cpu.")
    return device


def output_head(model: PreTrainedModel) -> Any:
    """The module that turns the last hidden states into logits."""
    return model.get_output_embeddings()  # type: ignore[no-untyped-call]


def load_model(resolved: ResolvedModel, spec: TargetSpec) -> PreTrainedModel:
    """The model on its device, in evaluation mode. Raises ModelError when transformers cannot load it."""
    import torch
    from transformers import AutoModelForCausalLM

    device = pick_device(spec.device)
    memory.check_room(resolved.config, spec, device)
    arguments: dict[str, Any] = {
        "dtype": getattr(torch, spec.dtype),
        "attn_implementation": spec.attention,
        "trust_remote_code": resolved.trust_remote_code,
        "use_safetensors": not spec.options.get("allow_pickle") or any(resolved.path.glob("*.safetensors")),
        "local_files_only": True,
        **_quantization(resolved, spec),
    }
    if device.type == "cuda":
        arguments["device_map"] = {"": device}
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(str(resolved.path), **arguments)
    except Exception as error:  # Missing kernels, unknown architecture, bad files: all end the same way.
        raise ModelError(f"the model '{resolved.name}' cannot be loaded: {first_line(error)}") from error
    _check_packed(resolved, model)
    if device.type != "cuda" and not getattr(model, "is_quantized", False):
        model = model.to(device)  # type: ignore[arg-type]
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _check_packed(resolved: ResolvedModel, model: Any) -> None:
    """transformers unpacks a GGUF that it has no kernel for, and goes on: another model would be timed."""
    if resolved.gguf and not any(type(module).__name__.startswith("Gguf") for module in model.modules()):
        raise ModelError(
            f"model option 'gguf' is 'packed', but transformers unpacked the weights of '{resolved.name}', for it has"
            " no kernel here that computes with them: write 'dense', or install `kernels` on a device that it serves."
        )


def _quantization(resolved: ResolvedModel, spec: TargetSpec) -> dict[str, Any]:
    """Arguments that say how the weights are packed, for models that are not plain safetensors."""
    arguments: dict[str, Any] = {}
    if resolved.gguf:
        arguments = {"gguf_file": resolved.gguf, "use_safetensors": None}
    wanted = spec.options.get("quantization")
    if wanted:
        from transformers.quantizers.auto import AutoQuantizationConfig

        try:
            arguments["quantization_config"] = AutoQuantizationConfig.from_dict(dict(wanted))
        except Exception as error:  # Each method checks its settings in its own way, some by assertion.
            raise ModelError(f"model option 'quantization' cannot be used: {first_line(error)}") from error
    return arguments

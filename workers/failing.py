"""What an exception that a job raised means for its worker, and how it is written down."""

from __future__ import annotations

import traceback

from dfbench.workers.redact import redact

_NO_MEMORY_TYPES = {"OutOfMemoryError", "MemoryError"}
_NO_MEMORY = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")
"""CUDA's words, those of torch's allocator for the CPU, and a library's that found no room for its workspace."""
_BROKEN = ("cuda error", "cuda driver error", "triton error [cuda]", "cudnn_status", "cublas_status", "cusolver_status")
"""How torch, inductor, Triton and NVIDIA's libraries begin what the device reported."""


def failure_kind(error: BaseException) -> str:
    """The ledger's kind for what a job raised: oom and device mean that the worker must be replaced.

    By type name and message, since torch may not be importable here. A CUDA context that has seen an illegal access,
    an assert or a launch failure answers every later call with an error.
    """
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error).lower()
    if not names.isdisjoint(_NO_MEMORY_TYPES) or any(phrase in text for phrase in _NO_MEMORY):
        return "oom"
    if "AcceleratorError" in names or any(phrase in text for phrase in _BROKEN):
        return "device"
    return "error"


def describe(error: BaseException) -> str:
    """An exception as the ledger keeps it: its message and where it came from, without secrets."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    tail = "".join(lines[-4:])[-2000:]
    return redact(f"{type(error).__name__}: {error}\n{tail}".strip())

"""What `gpu_check.py` finds out: whether engines agree, and one engine's times, waits and memory."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpu_models import Settings, guesser, ids, make_model, make_target, run

if TYPE_CHECKING:
    import torch

    from dfbench.workers.engine import TorchTarget
    from dfbench.workers.loop import Trace


def equality(device: torch.device, settings: Settings) -> dict[str, Any]:
    """AR, chains and trees in both engines on a small model in float32, held against AR in `cached`."""
    import torch

    from dfbench.drafters.registry import create

    torch.set_float32_matmul_precision("highest")
    model = make_model(settings.small, "float32", device)
    vocabulary = settings.small["vocab_size"]
    prompt = ids(settings.context // 4, vocabulary)
    targets = {
        "cached": make_target(model, "float32"),
        "compiled": make_target(model, "float32", engine="compiled", buckets=settings.buckets),
        "compiled, model's own forward": make_target(
            model, "float32", engine="compiled", buckets=settings.buckets, options={"lean": False}
        ),
    }
    expected = run(targets["cached"], create("ar", {}), prompt, settings.tokens).output
    compared, unequal = 0, []
    for name, target in targets.items():
        drafters = {
            "AR": create("ar", {}),
            "chains": guesser(expected, vocabulary, False),
            "trees": guesser(expected, vocabulary, True),
        }
        for kind, drafter in drafters.items():
            compared += 1
            if run(target, drafter, prompt, settings.tokens).output != expected:
                unequal.append(f"{kind} in {name}")
    return {"compared": compared, "tokens": len(expected), "distinct": len(set(expected)), "unequal": unequal}


def engine(target: TorchTarget, settings: Settings) -> dict[str, Any]:
    """One engine on the large model."""
    import torch

    from dfbench.drafters.registry import create
    from dfbench.workers import provenance

    cuda = target.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(target.device)
    prompt = ids(settings.context, target.vocab_size)
    ar = create("ar", {})
    run(target, ar, prompt, settings.tokens)  # Warms up.
    timed = [against_wall(target, lambda: run(target, ar, prompt, settings.tokens)) for _ in range(settings.rounds)]
    trace, clocks = min(timed, key=lambda pair: pair[0].decode_ns)
    facts = provenance.worker_facts(target)
    bandwidth, costs = calibration(target, facts, settings)
    step_ns = trace.decode_ns / len(trace.steps)
    wide = guesser(trace.output, target.vocab_size, True)
    return {
        "ms_a_token": step_ns / 1e6,
        "read_gb_s": bandwidth / 1e9,
        "read_share": share(bytes_read(facts, settings), bandwidth, step_ns),
        "overhead": overhead(trace),
        "waits": {
            "AR": waits(target, lambda tokens: run(target, ar, prompt, tokens), settings.tokens),
            "trees": waits(target, lambda tokens: run(target, wide, prompt, tokens), settings.tokens),
        },
        "clocks": clocks,
        "verify_cost": costs,
        "peak_bytes": torch.cuda.max_memory_allocated(target.device) if cuda else None,
        "built": target.engine_facts(),
    }


def calibration(target: TorchTarget, facts: dict[str, Any], settings: Settings) -> tuple[float, dict[str, Any]]:
    """The read bandwidth, in bytes a second, and what a pass costs by its width."""
    from dfbench.workers import calibrate, provenance

    wanted = calibrate.Settings(
        queries=settings.widths,
        contexts=(settings.context,),
        samples=settings.samples,
        read_samples=9,
        read_bytes=settings.read_bytes,
    )
    measured = calibrate.calibrate(target, provenance.record_facts(facts, "gpu-check"), wanted)
    bandwidth = calibrate.bandwidth(measured)
    assert bandwidth is not None
    costs = {
        str(point.queries): {
            "ms": point.median_ns / 1e6,
            "ratio": point.ratio,
            "lo": point.ratio_lo,
            "hi": point.ratio_hi,
        }
        for point in calibrate.curve(measured)
    }
    return bandwidth.median, costs


def bytes_read(facts: Mapping[str, Any], settings: Settings) -> float:
    """Bytes that a plain step must read: the weights without an input embedding of its own, keys and values so far."""
    context = settings.context + settings.tokens / 2
    kept = facts["weight_bytes"] - facts["untied_input_embedding_bytes"]
    return float(kept + context * facts["kv_bytes_per_token"])


def share(size: float, bandwidth: float, step_ns: float) -> float:
    """What reading `size` bytes at `bandwidth` bytes a second takes, as a share of the step."""
    return size / bandwidth / (step_ns / 1e9)


def overhead(trace: Trace) -> float:
    """Median over steps of what is neither forward nor draft, as a share of the step."""
    return statistics.median((step.step_ns - step.forward_ns - step.draft_ns) / step.step_ns for step in trace.steps)


def against_wall(target: TorchTarget, work: Callable[[], Trace]) -> tuple[Trace, dict[str, float]]:
    """A decode between two synchronisations: its own times beside the wall's.

    `steps`: the loop's step times ÷ wall; `forwards`: the device's forward times ÷ the loop's step times. Both are at
    most 1; steps far below it would be time that nothing accounts for.
    """
    import torch

    settle = torch.cuda.synchronize if target.device.type == "cuda" else lambda: None
    settle()
    began = time.perf_counter_ns()
    trace = work()
    settle()
    wall = time.perf_counter_ns() - began
    inside = sum(step.step_ns for step in trace.steps)
    return trace, {
        "steps": (inside + trace.prefill_ns + trace.start_ns) / wall,
        "forwards": sum(step.forward_ns for step in trace.steps) / inside,
    }


def waits(target: TorchTarget, work: Callable[[int], Trace], tokens: int) -> float | None:
    """Host-device waits a step: torch's own count of synchronising operations, and events waited for. None on a CPU.

    What a job of one token waits for, prefill and the copy of the evidence at the end, belongs to no step.
    """
    if target.device.type != "cuda":
        return None
    with counted_waits() as around:
        work(1)
    with counted_waits() as seen:
        steps = len(work(tokens).steps)
    return (len(seen) - len(around)) / steps


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Every wait of the host for the device, while inside."""
    import torch

    seen: list[str] = []
    plain = torch.cuda.Event.synchronize

    def counted(event: torch.cuda.Event) -> None:
        seen.append("event")
        plain(event)

    torch.cuda.Event.synchronize = counted  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield seen
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.Event.synchronize = plain  # type: ignore[method-assign]
    seen += ["operation" for one in caught if "synchronizing" in str(one.message)]

"""What a GPU does with dfbench's engines: one command, no network, under four minutes, one table and a JSON file.

    make gpu-check              or: python benchmarks/gpu_check.py [--json gpu-check.json]

Runs from a plain checkout with the machine's own torch (2.11 or newer) and transformers. In float32 every engine,
chain and tree must give the same tokens. Then a randomly initialised model of Qwen3-8B's exact shape in bf16, made on
the device (24 GB or more): AR in `cached` and `compiled` as a share of the measured read bandwidth, what verification
costs at 1 to 96 queries, the harness's own time and its host-device waits a step, peak memory. CUDA events are held
against a synchronised wall clock. Without a GPU it says so, claims nothing and exits 0; unequal tokens exit 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from dfbench.workers.engine import TorchTarget
    from dfbench.workers.loop import Trace

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "transformers", "numpy", "pyarrow", "psutil", "pynvml")
QWEN3_8B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    # Wide enough that a random model does not settle on one token.
    "initializer_range": 0.2,
}
GOALS = {"read_share": 0.80, "overhead": 0.03, "waits": 1.0}
"""What the reference rig should reach."""
DEVICE_BYTES = 23 * 10**9  # What a card of "24 GB" offers, at least.


@dataclass(frozen=True)
class Settings:
    """`shape`, `dtype` of the large model; `context`, `tokens` of its AR runs; `widths` and `samples` of the curve.

    `buckets`: widths of the compiled engine. `fused`: those of it under torch.compile, none leaves that out;
    `start_fused_s`: how far into the check it may still begin.
    """

    shape: Mapping[str, Any] = field(default_factory=lambda: QWEN3_8B)
    small: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    dtype: str = "bfloat16"
    context: int = 256
    tokens: int = 64
    rounds: int = 3
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 48, 64, 96)
    buckets: tuple[int, ...] = ()
    samples: int = 7
    fused: tuple[int, ...] = (1, 16, 96)
    start_fused_s: float = 120.0
    read_bytes: int | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print, write. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="file to write")
    given = parser.parse_args(arguments)
    if reason := why_not():
        print(f"gpu-check: {reason} Nothing was measured, and nothing is claimed.")
        return 0
    import_from_checkout()
    import torch

    device = torch.device("cuda:0")
    size = torch.cuda.get_device_properties(device).total_memory
    if size < DEVICE_BYTES:
        print(f"gpu-check: the GPU has {size / 1e9:.0f} GB, and Qwen3-8B in bf16 wants 24. Nothing was measured.")
        return 0
    found = measure(device, Settings())
    given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(table(found))
    print(f"written to {given.json}")
    return 0 if found["equality"]["unequal"] == [] else 1


def why_not() -> str | None:
    """A sentence saying why nothing can be measured here; None where it can."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"this Python has no {', '.join(missing)}."
    import torch

    if not torch.cuda.is_available():
        return f"no CUDA device is at hand (torch {torch.__version__})."
    return None


def import_from_checkout() -> None:
    """Make `dfbench` importable where it is not installed: the package maps the repository's folders."""
    if importlib.util.find_spec("dfbench") is not None:
        return
    package = Path(tempfile.mkdtemp(prefix="dfbench-")) / "dfbench"
    package.mkdir()
    for folder in ("cluster", "workers", "drafters", "analysis"):
        (package / folder).symlink_to(ROOT / folder)
    for file in (ROOT / "cluster" / "_root").iterdir():
        if file.suffix == ".py":
            (package / file.name).symlink_to(file)
    sys.path.insert(0, str(package.parent))


def measure(device: torch.device, settings: Settings) -> dict[str, Any]:
    """Everything, as JSON-ready data. Nothing is downloaded: models are made of random numbers."""
    import torch

    began = time.monotonic()
    found: dict[str, Any] = {"stack": stack(device), "equality": equality(device, settings)}
    model = make_model(settings.shape, settings.dtype, device)
    found["model"] = {"parameters": sum(weight.numel() for weight in model.parameters()), "dtype": settings.dtype}
    found["engines"] = {}
    for name, options in engines(settings, device):
        if name.endswith("torch.compile") and time.monotonic() - began > settings.start_fused_s:
            found["engines"][name] = {"skipped": "no time was left for it"}
            continue
        try:
            target = make_target(model, settings.dtype, **options)
            found["engines"][name] = engine(target, settings)
        except Exception as error:  # One engine that fails must not take the others' figures with it.
            if device.type != "cuda":
                raise
            found["engines"][name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        target = None  # type: ignore[assignment]
        if device.type == "cuda":
            torch.cuda.empty_cache()
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def engines(settings: Settings, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name → how the target is made."""
    # One length of buffers, and so one graph a width: all that follows fits it.
    room = settings.context + max(settings.tokens, *settings.widths)
    compiled = {"engine": "compiled", "buckets": settings.buckets, "options": {"context": room}}
    yield "cached", {"engine": "cached", "max_queries": max(settings.widths)}
    yield "compiled", compiled
    if settings.fused:
        yield (
            "compiled, torch.compile",
            {
                "engine": "compiled",
                "buckets": settings.fused,
                "options": {"context": room, "compile": True},
            },
        )


def stack(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, as the libraries themselves report them."""
    import torch
    import transformers

    from dfbench import __version__
    from dfbench.workers import provenance

    return {
        "dfbench": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        **provenance._commit(ROOT),
        **provenance._device(device),
    }


def make_model(shape: Mapping[str, Any], dtype: str, device: torch.device) -> Any:
    """A random Qwen3 of this shape, made on the device: no copy passes through the host."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return model.eval()


def make_target(model: Any, dtype: str, **settings: Any) -> TorchTarget:
    """An engine on a model that is loaded already."""
    from dfbench.workers.compiled import CompiledTarget
    from dfbench.workers.engine import TorchTarget
    from dfbench.workers.spec import TargetSpec

    spec = TargetSpec(model="random", dtype=dtype, **settings)
    return (CompiledTarget if spec.engine == "compiled" else TorchTarget)(model, spec)


# --- the same tokens ------------------------------------------------------------------------------------------------


def guesser(answer: Sequence[int], vocabulary: int, tree: bool) -> Any:
    """A drafter that drafts around a known answer, right and wrong, as chains or as trees."""
    from dfbench.drafters.base import Draft, Drafter, DrafterContext, Options

    class Guesser(Drafter):
        name = "guesser"
        done = 0

        def start(self, prompt: Sequence[int]) -> None:
            self.done = 0

        def propose(self, budget: int) -> Draft:
            dice = random.Random(self.done)
            nodes = min(dice.choice((0, 1, 3, 7, 15, 24)), budget)
            parents = [dice.randint(max(-1, node - 4), node - 1) if tree else node - 1 for node in range(nodes)]
            places = [self.done + depth - 1 for depth in Draft([0] * nodes, parents).depths()]
            tokens = [
                answer[at] if at < len(answer) and dice.random() < 0.8 else dice.randrange(vocabulary) for at in places
            ]
            return Draft(tokens, parents if tree else None)

        def observe(self, emitted: Sequence[int], verified: Any = None) -> None:
            self.done += len(emitted)

        def reset(self) -> None:
            self.done = 0

    return Guesser(Options(), DrafterContext(vocab_size=vocabulary))


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


def ids(count: int, vocabulary: int) -> list[int]:
    """Tokens of a prompt that means nothing."""
    dice = random.Random(7)
    return [dice.randrange(vocabulary) for _ in range(count)]


def run(target: TorchTarget, drafter: Any, prompt: Sequence[int], tokens: int) -> Trace:
    """One decode, of exactly `tokens` tokens."""
    from dfbench.workers.loop import decode

    target.top_k = drafter.top_k
    return decode(target, drafter, prompt, max_new_tokens=tokens)


# --- the figures ----------------------------------------------------------------------------------------------------


def engine(target: TorchTarget, settings: Settings) -> dict[str, Any]:
    """One engine on the large model."""
    import torch

    from dfbench.drafters.registry import create
    from dfbench.workers import calibrate, provenance

    cuda = target.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(target.device)
    prompt = ids(settings.context, target.vocab_size)
    ar = create("ar", {})
    run(target, ar, prompt, settings.tokens)  # Warms up.
    timed = [against_wall(target, lambda: run(target, ar, prompt, settings.tokens)) for _ in range(settings.rounds)]
    trace, clocks = min(timed, key=lambda pair: pair[0].decode_ns)
    facts = provenance.worker_facts(target)
    measured = calibrate.calibrate(
        target,
        provenance.record_facts(facts, "gpu-check"),
        calibrate.Settings(
            queries=settings.widths,
            contexts=(settings.context,),
            samples=settings.samples,
            read_samples=9,
            read_bytes=settings.read_bytes,
        ),
    )
    bandwidth = calibrate.bandwidth(measured)
    assert bandwidth is not None
    step_ns = trace.decode_ns / len(trace.steps)
    wide = guesser(trace.output, target.vocab_size, True)
    return {
        "ms_a_token": step_ns / 1e6,
        "read_gb_s": bandwidth.median / 1e9,
        "read_share": share(bytes_read(facts, settings), bandwidth.median, step_ns),
        "overhead": overhead(trace),
        "waits": {
            "AR": waits(target, lambda tokens: run(target, ar, prompt, tokens), settings.tokens),
            "trees": waits(target, lambda tokens: run(target, wide, prompt, tokens), settings.tokens),
        },
        "clocks": clocks,
        "verify_cost": {
            str(point.queries): {
                "ms": point.median_ns / 1e6,
                "ratio": point.ratio,
                "lo": point.ratio_lo,
                "hi": point.ratio_hi,
            }
            for point in calibrate.curve(measured)
        },
        "peak_bytes": torch.cuda.max_memory_allocated(target.device) if cuda else None,
        "built": target.engine_facts(),
    }


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


# --- the table ------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    """Everything on one page; goals beside what was reached."""
    versions, same = found["stack"], found["equality"]
    ended = {name: figures for name, figures in found["engines"].items() if "ms_a_token" in figures}
    lines = [
        f"{versions['device']}; torch {versions['torch']}, CUDA {versions.get('cuda')}, "
        f"driver {versions.get('driver')}, transformers {versions['transformers']}, dfbench {versions['dfbench']}",
        f"random weights, {found['model']['parameters'] / 1e9:.2f} billion in {found['model']['dtype']}; "
        f"{found['seconds']:.0f} s in all",
        f"float32: {same['compared'] - len(same['unequal'])} of {same['compared']} runs give the "
        f"{same['tokens']} tokens of AR ({same['distinct']} distinct)"
        + "".join(f"; UNEQUAL: {name}" for name in same["unequal"]),
        "",
        _row("", ended),
    ]
    for title, value in ROWS:
        lines.append(_row(title, [value(figures) for figures in ended.values()]))
    widths = sorted({int(width) for figures in ended.values() for width in figures["verify_cost"]})
    for width in widths:
        cells = [_cost(figures["verify_cost"].get(str(width))) for figures in ended.values()]
        lines.append(_row(f"pass of {width} queries", cells))
    for name, figures in found["engines"].items():
        if name not in ended:
            lines.append(f"{name}: not measured ({figures.get('skipped') or figures.get('failed')})")
    return "\n".join(lines)


ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("AR, ms a token", lambda f: f"{f['ms_a_token']:.2f}"),
    ("memory is read at, GB/s", lambda f: f"{f['read_gb_s']:.0f}"),
    ("share of read bandwidth (≥ 0.80)", lambda f: _judged(f["read_share"], GOALS["read_share"], ".2f", least=True)),
    ("harness overhead a step (≤ 3 %)", lambda f: _judged(f["overhead"], GOALS["overhead"], ".1%")),
    ("host-device waits a step, AR (1)", lambda f: _judged(f["waits"]["AR"], GOALS["waits"], ".2f")),
    ("host-device waits a step, trees", lambda f: _judged(f["waits"]["trees"], GOALS["waits"], ".2f")),
    ("forward time ÷ step time", lambda f: f"{f['clocks']['forwards']:.3f}"),
    ("step times ÷ wall clock", lambda f: f"{f['clocks']['steps']:.3f}"),
    ("peak memory, GB", lambda f: "–" if f["peak_bytes"] is None else f"{f['peak_bytes'] / 1e9:.1f}"),
    ("static buffers, GB", lambda f: _built(f, "static_bytes", 1e9, ".2f")),
    (
        "graphs, and seconds to record them",
        lambda f: f"{_built(f, 'graphs', 1, 'd')}, {_built(f, 'capture_s', 1, '.1f')}",
    ),
)


def _judged(value: float | None, goal: float, form: str, *, least: bool = False) -> str:
    if value is None:
        return "–"
    reached = value >= goal if least else value <= goal
    return f"{value:{form}} {'reached' if reached else 'missed'}"


def _built(figures: Mapping[str, Any], name: str, unit: float, form: str) -> str:
    value = figures["built"].get(name)
    return "–" if value is None else format(value if form == "d" else value / unit, form)


def _cost(point: Mapping[str, float] | None) -> str:
    return "–" if point is None else f"{point['ms']:.2f} ms  × {point['ratio']:.2f}"


def _row(title: str, cells: Any) -> str:
    return f"{title:36s}" + "".join(f"{cell:>26s}" for cell in cells)


if __name__ == "__main__":
    sys.exit(main())

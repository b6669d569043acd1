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
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_figures import engine, equality
from gpu_models import Settings, make_model, make_target
from gpu_table import table

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "transformers", "numpy", "pyarrow", "psutil", "pynvml")
DEVICE_BYTES = 23 * 10**9  # What a card of "24 GB" offers, at least.


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


if __name__ == "__main__":
    sys.exit(main())

"""Torch's own OpenMP threads, for loops that numba compiled: a pass with many phases, and barriers between them.

numba's parallel loops bring a pool of threads of their own. Threads of both wait actively for a while after their work,
and two pools on the same cores then take turns at standing in each other's way. So the function goes to torch's pool.
Where torch's OpenMP cannot be found, `find` says so and nothing runs.
"""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba import types

from dfbench.workers.vectors import Made, intrinsic

_NAMES = ("libgomp*", "libomp*", "libiomp5*")
_WANTED = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
_LOADED_ALREADY = 4  # dlopen's RTLD_NOLOAD, on Linux


class Team(NamedTuple):
    """Entry points of torch's OpenMP: `run` from Python, the others as addresses for compiled code."""

    run: Any
    barrier: int
    number: int
    size: int

    def start(self, function: int, words: int, threads: int) -> None:
        """Call the compiled `function` (of one address) on `threads` threads at once; returns when all have ended."""
        self.run(function, words, threads, 0)


@cache
def find() -> Team | None:
    """The OpenMP that torch has loaded; None where there is none of a kind that is known."""
    folder = Path(torch.__file__).parent / "lib"
    places = [str(place) for name in _NAMES for place in sorted(folder.glob(name))]
    for place in [*places, "libgomp.so.1", "libomp.so", "libiomp5.so"]:
        try:
            library = ctypes.CDLL(place, mode=_LOADED_ALREADY | ctypes.DEFAULT_MODE)
            run, *others = (getattr(library, name) for name in _WANTED)
        except (OSError, AttributeError):
            continue
        run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        run.restype = None
        barrier, number, size = (ctypes.cast(other, ctypes.c_void_p).value or 0 for other in others)
        return Team(run, barrier, number, size)
    return None


def digest(*modules: ModuleType) -> int:
    """A number of the modules' sources, not 0.

    numba looks at a function's own file alone to tell whether what it keeps on disk is out of date. A function that
    mentions this number of all files that it is made of is compiled anew whenever one of them changes.
    """
    sources = [Path(module.__file__ or "").read_bytes() for module in modules]
    return int(hashlib.sha256(b"".join(sources)).hexdigest()[:15], 16) + 1


@intrinsic
def wait(typing: Any, barrier: Any) -> Made:
    """Wait until all threads of the team are here. `barrier`: `Team.barrier`."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.inttoptr(given[0], kind.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.intp), make


@intrinsic
def asked(typing: Any, address: Any) -> Made:
    """What an OpenMP function without arguments answers: `Team.number` or `Team.size`."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        answer = builder.call(builder.inttoptr(given[0], kind.as_pointer()), [])
        return builder.sext(answer, ir.IntType(64))

    return types.intp(types.intp), make

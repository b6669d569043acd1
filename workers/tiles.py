"""Products of bfloat16 in a processor's tile registers (AMX): sixteen rows at the price of one, that of reading.

The weights are laid out once more, as the tiles take them: [outputs / 16, inputs / 2, 16, 2], so that each sixteen
outputs are one run of memory. Every number of a product is summed over its inputs in one order, whatever the number of
rows: a token's logits do not depend on the tokens beside it.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types

from dfbench.workers.pages import Pages
from dfbench.workers.vectors import Made, intrinsic, pairs_are_multiplied

SIDE, DEPTH = 16, 32
"""Rows and outputs of a tile of results; inputs of a tile of factors."""
MOST = 6
"""Tiles of rows that one reading of the weights serves: of eight registers, two hold the factors."""
_AHEAD = 4096
_ASK_FOR_TILES = (158, 0x1023, 18)  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
_WORD = ir.IntType(64)
_NOTHING = ir.VoidType()


@cache
def available() -> bool:
    """Whether this processor has tiles for bfloat16, and the system lets this process use them."""
    if platform.system() != "Linux" or platform.machine() != "x86_64" or not pairs_are_multiplied():
        return False
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile", False) and features.get("amx-bf16", False)):
        return False
    return bool(ctypes.CDLL(None).syscall(*_ASK_FOR_TILES) == 0)


def fit(weight: torch.Tensor) -> bool:
    """Whether a weight [outputs, inputs] is whole tiles."""
    outputs, inputs = weight.shape
    return weight.dtype == torch.bfloat16 and outputs % SIDE == 0 and inputs % DEPTH == 0


@torch.no_grad()
def tiled(weight: torch.Tensor, pages: Pages) -> torch.Tensor:
    """The weight once more, as the tiles take it."""
    outputs, inputs = weight.shape
    laid = pages.empty((outputs // SIDE, inputs // 2, SIDE, 2), weight.dtype)
    return laid.copy_(weight.view(outputs // SIDE, SIDE, inputs // 2, 2).permute(0, 2, 1, 3))


def configuration() -> np.ndarray:
    """What `configure` reads: eight registers of 16 rows of 64 bytes."""
    words = np.zeros(64, np.uint8)
    words[0] = 1
    words[16:32].view(np.uint16)[:] = 64
    words[48:56] = SIDE
    return words


@intrinsic
def configure(typing: Any, address: Any) -> Made:
    """Make this thread's tile registers ready. `address`: of a `configuration`."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        builder.asm(ir.FunctionType(_NOTHING, [_WORD]), "ldtilecfg ($0)", "r,~{memory}", list(given), True)
        return context.get_dummy_value()

    return types.void(types.intp), make


@intrinsic
def release(typing: Any) -> Made:
    """Give this thread's tile registers back: while they are held, every change of threads saves eight kilobytes."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        builder.asm(ir.FunctionType(_NOTHING, []), "tilerelease", "~{memory}", [], True)
        return context.get_dummy_value()

    return types.void(), make


def _block(tiles: int) -> Any:
    """For compiled code: sixteen outputs for up to `tiles` · 16 rows.

    Arguments: address of the outputs' weights; of the rows, and bytes from one row to the next; of the results, which
    are float32, and bytes from one row of them to the next; inputs / 32. Whole tiles of rows are read and written.
    """
    text = _loop(tiles)
    fixed = "{rdi},{rsi},{rdx},{rcx},{r8},{r9}"
    used = "".join(f",~{{{name}}}" for name in ("rax", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "flags"))

    def block(typing: Any, weight: Any, rows: Any, row: Any, out: Any, line: Any, steps: Any) -> Made:
        def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
            builder.asm(ir.FunctionType(_NOTHING, [_WORD] * 6), text, fixed + used, list(given), True)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), make

    return intrinsic(block)


def _loop(tiles: int) -> str:
    """Assembler: tile registers 0 … tiles − 1 add up results, 6 holds rows, 7 weights."""
    clear = [f"tilezero %tmm{at}" for at in range(tiles)]
    begin = ["mov %rdi, %r10", "mov %rsi, %r11", "mov %r9, %rax", "mov $$64, %r12"]
    begin += ["mov %rdx, %r14", "shl $$4, %r14", "mov %r8, %r15", "shl $$4, %r15"]
    ask = [f"prefetcht0 {_AHEAD + 64 * line}(%r10)" for line in range(SIDE)]
    step = ["tileloadd (%r10,%r12,1), %tmm7", "mov %r11, %r13"]
    for at in range(tiles):
        step += ["tileloadd (%r13,%rdx,1), %tmm6", f"tdpbf16ps %tmm7, %tmm6, %tmm{at}", "add %r14, %r13"]
    again = ["add $$1024, %r10", "add $$64, %r11", "dec %rax", "jnz 1b", "mov %rcx, %r13"]
    end = [part for at in range(tiles) for part in (f"tilestored %tmm{at}, (%r13,%r8,1)", "add %r15, %r13")]
    return "\n".join([*clear, *begin, "1:", *ask, *step, *again, *end])


one, two, three, four, five, six = (_block(tiles) for tiles in range(1, MOST + 1))

"""Vectors as values in numba's code, so that a loop keeps them in registers and sums in one order.

numba leaves vectors to LLVM, which may sum a loop in another order for every shape of it. What is summed by these is
summed in the same order whatever else the loop does: a row of a pass comes out the same bits however wide the pass is.
Addresses are plain integers. Where a machine has no vectors of sixteen, LLVM splits them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba import extending, types
from numba.core import cgutils as untyped
from numba.extending import models, register_model

LANES = 16

cgutils: Any = untyped
_FLOAT, _WORD, _HALF, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)
_FLOATS, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_WORD, LANES)
_FOUR: Any = types.UniTuple(types.float32, 4)  # type: ignore[no-untyped-call]
_NONE = ir.Constant(_FLOATS, ir.Undefined)

Made = tuple[Any, Callable[..., Any]]


def intrinsic(make: Callable[..., Made]) -> Any:
    """numba's decorator, for type checkers: what compiled code calls has not the arguments of what makes it."""
    return extending.intrinsic(make)


def pointer_to(kind: Any) -> Any:
    """A function for compiled code: an address as a pointer to values of a type."""

    target: Any = types.CPointer(kind)  # type: ignore[no-untyped-call]

    def pointer(typing: Any, address: Any) -> Made:
        def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
            return builder.inttoptr(given[0], context.get_value_type(target))

        return target(types.intp), make

    return intrinsic(pointer)


halves_at = pointer_to(types.uint16)
floats_at = pointer_to(types.float32)
words_at = pointer_to(types.int64)
bytes_at = pointer_to(types.uint8)


class Floats(types.Type):
    """The type of sixteen float32 numbers."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


class Pairs(types.Type):
    """The type of 32 bfloat16 numbers, sixteen pairs of neighbours."""

    def __init__(self) -> None:
        super().__init__(name="bfloat16x32")


floats, pairs = Floats(), Pairs()


@register_model(Floats)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)  # type: ignore[no-untyped-call]


@register_model(Pairs)
class _PairsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _WORDS)  # type: ignore[no-untyped-call]


def pairs_are_multiplied() -> bool:
    """Whether this processor multiplies bfloat16 numbers as they are (AVX512-BF16), for `paired`."""
    if not binding.get_host_cpu_features().get("avx512bf16", False):
        return False
    binding.initialize_native_asmparser()
    return True


@intrinsic
def zeros(typing: Any) -> Made:
    """Sixteen zeros."""
    return floats(), lambda *_: ir.Constant(_FLOATS, [0.0] * LANES)


@intrinsic
def splat(typing: Any, number: Any) -> Made:
    """One number sixteen times."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        first = builder.insert_element(_NONE, given[0], _WORD(0))
        return _shuffled(builder, first, _NONE, [0] * LANES)

    return floats(types.float32), make


def _load_as(held: Any, found: Any, align: int) -> Any:
    """A function for compiled code: what lies at an address, as it is."""

    def load(typing: Any, address: Any) -> Made:
        def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
            return builder.load(_pointer(builder, given[0], held), align=align)

        return found(types.intp), make

    return intrinsic(load)


load = _load_as(_FLOATS, floats, 4)
"""The sixteen float32 at an address."""
load_pairs = _load_as(_WORDS, pairs, 2)
"""The 32 bfloat16 at an address."""


@intrinsic
def load_halves(typing: Any, address: Any) -> Made:
    """The sixteen bfloat16 at an address, widened."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        halves = builder.load(_pointer(builder, given[0], ir.VectorType(_HALF, LANES)), align=2)
        high = builder.shl(builder.zext(halves, _WORDS), ir.Constant(_WORDS, [16] * LANES))
        return builder.bitcast(high, _FLOATS)

    return floats(types.intp), make


@intrinsic
def paired(typing: Any, one: Any, other: Any, added: Any) -> Made:
    """The products of 32 numbers, both of a pair added to a float32. Only where `pairs_are_multiplied`."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS, _WORDS])
        return builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [given[2], given[0], given[1]], False)

    return floats(pairs, pairs, floats), make


@intrinsic
def store(typing: Any, address: Any, numbers: Any) -> Made:
    """Put sixteen float32 at an address."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        builder.store(given[1], _pointer(builder, given[0], _FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, floats), make


@intrinsic
def fused(typing: Any, one: Any, other: Any, added: Any) -> Made:
    """one · other + added, rounded once where the machine can."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fmuladd.v16f32"), given)

    return floats(floats, floats, floats), make


@intrinsic
def larger(typing: Any, one: Any, other: Any) -> Made:
    """The larger of each two numbers; `other` where one is NaN."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", given[0], given[1]), given[0], given[1])

    return floats(floats, floats), make


@intrinsic
def sums(typing: Any, a: Any, b: Any, c: Any, d: Any) -> Made:
    """The sums of four vectors' numbers: halves onto each other, four times."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        a, b, c, d = given
        eights = [_added(builder, one, other, _halves(8, 0), _halves(8, 1)) for one, other in ((a, b), (c, d))]
        fours = _added(builder, eights[0], eights[1], _halves(4, 0), _halves(4, 1))
        for step in (2, 1):
            crossed = _shuffled(builder, fours, _NONE, [at ^ step for at in range(LANES)])
            fours = builder.fadd(fours, crossed)
        found = [builder.extract_element(fours, _WORD(4 * at)) for at in range(4)]
        return context.make_tuple(builder, _FOUR, found)

    return _FOUR(floats, floats, floats, floats), make


@intrinsic
def store_four(typing: Any, address: Any, numbers: Any) -> Made:
    """Put what `sums` found at an address, one after the other."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        return _stored_four(context, builder, given, lambda numbers: numbers)

    return types.void(types.intp, _FOUR), make


@intrinsic
def store_four_halves(typing: Any, address: Any, numbers: Any) -> Made:
    """The same, each rounded to bfloat16."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        return _stored_four(context, builder, given, lambda numbers: _rounded(builder, numbers, 4))

    return types.void(types.intp, _FOUR), make


@intrinsic
def store_halves(typing: Any, address: Any, numbers: Any) -> Made:
    """Put sixteen numbers at an address, each rounded to bfloat16."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        halves = _rounded(builder, given[1], LANES)
        builder.store(halves, _pointer(builder, given[0], halves.type), align=2)
        return context.get_dummy_value()

    return types.void(types.intp, floats), make


@intrinsic
def prefetch(typing: Any, address: Any) -> Made:
    """Ask for the memory at an address, which may lie anywhere, ahead of its use."""

    def make(context: Any, builder: Any, _: Any, given: Any) -> Any:
        pointer = _BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _WORD, _WORD, _WORD])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(call, [_pointer(builder, given[0], _BYTE), _WORD(0), _WORD(3), _WORD(1)])
        return context.get_dummy_value()

    return types.void(types.intp), make


def _stored_four(context: Any, builder: Any, given: Any, change: Callable[[Any], Any]) -> Any:
    numbers = ir.Constant(ir.VectorType(_FLOAT, 4), ir.Undefined)
    for at in range(4):
        numbers = builder.insert_element(numbers, builder.extract_value(given[1], at), _WORD(at))
    changed = change(numbers)
    builder.store(changed, _pointer(builder, given[0], changed.type), align=2)
    return context.get_dummy_value()


def _rounded(builder: Any, numbers: Any, count: int) -> Any:
    """float32 → the 16 bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    words = ir.VectorType(_WORD, count)
    half, one, sixteen, nan = (ir.Constant(words, [number] * count) for number in (0x7FFF, 1, 16, 0x7FC0))
    bits = builder.bitcast(numbers, words)
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    nearest = builder.lshr(builder.add(builder.add(bits, half), odd), sixteen)
    found = builder.select(builder.fcmp_unordered("uno", numbers, numbers), nan, nearest)
    return builder.trunc(found, ir.VectorType(_HALF, count))


def _halves(size: int, which: int) -> list[int]:
    """Of two vectors that consist of blocks of 2 · `size`: the first or the second half of every block."""
    return [at for at in range(2 * LANES) if at // size % 2 == which]


def _added(builder: Any, one: Any, other: Any, left: Sequence[int], right: Sequence[int]) -> Any:
    return builder.fadd(_shuffled(builder, one, other, left), _shuffled(builder, one, other, right))


def _shuffled(builder: Any, one: Any, other: Any, order: Sequence[int]) -> Any:
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_WORD, len(order)), list(order)))


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())

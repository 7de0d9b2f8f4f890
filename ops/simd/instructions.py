"""How an instruction of the SIMD language is made: LLVM code behind a Python name that numba kernels can call.

    @instruction(F32x16, F32x16, F32x16)
    def add(b, x, y):
        return b.fadd(x, y)

`add` takes two vectors of 16 float32 and gives one. LLVM lowers a vector of 16 to what the machine has: one AVX-512
register, two of AVX2, four of NEON. An operand `ELEMENT` is a witness: it has no value, its numba type says which kind
of elements a kernel was compiled for (`elements`), and numba compiles each kernel once for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.types.misc import unliteral
from numba.extending import intrinsic, models, register_model

Value: TypeAlias = Any
"""An LLVM value; llvmlite has no type annotations."""
Builder: TypeAlias = Any
Function = TypeVar("Function", bound=Callable[..., Any])

LANES: Final = 16

f32: Final = ir.FloatType()
f64: Final = ir.DoubleType()
i1: Final = ir.IntType(1)
i8: Final = ir.IntType(8)
i16: Final = ir.IntType(16)
i32: Final = ir.IntType(32)
i64: Final = ir.IntType(64)
f32x16: Final = ir.VectorType(f32, LANES)
i32x16: Final = ir.VectorType(i32, LANES)
i16x16: Final = ir.VectorType(i16, LANES)
i8x16: Final = ir.VectorType(i8, LANES)


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


bf16: Final = _BFloat()


class _Vector(types.Type):
    """The numba type of a vector register."""

    def __init__(self, name: str, lanes: Any) -> None:
        self.lanes = lanes
        super().__init__(name=name)


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: _Vector) -> None:
        super().__init__(manager, vector, vector.lanes)


F32x16: Final = _Vector("F32x16", f32x16)
ADDRESS: Final = types.int64
"""Of a byte in memory."""
INT: Final = types.int64
FLOAT: Final = types.float32
DOUBLE: Final = types.float64
BOOL: Final = types.boolean
NOTHING: Final = types.none


class _Witness:
    """Stands for "an element type" among the operands of an instruction."""


ELEMENT: Final = _Witness()

KERNEL_OPTIONS: Final[dict[str, Any]] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": False,
    "no_cfunc_wrapper": True,
}
KERNELS: Final[list[Callable[..., Any]]] = []
"""All kernels that were defined."""


def kernel(function: Function) -> Function:
    """A function that is compiled into the kernels that call it. Without fast-math: sums keep the order they have.

    numba would compile it once more for each constant that it is called with: `product_phase` for four numbers of a
    phase, `claim` for 14, a third of all work. It is told the types alone.
    """
    compiled: Any = numba.njit(function, **KERNEL_OPTIONS)
    template_of = compiled.get_call_template

    def by_types_alone(arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        return template_of(
            tuple(unliteral(kind) for kind in arguments),
            {name: unliteral(kind) for name, kind in named.items()},
        )

    compiled.get_call_template = by_types_alone
    KERNELS.append(compiled)
    return compiled  # type: ignore[no-any-return]


def part(function: Function) -> Function:
    """A kernel whose text becomes its caller's. By itself LLVM would optimize what it calls, and make machine code of
    all that, once more on the way up to the program."""
    inlined: Function = numba.njit(function, inline="always", **KERNEL_OPTIONS)
    return inlined


def instruction(result: Any, *operands: Any) -> Callable[[Callable[..., Value]], Callable[..., Any]]:
    """Make `emit(builder, *values)`, which emits LLVM code, callable from kernels. For an `ELEMENT` it is given the
    element's numba type."""
    witnesses = [operand is ELEMENT for operand in operands]

    def decorate(emit: Callable[..., Value]) -> Callable[..., Any]:
        def typed(context: object, *given: Any) -> Any:
            signature = result(
                *(kind if witness else operand for kind, witness, operand in zip(given, witnesses, operands))
            )

            def lower(context: object, builder: Builder, signature: object, values: list[Value]) -> Value:
                pairs = zip(given, witnesses, values)
                emitted = emit(builder, *(kind if witness else value for kind, witness, value in pairs))
                return cgutils.get_null_value(ir.LiteralStructType([])) if emitted is None else emitted

            return signature, lower

        # numba asks for the operands by name.
        names = ["context", *(f"operand_{at}" for at in range(len(operands)))]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        typed.__name__ = emit.__name__
        typed.__doc__ = emit.__doc__
        made: Callable[..., Any] = intrinsic(typed)
        return made

    return decorate


# ---------------------------------------------------------------------------------------------------------------
# Small words for emitting


def const(value: int) -> Value:
    return ir.Constant(i64, value)


def every_lane(value: float) -> Value:
    """A constant vector; the value is rounded to float32 first, as LLVM wants it."""
    return ir.Constant(f32x16, [float(np.float32(value))] * LANES)


def every_int(value: int) -> Value:
    return ir.Constant(i32x16, [value] * LANES)


def call(b: Builder, name: str, result: Any, arguments: list[Value], flags: tuple[str, ...] = ()) -> Value:
    """Call an LLVM intrinsic, or a function of the C library."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments, fastmath=flags)


def load_from(b: Builder, address: Value, kind: Any, align: int = 1) -> Value:
    loaded = b.load(b.inttoptr(address, kind.as_pointer()))
    loaded.align = align
    return loaded


def store_to(b: Builder, address: Value, value: Value, align: int = 1) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = align


def offset(b: Builder, address: Value, size_bytes: int) -> Value:
    return b.add(address, const(size_bytes)) if size_bytes else address


def spread(b: Builder, scalar: Value) -> Value:
    """The scalar in all lanes."""
    kind = ir.VectorType(scalar.type, LANES)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(i32, 0))
    return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(i32x16, [0] * LANES))


def shuffled(b: Builder, vector: Value, lanes: list[int]) -> Value:
    """A vector whose lane i is lane `lanes[i]`."""
    return b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), ir.Constant(i32x16, lanes))


def fused(b: Builder, x: Value, y: Value, z: Value) -> Value:
    return call(b, "llvm.fma.v16f32", f32x16, [x, y, z])


def loop(b: Builder, count: Value, carried: list[Value], body: Callable[[Value, list[Value]], list[Value]]) -> Any:
    """Emit `body(i, carried)` for i in 0 .. count - 1 (count > 0) → what is carried after the last turn."""
    before = b.block
    turn, after = b.append_basic_block("turn"), b.append_basic_block("after")
    b.branch(turn)
    b.position_at_end(turn)
    i = b.phi(i64)
    i.add_incoming(const(0), before)
    phis = [b.phi(value.type) for value in carried]
    for phi, value in zip(phis, carried):
        phi.add_incoming(value, before)
    results = body(i, phis)
    following = b.add(i, const(1))
    last = b.block
    i.add_incoming(following, last)
    for phi, value in zip(phis, results):
        phi.add_incoming(value, last)
    b.cbranch(b.icmp_signed("<", following, count), turn, after)
    b.position_at_end(after)
    return results


def by_case(b: Builder, value: Value, cases: Sequence[int], emit: Callable[[int], None]) -> None:
    """Emit code for each number that `value` may be; it is one of `cases`."""
    after = b.append_basic_block("after_cases")
    blocks = [b.append_basic_block(f"case_{case}") for case in cases]
    choice = b.switch(value, blocks[-1])
    for case, block in zip(cases[:-1], blocks):
        choice.add_case(const(case), block)
    for case, block in zip(cases, blocks):
        b.position_at_end(block)
        emit(case)
        b.branch(after)
    b.position_at_end(after)

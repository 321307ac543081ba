"""A thin hand on LLVM: vectors, loops and addresses, for the few lines that numba makes slow.

Vectors are as wide as the CPU that compiles: 16 numbers with AVX-512, 8 elsewhere, where LLVM makes
two of them out of one if it must.  Only AVX2's instructions have been run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()

_FEATURES = {name for name, there in binding.get_host_cpu_features().items() if there}
LANES = 16 if {"avx512f", "avx512bw", "avx512vl"} <= _FEATURES else 8

Value = Any  # llvmlite's values have no useful types
Body = Callable[[Value, list[Value]], list[Value]]


class Emitter:
    """Writes instructions where numba's builder stands. Addresses are 64-bit integers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def i64(self, value: int) -> Value:
        return ir.Constant(I64, value)

    def at(self, base: Value, *terms: Value | int) -> Value:
        """base plus terms, integers of Python or of LLVM."""
        for term in terms:
            if not isinstance(term, int):
                base = self.builder.add(base, term)
            elif term:
                base = self.builder.add(base, self.i64(term))
        return base

    def times(self, value: Value, factor: Value | int) -> Value:
        factor = self.i64(factor) if isinstance(factor, int) else factor
        return self.builder.mul(value, factor)

    def load(self, address: Value, kind: Any, align: int = 1) -> Value:
        value = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        value.align = align
        return value

    def store(self, value: Value, address: Value, align: int = 1) -> None:
        place = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, place).align = align

    def fetch(self, address: Value) -> None:
        """Bring the cache line at an address nearer; one that isn't there does no harm."""
        place = self.builder.inttoptr(address, I8.as_pointer())
        self.called("llvm.prefetch.p0i8", ir.VoidType(), place, I32(0), I32(3), I32(1))

    def vector(self, kind: Any, lanes: int = LANES) -> Any:
        return ir.VectorType(kind, lanes)

    def zeros(self, kind: Any) -> Value:
        return ir.Constant(kind, None)

    def splat(self, value: Value, lanes: int = LANES) -> Value:
        """One number in all lanes."""
        kind = self.vector(value.type, lanes)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        places = ir.Constant(self.vector(I32, lanes), None)
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), places)

    def part(self, vector: Value, begin: int, count: int) -> Value:
        """Lanes begin .. begin + count."""
        places = ir.Constant(self.vector(I32, count), list(range(begin, begin + count)))
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), places)

    def twice(self, vector: Value, begin: int, count: int) -> Value:
        """Lanes begin .. begin + count, each two times in a row."""
        places = [begin + at // 2 for at in range(2 * count)]
        places = ir.Constant(self.vector(I32, 2 * count), places)
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), places)

    def called(self, name: str, result: Any, *args: Value) -> Value:
        """What the LLVM intrinsic or C function `name` gives."""
        kind = ir.FunctionType(result, [arg.type for arg in args])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, args)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c in vectors of float32."""
        return self.called(f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)

    def total(self, vector: Value) -> Value:
        """The sum of all lanes of a vector of float32, by halves."""
        lanes = vector.type.count
        while lanes > 1:
            lanes //= 2
            halves = self.part(vector, 0, lanes), self.part(vector, lanes, lanes)
            vector = self.builder.fadd(*halves)
        return self.builder.extract_element(vector, I32(0))

    def larger(self, a: Value, b: Value) -> Value:
        """The larger of two vectors of float32 or numbers; b where a is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def largest(self, vector: Value) -> Value:
        """The largest of all lanes of a vector of float32, none of which is NaN."""
        lanes = vector.type.count
        while lanes > 1:
            lanes //= 2
            vector = self.larger(self.part(vector, 0, lanes), self.part(vector, lanes, lanes))
        return self.builder.extract_element(vector, I32(0))

    def totals(self, four: Sequence[Value]) -> Value:
        """The sums of all lanes of four vectors of float32, as float32[4]; each is added up in the
        same order, whatever the others are."""
        while four[0].type.count > 8:
            lanes = four[0].type.count // 2
            parts = [(self.part(some, 0, lanes), self.part(some, lanes, lanes)) for some in four]
            four = [self.builder.fadd(*both) for both in parts]
        a, b, c, d = four
        low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
        ab, cd = (self._added_lanes(*both, low, high) for both in ((a, b), (c, d)))
        sums = self._added_lanes(ab, cd, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
        return self.builder.fadd(self.part(sums, 0, 4), self.part(sums, 4, 4))

    def _added_lanes(self, a: Value, b: Value, first: list[int], second: list[int]) -> Value:
        """Lanes of a and b, which are 8 each, that two lists name, added."""
        kind = self.vector(I32, 8)
        return self.builder.fadd(
            *(
                self.builder.shuffle_vector(a, b, ir.Constant(kind, lanes))
                for lanes in (first, second)
            )
        )

    def pairs_product(self, a: Value, b: Value) -> Value:
        """int32[L] of int16[2L] twice: a[2i] * b[2i] + a[2i + 1] * b[2i + 1]."""
        lanes = a.type.count // 2
        wide = self.vector(I32, lanes)
        if lanes == 16 and LANES == 16:
            return self.called("llvm.x86.avx512.pmaddw.d.512", wide, a, b)
        if lanes == 8 and "avx2" in _FEATURES:
            return self.called("llvm.x86.avx2.pmadd.wd", wide, a, b)
        long = self.vector(I32, 2 * lanes)
        product = self.builder.mul(self.builder.sext(a, long), self.builder.sext(b, long))
        undefined = ir.Constant(long, ir.Undefined)
        even, odd = (
            self.builder.shuffle_vector(
                product, undefined, ir.Constant(wide, list(range(first, 2 * lanes, 2)))
            )
            for first in (0, 1)
        )
        return self.builder.add(even, odd)

    def loop(self, count: Value, carried: Sequence[Value], body: Body) -> list[Value]:
        """Run body(index, carried) -> carried for each index below `count`, which is above 0."""
        builder, before = self.builder, self.builder.block
        inside = builder.append_basic_block("inside")
        after = builder.append_basic_block("after")
        builder.branch(inside)
        builder.position_at_end(inside)
        index = builder.phi(I64)
        index.add_incoming(self.i64(0), before)
        held = []
        for value in carried:
            place = builder.phi(value.type)
            place.add_incoming(value, before)
            held.append(place)
        given = body(index, list(held))
        following = builder.add(index, self.i64(1))
        index.add_incoming(following, builder.block)
        for place, value in zip(held, given, strict=True):
            place.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
        builder.position_at_end(after)
        return given


def emitted(count: int, write: Callable[..., None]) -> Any:
    """A function for kernels of `count` integers, whose instructions `write(emitter, *args)` gives;
    its result is None."""

    def typed(typing_context: Any, given: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            packed = args[0]
            write(Emitter(builder), *(builder.extract_value(packed, at) for at in range(count)))
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.intp, count)), generate

    return intrinsic(typed)

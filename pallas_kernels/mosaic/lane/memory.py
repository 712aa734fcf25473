"""Memory as a lane sees it: pointers, barriers, copies, and matrices that a warp moves."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import vector

from pallas_kernels.mosaic.lane.instructions import act, asm
from pallas_kernels.mosaic.lane.numbers import (
    Bool,
    Float,
    Int,
    arith,
    f32,
    i32,
    int_value,
    ir,
    llvm,
    total,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Pointer:
    """A pointer to memory; offsets are in bytes."""

    value: Any
    # Of a kernel's argument: the reference, and Mosaic's context of the launch, for `copy_box`.
    array: tuple[Any, Any] | None = None

    @classmethod
    def to(cls, ref: Any, context: Any = None) -> "Pointer":
        """The beginning of a reference."""
        return cls(mgpu.utils.memref_ptr(ref), None if context is None else (ref, context))

    @classmethod
    def choose(cls, condition: Bool, a: "Pointer", b: "Pointer") -> "Pointer":
        return cls(arith.select(condition.value, a.value, b.value))

    def at(self, *offsets: Int | int) -> "Pointer":
        """The pointer some bytes on; offsets are added with 64 bits."""
        value = self.value
        byte = ir.IntegerType.get_signless(8)
        for offset in offsets:
            if isinstance(offset, int) and offset == 0:
                continue
            wide = arith.extsi(ir.IntegerType.get_signless(64), int_value(offset))
            value = llvm.getelementptr(
                value.type, value, [wide], [-(2**31)], byte, llvm.GEPNoWrapFlags.none
            )
        return Pointer(value)

    def times(self, index: Int, size: Int | int) -> "Pointer":
        """The pointer ``index * size`` bytes on, multiplied with 64 bits."""
        i64 = ir.IntegerType.get_signless(64)
        wide = arith.muli(*(arith.extsi(i64, int_value(x)) for x in (index, size)))
        byte = ir.IntegerType.get_signless(8)
        value = llvm.getelementptr(
            self.value.type, self.value, [wide], [-(2**31)], byte, llvm.GEPNoWrapFlags.none
        )
        return Pointer(value)

    def words(self, count: int) -> list[Int]:
        """Loads 32-bit words, aligned to the whole load, at most 16 bytes at a time."""
        out: list[Int] = []
        while count > len(out):
            width = min(4, count - len(out))
            kind = ir.VectorType.get((width,), i32())
            loaded = llvm.load(kind, self.at(4 * len(out)).value, alignment=4 * width)
            out += [Int(llvm.extractelement(loaded, int_value(i))) for i in range(width)]
        return out

    def words_once(self, count: int, condition: Bool) -> list[Int]:
        """Loads two or four words of global memory that nobody reads again, at once.

        The load stays in its place among other such loads. Without `condition` the words are
        anything.
        """
        names = ", ".join(f"${i}" for i in range(count))
        text = (
            f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; "
            f"@p ld.global.nc.L1::no_allocate.v{count}.b32 {{{names}}}, [${count}]; }}"
        )
        bit = condition.where(Int(int_value(1)), 0)
        constraints = ",".join(["=r"] * count + ["l", "r"])
        result = llvm.StructType.get_literal([i32()] * count)
        out = asm(result, [self.address(), bit.value], text, constraints, effects=True)
        return [Int(llvm.extractvalue(i32(), out, [i])) for i in range(count)]

    def words_of_others(self) -> list[Int]:
        """Loads four words of global memory, aligned to all, that another program has stored."""
        text = "ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$4];"
        kind = llvm.StructType.get_literal([i32()] * 4)
        out = asm(kind, [self.address()], text, "=r,=r,=r,=r,l", effects=True)
        return [Int(llvm.extractvalue(i32(), out, [i])) for i in range(4)]

    def word(self) -> Int:
        return self.words(1)[0]

    def float(self) -> Float:
        return Float(llvm.load(f32(), self.value, alignment=4))

    def floats(self) -> list[Float]:
        """Loads four float32 at once, aligned to all of them."""
        return [x.as_float() for x in self.words(4)]

    def byte(self) -> Int:
        """Loads 8 bits, the rest 0."""
        return self._narrow(8)

    def half(self) -> Int:
        """Loads 16 bits, the rest 0."""
        return self._narrow(16)

    def _narrow(self, bits: int) -> Int:
        kind = ir.IntegerType.get_signless(bits)
        return Int(arith.extui(i32(), llvm.load(kind, self.value, alignment=bits // 8)))

    def store(self, x: Int | Float) -> None:
        llvm.store(x.value, self.value, alignment=4)

    def store_words(self, words: Sequence[Int]) -> None:
        """Stores two or four words at once, aligned to all of them."""
        kind = ir.VectorType.get((len(words),), i32())
        together = vector.from_elements(kind, [w.value for w in words])
        llvm.store(together, self.value, alignment=4 * len(words))

    def store_as(self, x: Float, dtype: str) -> None:
        """Stores a float32, rounded to ``"float32"``, ``"bfloat16"`` or ``"float16"``."""
        kinds = {"bfloat16": ir.BF16Type, "float16": ir.F16Type}
        if dtype == "float32":
            self.store(x)
            return
        rounded = arith.truncf(kinds[dtype].get(), x.value)
        llvm.store(rounded, self.value, alignment=2)

    def store_low(self, x: Int, bits: int) -> None:
        """Stores the lower 8 or 16 bits."""
        narrow = arith.trunci(ir.IntegerType.get_signless(bits), x.value)
        llvm.store(narrow, self.value, alignment=bits // 8)

    def add(self, x: Int) -> None:
        """Adds to a word of global memory, atomically."""
        act("red.global.add.u32 [$0], $1;", self.address(), x.value, constraints="l,r")

    def address(self) -> Any:
        """As an integer: 32 bits in shared memory, 64 in global memory."""
        is_shared = "3" in str(self.value.type)
        kind = ir.IntegerType.get_signless(32 if is_shared else 64)
        return llvm.ptrtoint(kind, self.value)


@dataclasses.dataclass(frozen=True, eq=False)
class ClusterPointer:
    """A pointer to shared memory of a program of the cluster."""

    value: Any

    @classmethod
    def of(cls, pointer: Pointer, rank: int) -> "ClusterPointer":
        """Where program `rank` has what `pointer` points to in this one."""
        text = f"mapa.shared::cluster.u32 $0, $1, {rank};"
        return cls(asm(i32(), [pointer.address()], text, "=r,r", effects=False))

    def at(self, *offsets: Int | int) -> "ClusterPointer":
        return ClusterPointer(total([Int(self.value), *offsets]).value)

    def float(self) -> Float:
        return Float(asm(f32(), [self.value], "ld.shared::cluster.f32 $0, [$1];", "=f,r", True))

    def floats(self) -> list[Float]:
        kind = llvm.StructType.get_literal([f32()] * 4)
        text = "ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [$4];"
        out = asm(kind, [self.value], text, "=f,=f,=f,=f,r", True)
        return [Float(llvm.extractvalue(f32(), out, [i])) for i in range(4)]


def cluster_barrier() -> None:
    """Waits for all threads of the cluster, and for what they wrote to shared memory."""
    arrive_at_cluster()
    wait_for_cluster()


def arrive_at_cluster() -> None:
    """The first half of a `cluster_barrier`."""
    act("barrier.cluster.arrive.release.aligned;")


def wait_for_cluster() -> None:
    """The second half of a `cluster_barrier`."""
    act("barrier.cluster.wait.acquire.aligned;")


def init_barrier(barrier: Pointer, arrivals: int = 1) -> None:
    """Prepares eight bytes of shared memory as a barrier on which `arrivals` lanes arrive."""
    act(f"mbarrier.init.shared.b64 [$0], {arrivals};", barrier.address(), constraints="r")


def has_bulk_copies() -> bool:
    """Whether the GPU that this is lowered for has bulk copies and what came with them (Hopper)."""
    return bool(mgpu.utils.get_arch().major >= 9)


def publish_barriers() -> None:
    """Lets the copy engine see new barriers; without the engine a warp's barrier is enough."""
    if has_bulk_copies():
        act("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;")


def publish_stores() -> None:
    """Orders this lane's stores to shared memory before later copies to the same place."""
    if has_bulk_copies():
        act("fence.proxy.async.shared::cta;")


def publish_global_stores() -> None:
    """Orders stores of a warp to global memory before copies from there that it starts later."""
    act("fence.acq_rel.gpu;")
    if has_bulk_copies():
        act("fence.proxy.async.global;")
    act("bar.warp.sync 0xffffffff;")


def release(word: Pointer) -> None:
    """Adds 1 to a word of global memory, after all stores that this lane knows of."""
    act("red.release.gpu.global.add.u32 [$0], 1;", word.address(), constraints="l")


def acquire(word: Pointer) -> None:
    """Waits until a word of global memory is not 0, and knows what was stored before `release`."""
    text = (
        "{ .reg .pred none; .reg .b32 x; again: ld.acquire.gpu.global.b32 x, [$0]; "
        "setp.eq.u32 none, x, 0; @none bra again; }"
    )
    act(text, word.address(), constraints="l")


def expect_bytes(barrier: Pointer, size: Int | int) -> None:
    """Arrives, and lets `barrier` wait for copies of this many bytes."""
    text = "mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;"
    act(text, barrier.address(), int_value(size), constraints="r,r")


def arrive(barrier: Pointer) -> None:
    """Arrives, after all that this lane did before."""
    text = "mbarrier.arrive.release.cta.shared.b64 _, [$0];"
    act(text, barrier.address(), constraints="r")


def copy(source: Pointer, target: Pointer, size: Int | int, barrier: Pointer) -> None:
    """Copies into shared memory by the copy engine; addresses and size: multiples of 16 bytes."""
    act(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $3, [$2];",
        target.address(),
        source.address(),
        barrier.address(),
        int_value(size),
        constraints="r,l,r,r",
    )


def copy_box(source: Pointer, column: Int, rows: int, target: Pointer, barrier: Pointer) -> None:
    """Copies 128 columns of bytes from `column` on of an argument's first rows, by the copy engine.

    `source` is an argument ``[M, K]`` of 8-bit numbers, `K` a multiple of 16; past its ends there
    are zeros. `target` is ``[rows, 128]`` at a multiple of 1,024, whose 16-byte chunks are
    permuted: chunk `c` of row `n` goes where ``c ^ n % 8`` would be. One lane calls it.
    """
    assert source.array is not None
    ref, context = source.array
    shared = ir.Attribute.parse("#gpu.address_space<workgroup>")
    kind = ir.MemRefType.get((rows, 128), ir.MemRefType(ref.type).element_type, None, shared)
    first, zero = arith.index_cast(ir.IndexType.get(), column.value), int_value(0)
    context.async_copy(
        src_ref=ref,
        dst_ref=mgpu.utils.ptr_as_memref(target.value, kind),
        gmem_slice=(slice(0, rows), mgpu.ds(first, 128)),
        barrier=mgpu.utils.BarrierRef(barrier.value, zero, zero, 1),
        swizzle=128,
        arrive=False,
        predicate=None,
    )


def copy_words(source: Pointer, target: Pointer, condition: Bool) -> None:
    """Copies 16 bytes into shared memory, by this lane; zeros if `condition` does not hold."""
    act(
        "cp.async.cg.shared.global [$0], [$1], 16, $2;",
        target.address(),
        source.address(),
        condition.where(Int(int_value(16)), 0).value,
        constraints="r,l,r",
    )


def prefetch(source: Pointer) -> None:
    """Prefetches 128 bytes of global memory into the L2 cache."""
    act("prefetch.global.L2 [$0];", source.address(), constraints="l")


def commit_copies() -> None:
    """Makes a group of this lane's `copy_words` since the last group."""
    act("cp.async.commit_group;")


def wait_for_copies(most: int) -> None:
    """Waits until at most `most` of this lane's groups of copies are unfinished."""
    act(f"cp.async.wait_group {most};")


def arrive_after_copies(barrier: Pointer) -> None:
    """Arrives once all of this lane's `copy_words` are done."""
    text = "cp.async.mbarrier.arrive.noinc.shared.b64 [$0];"
    act(text, barrier.address(), constraints="r")


def join_bits(target: Pointer, bits: Int) -> None:
    """Sets bits of a word of shared memory, atomically."""
    act("red.shared.or.b32 [$0], $1;", target.address(), bits.value, constraints="r,r")


def wait(barrier: Pointer, parity: Int) -> None:
    """Waits until the barrier's phase of this parity is over."""
    # Labels are local to the braces.
    kind = "try_wait" if has_bulk_copies() else "test_wait"
    text = (
        f"{{ .reg .pred done; again: mbarrier.{kind}.parity.shared.b64 done, [$0], $1; "
        "@done bra over; bra again; over: }"
    )
    act(text, barrier.address(), parity.value, constraints="r,r")


def store_matrices(address: Int, words: Sequence[Int]) -> None:
    """Stores up to four 8 x 8 blocks of 16-bit numbers of a warp, columns as rows.

    Lane ``8 i + j`` has the `address` in shared memory of column `j` of block `i`; `words` are two
    rows of the lane's column pair for each block.
    """
    names = ", ".join(f"${i + 1}" for i in range(len(words)))
    act(
        f"stmatrix.sync.aligned.m8n8.x{len(words)}.trans.shared.b16 [$0], {{{names}}};",
        address.value,
        *[w.value for w in words],
        constraints=",".join(["r"] * (len(words) + 1)),
    )


def load_matrices(address: Int, count: int) -> list[Int]:
    """The reverse of `store_matrices`."""
    names = ", ".join(f"${i}" for i in range(count))
    # A single result is not a structure.
    result = llvm.StructType.get_literal([i32()] * count) if count > 1 else i32()
    text = f"ldmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 {{{names}}}, [${count}];"
    constraints = ",".join(["=r"] * count + ["r"])
    out = asm(result, [address.value], text, constraints, effects=True)
    if count == 1:
        return [Int(out)]
    return [Int(llvm.extractvalue(i32(), out, [i])) for i in range(count)]

"""Stand-ins for ptx.wgmma. A product is computed when it is issued; its accumulators hold a mark until its wait_group.

Each step's sum is cut off, as GPUs do; PTX leaves that open.

While it runs, its accumulators and register operands must stay as they are (checked at the wait), and nobody may
write the shared memory that it reads (checked at the write).
"""

import functools

import numpy as np

from .. import fragments
from .errors import InstructionError, place
from .mma import cut_off
from .now import current
from .registers import RUNNING, bits, check, halves, is_running, table
from .warp import same, together

SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}  # by bits 62 and 63 of a descriptor
_RUNNING = RUNNING.view(np.float32)  # as an accumulator takes it
_A = table(fragments.a_element, 8)


class Product:
    """One that runs: its threads' accumulators and what they get, what it reads, where it stands."""

    def __init__(self, acc, values, operands, words, place):
        self.acc, self.values, self.operands, self.words, self.place = acc, values, operands, words, place


# The results of the instructions.


def rows_of_k(descriptor, rows):
    """Addresses (rows, 16) of a k-contiguous operand's elements."""
    start, leading, stride, swizzle = decoded(descriptor)
    row, k = np.arange(rows)[:, None], np.arange(16)
    if swizzle:
        address = start + row // 8 * stride + row % 8 * swizzle + 2 * k
    else:
        address = start + row // 8 * stride + k // 8 * leading + row % 8 * 16 + k % 8 * 2
    return fragments.swizzled(address, swizzle)


def columns_of_n(descriptor, columns):
    """Addresses (16, columns) of an n-contiguous operand's elements."""
    start, leading, stride, swizzle = decoded(descriptor)
    k, n = np.arange(16)[:, None], np.arange(columns)
    if swizzle:
        wide = swizzle // 2  # columns of one swizzled row
        address = start + k // 8 * stride + n // wide * leading + k % 8 * swizzle + n % wide * 2
    else:
        address = start + k // 8 * leading + n // 8 * stride + k % 8 * 16 + n % 8 * 2
    return fragments.swizzled(address, swizzle)


def decoded(descriptor):
    """(start, leading, stride, swizzle) in bytes."""
    descriptor = int(descriptor)
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise InstructionError(
            f"descriptor {descriptor:#x} has a base offset: swizzled operands begin at whole patterns"
        )
    return start, leading, stride, SWIZZLES[descriptor >> 62]


@functools.cache
def c_table(n):
    """(rows, columns), each (128, n / 2): where the accumulators of a warpgroup's threads stand in C."""
    rows, columns = table(fragments.c_element, n // 2)
    return np.concatenate([rows + 16 * warp for warp in range(4)]), np.tile(columns, (4, 1))


def a_of_registers(registers, kind):
    """(128, 4 * steps) uint32 -> A (64, 16 * steps)."""
    steps = registers.shape[1] // 4
    values = halves(registers, kind).reshape(4, 32, steps, 8)
    a = np.empty((4, 16, steps, 16))
    rows, columns = _A
    for step in range(steps):
        a[:, rows, step, columns] = values[:, :, step]
    return a.reshape(64, 16 * steps)


# The instructions themselves.


def commit_group():
    return together(("wgmma.commit_group",), _commit, None, "warpgroup")


def _commit(group, given):
    group.product_groups.append(group.products)
    group.products = []


@functools.cache
def wait_group(newest):
    def compute(group, given):
        while len(group.product_groups) > newest:
            done = group.product_groups.popleft()
            while done:
                product = done.pop(0)
                _finish(group, product, [*done, *_running(group)])

    def wait():
        return together(("wgmma.wait_group", newest), compute, None, "warpgroup")

    return wait


@functools.cache
def pin(count, first=0):
    def pin(registers):
        current()
        check(registers[first : first + count])

    return pin


@functools.cache
def product_shared(n, kind, a_offsets, b_offsets, b_trans):
    name = "wgmma.product_shared", n, kind, a_offsets, b_offsets, b_trans
    compute = _compute(n, kind, _a_in_shared(kind, a_offsets), b_offsets, b_trans)

    def product(acc, a, b, accumulate):
        return together(name, compute, (acc, a, b, accumulate), "warpgroup")

    return product


@functools.cache
def product_registers(n, kind, b_offsets, b_trans):
    name = "wgmma.product_registers", n, kind, b_offsets, b_trans
    a_steps = tuple(range(0, 4 * len(b_offsets), 4))
    compute = _compute(n, kind, _a_in_registers(kind, a_steps), b_offsets, b_trans)

    def product(acc, a, b, accumulate):
        return together(name, compute, (acc, a, b, accumulate), "warpgroup")

    return product


@functools.cache
def new_product_shared(n, kind, a_offsets, b_offsets, b_trans):
    name = "wgmma.new_product_shared", n, kind, a_offsets, b_offsets, b_trans
    compute = _compute(n, kind, _a_in_shared(kind, a_offsets), b_offsets, b_trans)

    def product(acc, a, b):
        return together(name, compute, (acc, a, b, 0), "warpgroup")

    return product


@functools.cache
def new_product_registers(n, kind, a_steps, b_offsets, b_trans):
    name = "wgmma.new_product_registers", n, kind, a_steps, b_offsets, b_trans
    compute = _compute(n, kind, _a_in_registers(kind, a_steps), b_offsets, b_trans)

    def product(acc, a, b):
        return together(name, compute, (acc, a, b, 0), "warpgroup")

    return product


def _a_in_shared(kind, a_offsets):
    def a_matrix(group, given):
        descriptor = int(same(group, [a for _, a, _, _ in given], "a's descriptor"))
        return *_read(group, [_touched(rows_of_k, descriptor + offset, 64) for offset in a_offsets], kind, 1), []

    return a_matrix


def _a_in_registers(kind, a_steps):
    count, of_steps = max(a_steps) + 4, [at + i for at in a_steps for i in range(4)]

    def a_matrix(group, given):
        operands = [bits(a[:count]) for _, a, _, _ in given]
        snapshot = _of_threads(group, operands)
        return a_of_registers(snapshot[:, of_steps], kind), [], list(zip(operands, snapshot, strict=True))

    return a_matrix


@functools.cache
def descriptor(leading_bytes, stride_bytes, swizzle_bytes):
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle_bytes]
    fixed = mode << 62 | (stride_bytes >> 4) << 32 | (leading_bytes >> 4) << 16

    def describe(address):
        return np.uint64(fixed | (int(address) & 0x3FFFF) >> 4)

    return describe


def _compute(n, kind, a_matrix, b_offsets, b_trans):
    count = n // 2

    def compute(group, given):
        b = int(same(group, [b for _, _, b, _ in given], "b's descriptor"))
        accumulate = same(group, [int(x) != 0 for _, _, _, x in given], "accumulate")
        acc = [registers[:count] for registers, _, _, _ in given]
        before = _before(group, acc) if accumulate else 0
        a, a_words, operands = a_matrix(group, given)
        if b_trans:
            places = [_touched(columns_of_n, b + offset, n) for offset in b_offsets]
            b, b_words = _read(group, places, kind, 0)
        else:
            places = [_touched(rows_of_k, b + offset, n) for offset in b_offsets]
            b, b_words = _read(group, places, kind, 1)
            b = b.T
        values = _sums(a, b, before)
        words = [*a_words, *b_words]
        shared = group.members[0].block.shared
        for part in words:
            shared.reading[part] += 1
        for registers in acc:
            registers[:] = _RUNNING
        group.products.append(Product(acc, values, operands, words, place(current())))

    return compute


def _sums(a, b, before):
    """before (128, n / 2) + A . B, step by step, in float32."""
    places = c_table(b.shape[1])
    c = np.zeros((64, b.shape[1]))
    c[places] = before
    for k in range(0, len(b), 16):
        c = cut_off(c + a[:, k : k + 16] @ b[k : k + 16]).astype(np.float64)
    return c[places].astype(np.float32)


@functools.lru_cache(512)  # of the operands in a few stages; each is some 10 KB
def _touched(layout, descriptor, count):
    """(numbers of an operand's elements, of the words that they lie in, (lowest address, how many bytes from there))"""
    addresses = layout(descriptor, count)
    return addresses >> 1, np.unique(addresses >> 2), (int(addresses.min()), int(np.ptp(addresses)) + 2)


def _read(group, places, kind, axis):
    """(matrix, words read) of an operand whose steps touch `places`, put together along its k axis."""
    shared = group.members[0].block.shared
    parts, words = [], []
    for elements, touched, reach in places:
        shared.words(*reach, 2)
        shared.read(touched, group.numbers, asynchronous=True)
        parts.append(halves(shared.data.view(np.uint16)[elements], kind))
        words.append(touched)
    return np.concatenate(parts, axis=axis), words


def _before(group, acc):
    """(128, count): what the accumulators hold or will hold when the products under way are done."""
    for product in reversed(_running(group)):
        if np.shares_memory(acc[0], product.acc[0]):
            if len(product.acc[0]) != len(acc[0]):
                raise InstructionError("products on the same accumulators, one behind the other, must have one shape")
            return product.values
    return _of_threads(group, acc)


def _of_threads(group, registers):
    """(128, count): registers that are all there."""
    stacked = np.concatenate(registers).reshape(len(registers), -1)
    if is_running(stacked):
        for thread, own in zip(group.members, registers, strict=True):
            check(own, thread)
    return stacked


def _running(group):
    return [product for products in (*group.product_groups, group.products) for product in products]


def _finish(group, product, running):
    """Its values arrive, unless a later product on the same accumulators is still running."""
    later = any(np.shares_memory(other.acc[0], product.acc[0]) for other in running)
    running = RUNNING.tobytes() * len(product.acc[0])
    for thread, registers, values in zip(group.members, product.acc, product.values, strict=True):
        if registers.tobytes() != running:
            raise InstructionError(f"accumulators were written while the product at {product.place} ran", thread)
        if not later:
            registers[:] = values
    for thread, (registers, snapshot) in zip(group.members, product.operands, strict=False):
        if registers.tobytes() != snapshot.tobytes():
            raise InstructionError(
                f"register operands of the product at {product.place} were changed while it ran", thread
            )
    shared = group.members[0].block.shared
    for words in product.words:
        shared.reading[words] -= 1

"""Converts elements of any type and stride to the computing precision, and back (compiled)."""

# mypy: ignore-errors

import numpy as np
from numba import njit

from . import plan as slot
from .vectors.build import bits_float, float_bits, load, size_of, store
from .vectors.scores import scaled_row, widen_bfloat, widen_half

INT = np.int64(0)  # tells `load` to read an int64

# Leaves: compiled on their own and linked into the kernel. Python wrappers would be compiled too.
compiled = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@compiled
def half_to_float(bits):
    """float16 bits (an int64) to float32. Scaling by 2^112 moves the exponent and makes subnormals normal."""
    magnitude = (bits & 0x7FFF) << 13
    if magnitude >= 0x7C00 << 13:
        return float_bits(((bits & 0x8000) << 16) | magnitude | 0x7F800000)
    return float_bits(((bits & 0x8000) << 16) | bits_float(float_bits(magnitude) * np.float32(2.0**112)))


@compiled
def float_to_half(value):
    """float32 to float16 bits, to nearest, ties to even."""
    bits = bits_float(value)
    sign, magnitude = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return sign | 0x7E00
    if magnitude >= 143 << 23:  # 65536
        return sign | 0x7C00
    if magnitude < 113 << 23:  # subnormal: adding 1/2 leaves the rounded result in the low bits
        return sign | (bits_float(float_bits(magnitude) + np.float32(0.5)) - (126 << 23))
    return sign | ((magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13)


@compiled
def float_to_bfloat(value):
    """float32 to bfloat16 bits, to nearest, ties to even."""
    bits = bits_float(value)
    if bits & 0x7FFFFFFF > 0x7F800000:
        return (bits >> 16) | 0x40
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@compiled
def get(address, dtype, zero):
    """The element at an address, in the precision of zero."""
    kind = type(zero)
    if dtype == slot.FLOAT32:
        return kind(load(address, 0, np.float32(0)))
    if dtype == slot.BFLOAT16:
        return kind(float_bits(np.int64(load(address, 0, np.uint16(0))) << 16))
    if dtype == slot.FLOAT16:
        return kind(half_to_float(np.int64(load(address, 0, np.uint16(0)))))
    return kind(load(address, 0, np.float64(0)))


@compiled
def put(address, dtype, value):
    """Stores a float64 as the element at an address."""
    if dtype == slot.FLOAT32:
        store(address, 0, np.float32(value))
    elif dtype == slot.BFLOAT16:
        store(address, 0, np.uint16(float_to_bfloat(np.float32(value))))
    elif dtype == slot.FLOAT16:
        store(address, 0, np.uint16(float_to_half(np.float32(value))))
    else:
        store(address, 0, value)


@compiled
def copy_in(to, step, source, stride, count, dtype, sign, zero):
    """to[i * step] = sign * source[i], with source elements of any type, stride bytes apart."""
    if dtype == slot.FLOAT32:
        for i in range(count):
            store(to, i * step, sign * load(source + i * stride, 0, np.float32(0)))
    elif dtype == slot.BFLOAT16:
        for i in range(count):
            store(to, i * step, sign * float_bits(np.int64(load(source + i * stride, 0, np.uint16(0))) << 16))
    elif dtype == slot.FLOAT16:
        for i in range(count):
            store(to, i * step, sign * half_to_float(np.int64(load(source + i * stride, 0, np.uint16(0)))))
    else:
        for i in range(count):
            store(to, i * step, sign * type(zero)(load(source + i * stride, 0, np.float64(0))))


@compiled
def copy_out(to, stride, source, step, count, dtype, factor, zero):
    """to[i] = factor * source[i * step], with elements of `to` in the problem's type, stride bytes apart."""
    if dtype == slot.FLOAT16:
        for i in range(count):
            store(to + i * stride, 0, np.uint16(float_to_half(np.float32(load(source, i * step, zero) * factor))))
    elif dtype == slot.BFLOAT16:
        for i in range(count):
            store(to + i * stride, 0, np.uint16(float_to_bfloat(np.float32(load(source, i * step, zero) * factor))))
    elif step == 1 and stride == size_of(zero):
        scaled_row(to, source, count, factor, zero)
    else:
        for i in range(count):
            store(to + i * stride, 0, load(source, i * step, zero) * factor)


@compiled
def row_address(start, plan, stride, b, head, i):
    """Address of row i of a head; `stride` is the slot of the first of the four strides."""
    at = b * load(plan, stride, INT) + head * load(plan, stride + 1, INT)
    return start + at + i * load(plan, stride + 2, INT)


@compiled
def length_and_offset(plan, pointers, b):
    """The number of valid keys of a batch entry, and the position of its query 0 among them."""
    valid, length = load(plan, slot.SEQLEN_K, INT), INT
    if load(plan, slot.HAS_SEQLENS_K, INT):
        lengths, stride = load(pointers, slot.SEQLENS_K_AT, INT), load(plan, slot.SEQLENS_K_STRIDE, INT)
        length = np.int64(load(lengths, b * stride, np.int32(0)))
        valid = min(max(length, 0), valid)
    offset, source = load(plan, slot.Q_OFFSET, INT), load(plan, slot.Q_OFFSET_SOURCE, INT)
    if source == 1:
        offset += length
    elif source == 2:
        offsets, stride = load(pointers, slot.Q_OFFSET_AT, INT), load(plan, slot.Q_OFFSET_STRIDE, INT)
        offset += np.int64(load(offsets, b * stride, np.int32(0)))
    return valid, offset


@compiled
def fill(to, count, value):
    for i in range(count):
        store(to, i, value)


@compiled
def gather(to, source, row_stride, stride, rows, width, dtype, zero):
    """to (rows, width) = rows of k or v, converted and contiguous."""
    size = size_of(zero)
    for row in range(rows):
        at, element = to + row * width * size, source + row * row_stride
        if size == 4 and stride == 2 and dtype == slot.BFLOAT16:
            widen_bfloat(at, element, width, zero)
        elif size == 4 and stride == 2 and dtype == slot.FLOAT16:
            widen_half(at, element, width, zero)
        elif stride == size and dtype >= slot.FLOAT32:
            scaled_row(at, element, width, type(zero)(1), zero)
        else:
            copy_in(at, 1, element, stride, width, dtype, type(zero)(1), zero)

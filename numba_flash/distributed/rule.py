"""Chooses how a call is divided among ranks: the method and the slices. By shapes alone, so that all ranks agree."""

from typing import Any

METHODS = ("gather", "heads", "ring")
MOST_GATHERED = 8 << 30  # bytes of gathered K and V that a rank holds at once
# Tokens times KV heads. With fewer, starting slices costs more than they gain. Two H200 gain 4 % by slices when they
# gather 8 heads of 16k tokens, and nothing with 8 heads of 8k or 4 heads of 16k.
FEW_ROWS = 128 * 1024
# With fewer KV heads in a slice the backward takes two kernels instead of one (select/backward_forms.py). With a
# large group half as many are enough.
LEAST_HEADS_KV, LARGE_GROUP, WIDE = 4, 4, 64
GRADIENTS_GAIN = 1.25  # "heads" may move so many times more with gradients: each rank's kernels see a whole sequence


def method_of(
    size: int, heads: int, heads_kv: int, least_bytes: int, gather_alone: bool, most: int, gradients: bool = False
) -> str:
    """The method. least_bytes: bytes of K and V of one KV head over all tokens; gather_alone: the options need all
    heads or all keys; gradients: a backward will follow.

    Each rank receives 2 * heads_kv / size * (size - 1) numbers for a token's K and V by gathering, and by heads
    (2 * heads + 2 * heads_kv) * (size - 1) / size^2. With gradients gathering moves four times as much: K and V again,
    and their gradients in float32; by heads twice as much is moved.
    """
    if gather_alone or size == 1:
        return "gather"
    gathered, by_heads = (4, 2) if gradients else (1, 1)
    gathered, by_heads = gathered * heads_kv * size, by_heads * (heads + heads_kv)
    if heads_kv % size == 0 and (by_heads <= GRADIENTS_GAIN * gathered if gradients else by_heads < gathered):
        return "heads"
    return "gather" if 2 * least_bytes <= most else "ring"


def slices_of(
    heads_kv: int,
    group: int,
    head_dim: int,
    tokens: int,
    least_bytes: int = 0,
    most: int = MOST_GATHERED,
    engines: bool = False,
    gradients: bool = True,
) -> tuple[int, ...]:
    """The number of KV heads of each slice, each with `group` query heads; two slices fit into `most` bytes.

    Ranks must wait for the first slice, and in a backward for the last one's gradients. So these two are smaller.
    engines: copy engines move the slices, which so cost little; without gradients the last one is then not smaller.
    An even number stays even, so that gradients are summed in the same order (kernels/steps/dq_order.py).
    """
    if least_bytes * heads_kv > most:
        counts = (n for n in range(1, heads_kv + 1) if heads_kv % n == 0 and 2 * least_bytes * heads_kv // n <= most)
        return equal_slices(heads_kv, next(counts, heads_kv))
    least = LEAST_HEADS_KV // 2 if group >= LARGE_GROUP and head_dim > WIDE else LEAST_HEADS_KV
    end = max(least, heads_kv // 4 // 2 * 2)
    if tokens * heads_kv < (FEW_ROWS // 2 if engines else FEW_ROWS) or heads_kv % 2 or heads_kv < 2 * end:
        return (heads_kv,)
    last = end if gradients or not engines else 0
    return tuple(n for n in (end, heads_kv - end - last, last) if n)


def equal_slices(heads_kv: int, count: int) -> tuple[int, ...]:
    return (heads_kv // count,) * count


def ahead_of(slices: tuple[int, ...], least_bytes: int, most: int) -> int:
    """How many slices a rank holds at once: all if they fit, so that no exchange waits for a kernel; two at least."""
    return len(slices) if least_bytes * sum(slices) <= most else max(2, most // max(least_bytes * max(slices), 1))


def check_method(method: Any) -> None:
    if method not in ("auto", *METHODS):
        raise ValueError(f"method must be 'auto', 'gather', 'heads' or 'ring', not {method!r}")

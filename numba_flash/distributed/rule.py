"""How a call is divided among ranks: which way, and in how many slices. By shapes alone, so that all ranks agree."""

from typing import Any

METHODS = ("gather", "heads", "ring")
MOST_GATHERED = 8 << 30  # bytes of gathered K and V that a rank holds at once
# The first slice of KV heads is waited for. Of two H200 and the next larger choices, a spike found these the best.
FEW_TOKENS, SLICES = 32 * 1024, 4


def method_of(size: int, heads: int, heads_kv: int, least_bytes: int, gather_alone: bool, most: int) -> str:
    """least_bytes: of K and V of one KV head over all tokens; gather_alone: the options need all heads or all keys.

    Each rank receives 2 * heads_kv / size * (size - 1) numbers for a token's K and V by gathering, and by heads
    (2 * heads + 2 * heads_kv) * (size - 1) / size^2. So heads are cheaper from size 1 + heads / heads_kv on.
    """
    if gather_alone or size == 1:
        return "gather"
    if heads_kv % size == 0 and heads_kv * (size - 1) > heads:
        return "heads"
    return "gather" if 2 * least_bytes <= most else "ring"


def slices_of(heads_kv: int, tokens: int, least_bytes: int, most: int) -> int:
    """How many slices of KV heads: so few that the first one is short, and so many that two of them fit."""
    wanted = 1 if tokens < FEW_TOKENS else SLICES
    for slices in range(1, heads_kv + 1):
        if heads_kv % slices == 0 and slices >= min(wanted, heads_kv) and 2 * least_bytes * heads_kv // slices <= most:
            return slices
    return max(heads_kv, 1)


def ahead_of(slices: int, heads_kv: int, least_bytes: int, most: int) -> int:
    """How many slices a rank holds at once: all if they fit, so that no exchange waits for a kernel; two at least."""
    return max(2, min(slices, most * slices // max(least_bytes * heads_kv, 1)))


def check_method(method: Any) -> None:
    if method not in ("auto", *METHODS):
        raise ValueError(f"method must be 'auto', 'gather', 'heads' or 'ring', not {method!r}")

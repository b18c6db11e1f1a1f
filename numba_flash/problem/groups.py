"""How blocks that own keys share the query heads of a group: each takes some, its members. Integers only."""

# Keys of a packed sequence up to which a block takes all heads: partial sums would take too long. On an H200 parts of
# 32/8 heads cost 7 % at 1400 keys and 4 % at 2048, and gain 12 % at 4096.
SHORT = 2560


def members_of(members, keys):
    """`members`, or 0 for a short packed sequence."""
    return members if keys > SHORT else 0


def parts_of(group, members):
    """Number of blocks that share a group; members 0: one block, which takes all heads."""
    return (group + members - 1) // members if members > 0 else 1


def part_of(head_part, parts, group, members):
    """-> (KV head, first query head, number of heads) of the head_part-th part of a batch entry's groups; parts:
    parts_of."""
    h_kv = head_part // parts
    first = (head_part - h_kv * parts) * members
    return h_kv, h_kv * group + first, min(group - first, members) if members > 0 else group

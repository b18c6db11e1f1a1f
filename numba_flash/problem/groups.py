"""Query heads of a group, shared out among blocks that own keys: each takes some, its members. Integers only."""


def parts_of(group, members):
    """How many blocks share a group; members 0: one, which takes all."""
    return (group + members - 1) // members if members > 0 else 1


def part_of(head_part, parts, group, members):
    """-> (KV head, first query head, how many) of the head_part-th part of a batch entry's groups; parts: parts_of."""
    h_kv = head_part // parts
    first = (head_part - h_kv * parts) * members
    return h_kv, h_kv * group + first, min(group - first, members) if members > 0 else group

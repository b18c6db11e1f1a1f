"""Attention over a sequence whose tokens are divided among ranks: processes, GPUs or devices. Imported on demand."""

from .groups import Group
from .kvcache import context_parallel_attention_kvcache
from .layout import Layout
from .operation import context_parallel_attention, context_parallel_attention_backward
from .whole import peer_group, shard, unshard

__all__ = [
    "Group",
    "Layout",
    "context_parallel_attention",
    "context_parallel_attention_backward",
    "context_parallel_attention_kvcache",
    "peer_group",
    "shard",
    "unshard",
]

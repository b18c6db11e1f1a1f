"""Foreign arrays in, outputs out: NumPy, CuPy, Numba, torch, JAX, DLPack, CUDA Array Interface.

`read` turns what the caller handed over into an address and a `Layout`, without a copy and without
waiting for the device. No framework is imported here that the caller did not import: an array's own
type names its family, and the family's module is then in sys.modules already. No attention words.
"""

from .dtypes import ITEM_SIZE as ITEM_SIZE
from .fast_path import FastPath as FastPath
from .layout import (
    AUX_DTYPES as AUX_DTYPES,
    DTYPES as DTYPES,
    Array as Array,
    Layout as Layout,
    contiguous_layout as contiguous_layout,
    host_pointer as host_pointer,
    host_view as host_view,
    is_array as is_array,
    jax_layout as jax_layout,
)
from .making import (
    beside_jax as beside_jax,
    empty as empty,
    empty_for as empty_for,
    give as give,
    note_writing as note_writing,
    scratch as scratch,
)
from .reading import (
    as_bfloat16 as as_bfloat16,
    checks as checks,
    differentiated as differentiated,
    fast_paths as fast_paths,
    jax_addresses as jax_addresses,
    read as read,
)
from .recording import NeedsBridge as NeedsBridge, refuse_jax_tracer as refuse_jax_tracer, shown as shown
from .streams import core_stream as core_stream, move as move, stream_of as stream_of

"""Foreign arrays in, outputs out: NumPy, CuPy, Numba, torch, JAX, DLPack, CUDA Array Interface.

`read` turns what the caller handed over into an address and a `Layout`, without a copy and without
waiting for the device. No framework is imported here that the caller did not import: an array's own
type names its family, and the family's module is then in sys.modules already. No attention words.
"""

from .dtypes import ITEM_SIZE as ITEM_SIZE
from .fast_path import FastPath as FastPath
from .layout import AUX_DTYPES as AUX_DTYPES
from .layout import DTYPES as DTYPES
from .layout import Array as Array
from .layout import Layout as Layout
from .layout import contiguous_layout as contiguous_layout
from .layout import host_pointer as host_pointer
from .layout import host_view as host_view
from .layout import is_array as is_array
from .layout import jax_layout as jax_layout
from .making import beside_jax as beside_jax
from .making import empty as empty
from .making import empty_for as empty_for
from .making import give as give
from .making import note_writing as note_writing
from .making import scratch as scratch
from .reading import as_bfloat16 as as_bfloat16
from .reading import checks as checks
from .reading import differentiated as differentiated
from .reading import fast_paths as fast_paths
from .reading import jax_addresses as jax_addresses
from .reading import read as read
from .recording import NeedsBridge as NeedsBridge
from .recording import refuse_jax_tracer as refuse_jax_tracer
from .recording import shown as shown
from .streams import core_stream as core_stream
from .streams import move as move
from .streams import stream_of as stream_of

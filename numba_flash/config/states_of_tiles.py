"""The kernels that read the states of tiles (kernels/score/tile_states.py), and the sizes of their tiles."""

from typing import NamedTuple

# The arrays of states and of the order in which tiles are taken (kernels/score/tile_order.py), for kernels that own
# queries and for those that own keys.
TILE_STATES, TILE_STATES_OF_KEYS = "tile_states", "tile_states_of_keys"
_OF_QUERIES, _OF_KEYS = (
    ("v1", "v2", "mma", "wgmma", "wgmma_float32", "v2_dq", "mma_dq", "wgmma_dq"),
    ("v2_dkdv", "mma_dkdv", "wgmma_dkdv"),
)
READERS = dict.fromkeys(_OF_QUERIES, TILE_STATES) | dict.fromkeys(_OF_KEYS, TILE_STATES_OF_KEYS)
SIMT = ("v1", "v2", "v2_dq", "v2_dkdv")  # take tiles in the order of blocks
STATES_IN_WORD = 16  # bit i: something is seen in the i-th tile; bit 16 + i: mask_mod decides what


class StatesTile(NamedTuple):
    """A tile that has a state: so many queries, of so many heads that share it, by so many keys. of_keys: words are
    those of a tile of keys, for a kernel that owns keys and walks over queries."""

    queries: int
    keys: int
    heads: int
    of_keys: bool = False

    @property
    def own(self) -> int:
        """Rows of the side that words belong to."""
        return self.keys if self.of_keys else self.queries

    @property
    def other(self) -> int:
        return self.queries if self.of_keys else self.keys

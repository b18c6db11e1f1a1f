"""Which kernels read the states of tiles (kernels/score/tile_states.py), and how large their tiles are."""

from typing import NamedTuple

# The arrays of states, for kernels that own queries and for those that own keys.
TILE_STATES, TILE_STATES_OF_KEYS = "tile_states", "tile_states_of_keys"
READERS = dict.fromkeys(("v2", "mma", "wgmma", "v2_dq"), TILE_STATES) | {"v2_dkdv": TILE_STATES_OF_KEYS}
STATES_IN_WORD = 16  # bit i: something is seen in the i-th tile; bit 16 + i: mask_mod decides what


class StatesTile(NamedTuple):
    """A tile that has a state: so many queries, of so many heads that share it, by so many keys."""

    queries: int
    keys: int
    heads: int

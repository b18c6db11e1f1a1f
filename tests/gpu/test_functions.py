"""score_mod and mask_mod on a GPU."""

from contract_functions import *  # noqa: F403

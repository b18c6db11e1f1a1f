"""Dropout on a GPU."""

from contract_dropout import *  # noqa: F403

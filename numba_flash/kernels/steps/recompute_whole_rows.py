"""recompute_rows.py, for callers that name it so."""

from .recompute_rows import make as make

"""Rows of results that came out NaN or Inf, computed again without the tensor cores."""

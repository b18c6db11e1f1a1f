"""The public functions. Each reads like the path of a call."""

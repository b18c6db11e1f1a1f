"""A kernel's parameters, their types and their values, and its tensor maps. Nothing here uses CUDA."""

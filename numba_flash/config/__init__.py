"""Configs: the constants that kernels are compiled with."""

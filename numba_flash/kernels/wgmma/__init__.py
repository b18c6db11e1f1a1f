"""Hopper kernels: TMA loads tiles, warpgroups multiply them with wgmma."""

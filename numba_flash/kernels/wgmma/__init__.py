"""Hopper: TMA brings tiles, warpgroups multiply them."""

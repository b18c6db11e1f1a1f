"""Modules of torch with the names and weights of flash-attn."""

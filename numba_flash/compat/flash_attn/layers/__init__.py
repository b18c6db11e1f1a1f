"""Layers of torch with the names of flash-attn."""

"""Checks what a caller asks for: every mistake of a caller raises here."""

"""Writes docs/reference/: the pages that repeat the code. Run `python -m docs.generate` after a change of the code."""

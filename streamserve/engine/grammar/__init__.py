"""Constrained output: a `Grammar` of a request becomes a `Matcher`, which knows the ids that may follow.

Uses llguidance, an optional package, and imports it only where a grammar is compiled.
"""

"""Faults of the groups of layers: which blocks lie before a window, and whose they are."""

from __future__ import annotations

from functools import partial

from tests.sim.planted import Mutant

_pool = partial(Mutant, file="kv/pool.py")

MUTANTS = (
    Mutant(
        name="a window is a block too short",
        law=41,
        file="kv/groups.py",
        old="max(0, num_computed + 1 - window) // block_size",
        new="max(0, num_computed + 1 + block_size - window) // block_size",
    ),
    _pool(
        name="what is in flight counts as computed at a window's end",
        law=41,
        old="end = first = first_read(sequence.num_computed_tokens,",
        new="end = first = first_read(sequence.num_launched_tokens,",
    ),
    _pool(
        name="nothing before a window is freed",
        law=41,
        old="            if first < end:\n",
        new="            if first > end:\n",
    ),
    _pool(
        name="only the last block before a window is freed",
        law=41,
        old="            while first > 0 and table[first - 1]:\n",
        new="            if first > 0 and table[first - 1]:\n",
    ),
    _pool(
        name="blocks of all groups have one name",
        law=4,
        old='bytes([group]) if group else b""',
        new='b"" if group else b""',
    ),
    _pool(
        name="a prefix lacks a block in its window",
        law=17,
        old="            for index in range(num_blocks - 1, first - 1, -1):\n",
        new="            for index in range(num_blocks - 1, first, -1):\n",
    ),
    _pool(
        name="a block is forgotten in the first group only",
        law=18,
        old="for name in (hash_ + group for hash_ in hashes for group in self._names):",
        new="for name in hashes:",
    ),
    _pool(
        name="only the first group gets blocks",
        law=6,
        old="        for table in sequence.held.tables:\n            if len(table) < num_blocks:",
        new="        for table in sequence.held.tables[:1]:\n            if len(table) < num_blocks:",
    ),
    Mutant(
        name="a part of a step has the first group's table in all",
        law=6,
        file="in_flight.py",
        old="        other_tables=tuple(others),\n        samples=(),\n",
        new="        other_tables=tuple(table for _ in others),\n        samples=(),\n",
    ),
)

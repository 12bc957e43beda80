"""Faults of shared prefill: which sequence writes a shared block, and which ones wait for it."""

from __future__ import annotations

from functools import partial

from tests.sim.planted import Mutant

_writers = partial(Mutant, file="shared_prefill.py")
_pool = partial(Mutant, file="kv/pool.py")

MUTANTS = (
    _pool(
        name="adapters share the prefix cache",
        law=4,
        old='    return hashlib.sha256(root + b"adapter" + _framed(adapter.encode())).digest() if adapter else root\n',
        new="    return root\n",
    ),
    _pool(
        name="all adapters are one in the prefix cache",
        law=4,
        old="_framed(adapter.encode())",
        new="b''",
    ),
    Mutant(
        name="a chunk forgets its adapter",
        law=5,
        file="budget.py",
        old="        adapter=sequence.request.adapter,\n",
        new="",
    ),
    _writers(
        name="each writes what all share",
        law=36,
        old="        if writer is None or writer.state is not State.RUNNING:\n",
        new="        if True:\n",
    ),
    _writers(
        name="a block in flight is written again",
        law=36,
        old="first, last = sequence.num_computed_tokens // size, min(",
        new="first, last = sequence.num_launched_tokens // size, min(",
    ),
    _writers(
        name="a block planned a moment ago is planned again",
        law=36,
        old="            end = planned_end\n",
        new="            pass\n",
    ),
    _writers(
        name="cached blocks are not taken over",
        law=36,
        old="        self._pool.adopt(sequence)\n",
        new="",
    ),
    _pool(
        name="a block taken over is the own one too",
        law=1,
        old="                self.free(table[index : index + 1])\n",
        new="",
    ),
    _pool(
        name="blocks are taken over in mid-flight",
        law=28,
        old="        if sequence.num_launched_tokens != sequence.num_computed_tokens:\n            return\n",
        new="",
    ),
    _pool(
        name="what is taken over is not counted",
        law=30,
        old="                self._prefix_hits += self.block_size\n",
        new="                pass\n",
    ),
    _pool(
        name="a block taken over counts as computed",
        law=21,
        old="                sequence.num_cached_tokens += self.block_size\n",
        new="",
    ),
)

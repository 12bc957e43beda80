"""Names of full blocks: sha256 over (parent, tokens, salt), starting from a root that names the model revision.

Equal names mean equal K/V, and that the same tenant, or the server itself, wrote the tokens. Pure functions.
(Idea: vLLM's hash chain. Lessons: vllm PR#12621, hash collisions; confidential-model-router#386, unframed salts;
vllm PR#37961, a salt on everything kills the sharing of the common system prompt.)
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Ids

from streamserve.engine.sequence import Sequence


def root_hash(revision: str, block_size: int) -> bytes:
    """Name the empty prefix of one model revision."""
    return hashlib.sha256(b"streamserve-kv-1" + _framed(revision.encode()) + block_size.to_bytes(8, "big")).digest()


def block_hash(parent: bytes, token_ids: Ids[int], salt: str | None) -> bytes:
    """Name a full block by what is before it and in it. `salt` None means unsalted, which no salt string equals."""
    extra = b"" if salt is None else b"salt" + _framed(salt.encode())
    return hashlib.sha256(parent + _framed(array("q", token_ids).tobytes()) + extra).digest()


def extend_hashes(sequence: Sequence, num_blocks: int, block_size: int, root: bytes) -> None:
    """Name the sequence's blocks up to `num_blocks`; those named before are kept, as known tokens never change."""
    hashes = sequence.block_hashes
    for index in range(len(hashes), num_blocks):
        start, end = index * block_size, (index + 1) * block_size
        parent = hashes[-1] if hashes else root
        hashes.append(block_hash(parent, sequence.token_ids[start:end], _salt_of_block(sequence, start, end)))


def _salt_of_block(sequence: Sequence, start: int, end: int) -> str | None:
    """The salt enters the chain once: in the first block that is not wholly public.

    [ public ..... | caller's ................ )
    [ none ][ none ][ salt ][ chain ][ chain ]
    """
    public = sequence.request.num_public_tokens
    is_first_private = start <= public < end
    return sequence.request.salt if is_first_private and sequence.request.salt else None


def _framed(data: bytes) -> bytes:
    """Prefix the length, so that no two lists of fields give the same bytes."""
    return len(data).to_bytes(8, "big") + data

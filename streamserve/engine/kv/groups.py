"""Groups of layers: how far each looks back, which blocks it reads, and how many of them a sequence holds.

A model's layers are in groups of as many layers each. A block holds the keys and values of `block_size` tokens for the
layers of one group, so that all groups share one memory, and a sequence has a block table for each group. A group's
window is None where its layers see everything. What lies before the window of every token that is still to be computed
is never read again: its blocks are freed, and the table points at the null block there.

    full       [ 3 | 7 | 9 | 4 ]
    window 6   [ 0 | 0 | 2 | 8 ]      block_size 4, 15 tokens computed: the next reads positions 10 to 15

Pure ints. (Idea: vLLM's hybrid KV cache manager.)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

Windows = tuple[int | None, ...]  # by group
ONE_GROUP: Windows = (None,)

# Of the memory, the most that layers may waste which a group lacks.
_MOST_WASTE = 1 / 7
# Each group has its tables in every step.
_MOST_GROUPS = 8


def first_read(num_computed: int, window: int | None, block_size: int) -> int:
    """Return the first block that tokens after `num_computed` computed tokens read."""
    return 0 if window is None else max(0, num_computed + 1 - window) // block_size


def most_in_window(window: int, block_size: int, step_tokens: int) -> int:
    """Return how many blocks of a windowed group a sequence holds at most, when a step computes so many of its tokens.

    Neither the window nor what a step computes begins with a block.
    """
    return -(-(window + step_tokens) // block_size) + 1


def most_blocks(num_tokens: int, windows: Windows, block_size: int, step_tokens: int) -> int:
    """Return how many blocks a sequence of so many tokens holds at most, in all groups."""
    whole = -(-num_tokens // block_size)
    return sum(
        whole if window is None else min(whole, most_in_window(window, block_size, step_tokens)) for window in windows
    )


def most_tokens(num_blocks: int, windows: Windows, block_size: int, step_tokens: int) -> int:
    """Return the longest sequence that so many blocks hold: the inverse of `most_blocks`."""
    bounds = sorted(most_in_window(window, block_size, step_tokens) for window in windows if window is not None)
    num_growing, num_left = len(windows), num_blocks
    for bound in bounds:
        if num_left < num_growing * bound:
            return num_left // num_growing * block_size
        num_growing, num_left = num_growing - 1, num_left - bound
    return num_left // num_growing * block_size if num_growing else sys.maxsize


def most_sequences(num_blocks: int, num_tokens: int, windows: Windows, block_size: int, step_tokens: int) -> int:
    """Return how many sequences of so many tokens the blocks hold at once, the last with its prompt being computed."""
    first, others = (most_blocks(num_tokens, windows, block_size, step) for step in (step_tokens, 0))
    return 0 if num_blocks < first else 1 + (num_blocks - first) // others


def within(windows: Mapping[int, int | None], max_model_len: int) -> dict[int, int | None]:
    """Return how far each layer looks back, None: to the start of the longest sequence."""
    return {index: None if window is None or window >= max_model_len else window for index, window in windows.items()}


def windows_by_group(groups: Sequence[Sequence[int]], windows: Mapping[int, int | None]) -> Windows:
    """Return the window of each group; None where its layers see everything, or not all as far."""
    found = [{windows[layer] for layer in own} for own in groups]
    return tuple(one.pop() if len(one) == 1 else None for one in found) or ONE_GROUP


def group_layers(windows: Mapping[int, int | None]) -> list[list[int]]:
    """Return the layers of each group, those that see everything first; `windows` are by layer.

    All groups have the same number of layers, but for the last of a window, which may lack a few. One group where the
    numbers of layers do not divide well.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer in sorted(windows, key=lambda one: windows[one] is not None):
        by_window.setdefault(windows[layer], []).append(layer)
    for size in range(min(map(len, by_window.values()), default=0), 0, -1):
        groups = [layers[at : at + size] for layers in by_window.values() for at in range(0, len(layers), size)]
        if len(groups) <= _MOST_GROUPS and len(groups) * size <= (1 + _MOST_WASTE) * len(windows):
            return groups
    return [sorted(windows)]

"""`PublicPrefixes`: how many tokens of a prompt are the server's own, so that all tenants may share their blocks.

Those are the tokens before the caller's first one: what a rendering of the server's system prompt has in common with
this prompt, whatever stands after it. A system prompt that the caller sent is the caller's, even if it is the same: an
answer to it must not show by its speed that another caller uses it. (Source: vllm PR#37961, a salt on everything ends
the sharing of the common system prompt; arXiv 2411.18191, CVE-2025-46570, what a shared cache shows of other callers.)

On tokenising threads; two that meet the same prompt for the first time both render it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile

from streamserve.engine.text.tokenizer import Tokenizer
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.requests import GenerateRequest, Message

logger = logging.getLogger(__name__)

# Two turns that begin differently, so that what their renderings have in common holds nothing of a turn.
_PROBES = ("a", "0")
# System prompts known at once: a site has one for each model, and another after its settings were changed.
_MOST_KNOWN = 16


class PublicPrefixes:
    """The rendering of each system prompt up to the first turn, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, tuple[int, ...]] = {}

    def num_tokens(self, request: GenerateRequest, token_ids: tuple[int, ...]) -> int:
        """Return how many of the prompt's tokens come before anything of the caller's; 0 where nothing was inserted."""
        if not request.has_public_system or not request.messages:
            return 0
        system = request.messages[0].content
        known = self._known.get(system)
        if known is None:
            known = self._render(request, system)
        num_common = _num_common(known, token_ids)
        # Some templates write the date: render again. A caller's first character may join our last token: that is 1.
        is_plain = not request.chat_template_kwargs and not request.tools
        if num_common < len(known) - 1 and is_plain:
            num_common = _num_common(self._render(request, system), token_ids)
        return num_common

    def _render(self, request: GenerateRequest, system: str) -> tuple[int, ...]:
        """Render the system prompt before two different turns, with nothing that the caller may set."""
        try:
            one, other = (
                self._tokenizer.encode(
                    replace(
                        request,
                        messages=(Message(role="system", content=system), Message(role="user", content=turn)),
                        chat_template_kwargs={},
                        tools=(),
                        continue_final_message=False,
                    )
                ).token_ids
                for turn in _PROBES
            )
        except StreamserveError:  # a template may refuse what it gets here: then nothing is shared
            logger.warning("the system prompt cannot be rendered alone; its blocks are not shared", exc_info=True)
            one = other = ()
        while len(self._known) >= _MOST_KNOWN:
            self._known.pop(next(iter(self._known)), None)
        self._known[system] = one[: _num_common(one, other)]
        return self._known[system]


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs: Iterable[tuple[int, int]] = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

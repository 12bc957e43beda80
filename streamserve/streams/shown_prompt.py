"""`ShownPrompt`: how much of its prompt an answer has shown, as text and as scores. Pure."""

from __future__ import annotations

from streamserve.protocol.events import BlockStart, Event, Token


class ShownPrompt:
    """How much of its prompt an answer has shown, which is not shown again when the engine is asked to resume it.

    That is its text (`echo`) and the log-probabilities of its tokens: the events before a choice's first id or
    block. Only one choice has log-probabilities.
    """

    def __init__(self) -> None:
        self.num_logprobs = 0
        self._num_chars: dict[int, int] = {}
        self._begun: set[int] = set()

    def takes(self, event: Event) -> bool:
        """Return whether a committed event is of the prompt, and count it."""
        if isinstance(event, BlockStart) or (isinstance(event, Token) and event.token_ids):
            self._begun.add(event.choice)
        if not isinstance(event, Token) or event.choice in self._begun:
            return False
        self._num_chars[event.choice] = self._num_chars.get(event.choice, 0) + len(event.text)
        self.num_logprobs += len(event.logprobs or ())
        return True

    def num_chars(self, n: int) -> tuple[int, ...]:
        """Return how many characters each of `n` choices has shown."""
        return tuple(self._num_chars.get(choice, 0) for choice in range(n))

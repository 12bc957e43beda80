"""The bounds of a grammar, and the errors of a grammar that breaks them or cannot be used. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from streamserve.protocol.errors import BadRequest

# What requests name the field by; other dialects rename it.
PARAM = "grammar"
_CANNOT = "The grammar cannot be used: "
_MAX_SHOWN_CHARS = 300  # of the compiler's message about a caller's grammar
# Lines of the text that was compiled, which is not the caller's own: numbered, or a mark below a place.
_EXCERPT = re.compile(r"^(?: *\d+ \| .*| *\| .*| *\^+ *)$", re.MULTILINE)
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """Checked before a grammar is compiled, while it is proved, and at each token.

    `max_bytes`: what one matcher takes when it is compiled; `max_live_bytes`: all open
    answers' together. `worker_bytes`: what compiling may take meanwhile.
    `max_depth`: nested schemas, groups and brackets. `step_lexer_fuel` and `step_max_items` are llguidance's own units
    of work for one token, about 14,000 and 20,000 a millisecond; a matcher that needs more ends its answer with an
    error. `max_lexer_states` bounds its memory, at 1 to 2 kB each.
    """

    max_chars: int = 65_536
    max_depth: int = 32
    max_nodes: int = 10_000  # subschemas
    compile_seconds: float = 2.0
    max_bytes: int = 16 * 1024 * 1024
    max_live_bytes: int = 512 * 1024 * 1024
    worker_bytes: int = 256 * 1024 * 1024
    cache_bytes: int = 16 * 1024 * 1024
    step_lexer_fuel: int = 100_000
    step_max_items: int = 25_000
    max_lexer_states: int = 16_000


def invalid_grammar(message: str) -> BadRequest:
    """Return the error for a grammar that is none, that no text matches, or that never ends."""
    return refusal("invalid_grammar", message)


def unsupported_grammar(message: str) -> BadRequest:
    """Return the error for a valid grammar that this engine cannot enforce."""
    return refusal("unsupported_grammar", message)


def refusal(code: str, message: str) -> BadRequest:
    """Return the error with a code of the worker's."""
    return BadRequest(_CANNOT + message, code=code, param=PARAM)


def too_complex(message: str) -> BadRequest:
    """Return the error for a grammar that breaks a limit."""
    return refusal("grammar_too_complex", message)


def shown(message: str) -> str:
    """Return the compiler's message, short and in one line, without the text that it quotes."""
    first = " ".join(_EXCERPT.sub("", message.partition("<state>")[0]).split())
    return first if len(first) <= _MAX_SHOWN_CHARS else first[:_MAX_SHOWN_CHARS] + "…"


def without_place(error: BadRequest) -> BadRequest:
    """Return the error without the line and column that it begins with: their text is not the caller's."""
    said = error.message.removeprefix(_CANNOT)
    return refusal(error.code, _PLACE.sub("", said)) if said != error.message else error

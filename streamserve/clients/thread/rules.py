"""What acceptance makes of a request's rules: the tokens of its bad words, and the text that its answer begins with.

Runs on a tokenising thread. Pure but for the tokenizer.
"""

from __future__ import annotations

from streamserve.engine.text.tokenizer import Tokenizer
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.requests import GenerateRequest, SamplingParams

# Log-probabilities that one request may ask for of its prompt: about 6 MB in the log.
MOST_PROMPT_CANDIDATES = 65_536


def bad_word_ids(tokenizer: Tokenizer, sampling: SamplingParams, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each bad word, as they stand at the beginning of a word and within one.

    A tokenizer may have ids that its model lacks: words with these never come.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in sampling.bad_words:
        inner, outer = tokenizer.text_ids(word), tokenizer.text_ids(" " + word.lstrip())
        if not inner:
            raise BadRequest(f"{word!r} has no tokens in this model.", code="invalid_value", param="bad_words")
        found[inner] = None
        # A space of its own before the word changes nothing: the word after it is `inner`.
        if outer and outer[-len(inner) :] != inner:
            found[outer] = None
    return tuple(word for word in found if max(word) < vocab_size)


def refuse_forced_call(request: GenerateRequest) -> None:
    """Raise BadRequest for a forced call of an engine without an output format: the echo engine by itself."""
    if request.tool_choice.mode == "required":
        raise BadRequest(
            "the echo engine makes no tool calls unless MODELS gives it a FORMAT. Set one, such as qwen3, or use "
            "tool_choice auto or none.",
            code="tools_unsupported",
            param="tool_choice",
        )


def check_prompt_logprobs(request: GenerateRequest, num_prompt_tokens: int) -> None:
    """Refuse log-probabilities of a system prompt that is the server's own, and more than a request may have.

    Each prompt token counts, and each candidate beside it.
    """
    top = request.sampling.prompt_logprobs
    if top is None:
        return
    if request.has_public_system:
        message = (
            "prompt_logprobs would show this server's own system prompt. Send messages with one of yours, or a prompt."
        )
        raise BadRequest(message, code="conflicting_fields", param="prompt_logprobs")
    if num_prompt_tokens * (top + 1) > MOST_PROMPT_CANDIDATES:
        raise BadRequest(
            f"prompt_logprobs of {num_prompt_tokens:,} tokens with {top} candidates each; prompt tokens times "
            f"(prompt_logprobs + 1) may be {MOST_PROMPT_CANDIDATES:,}. Shorten the prompt or lower it.",
            code="invalid_value",
            param="prompt_logprobs",
        )


def check_choice(
    sampling: SamplingParams,
    bad_word_ids: tuple[tuple[int, ...], ...],
    eos_token_ids: frozenset[int],
    *,
    has_grammar: bool,
) -> None:
    """Refuse `allowed_token_ids` of which none can be chosen, or perhaps none where a grammar needs another."""
    if has_grammar:
        message = "A grammar decides which tokens are allowed; leave allowed_token_ids out, or the grammar and tools."
        raise BadRequest(message, code="conflicting_fields", param="allowed_token_ids")
    allowed = set(sampling.allowed_token_ids)
    left = allowed - {word[0] for word in bad_word_ids if len(word) == 1}
    if sampling.min_tokens:
        left -= {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    if not left:
        message = "allowed_token_ids leaves no token: bad_words, or min_tokens for an end, forbid all. Allow another."
        raise BadRequest(message, code="conflicting_fields", param="allowed_token_ids")


def echoes(tokenizer: Tokenizer, request: GenerateRequest) -> tuple[str, ...]:
    """Return the prompt's text that each choice of a request with `echo` still has to begin with."""
    if request.messages is not None:
        text = request.messages[-1].content
    else:
        text = tokenizer.decode(request.prompt_token_ids or ()) if request.prompt is None else request.prompt
    shown = (*request.num_prompt_chars, *[0] * (request.n - len(request.num_prompt_chars)))
    return tuple(text[num_chars:] for num_chars in shown[: request.n])

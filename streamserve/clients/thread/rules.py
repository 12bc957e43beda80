"""What acceptance makes of a request's rules: its bad words, the text that its answer begins with, and its grammar.

The first run on a tokenising thread, pure but for the tokenizer. `constrain` runs after acceptance.py, on the grammar
threads: slow, as a grammar may have to be proved first. No engine thread and no loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamserve.engine.grammar.limits import without_place
from streamserve.engine.grammar.matcher import Matcher
from streamserve.engine.text.formats.lark import callable_tools
from streamserve.engine.text.tokenizer import Prompt, Tokenizer
from streamserve.protocol.errors import BadRequest, Overloaded, StreamserveError
from streamserve.protocol.requests import GenerateRequest, Grammar, Resume, SamplingParams, Tool

if TYPE_CHECKING:
    from streamserve.clients.thread.acceptance import LoadedEngine, Prepared

# Log-probabilities that one request may ask for of its prompt: about 6 MB in the log.
MOST_PROMPT_CANDIDATES = 65_536
_MOST_BLAMED = 16  # strict tools whose schemas are looked at one by one when the whole grammar fails


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
    if request.public_messages:
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


def echoes(tokenizer: Tokenizer, request: GenerateRequest, resume: Resume, prompt: Prompt) -> tuple[str, ...]:
    """Return the prompt's text that each choice of a request with `echo` still has to begin with."""
    if request.messages is not None:
        text = request.messages[-1].content
    elif request.prompt is None or request.sampling.truncate_prompt_tokens is not None:
        text = tokenizer.decode(prompt.token_ids)
    else:
        text = request.prompt
    shown = (*resume.num_prompt_chars, *[0] * (request.n - len(resume.num_prompt_chars)))
    return tuple(text[num_chars:] for num_chars in shown[: request.n])


def constrain(engine: LoadedEngine, prepared: Prepared) -> Prepared:
    """Compile the grammar, and move each choice's matcher over the tokens that were shown of it.

    Raises BadRequest, whose param names the tool or the field at fault, or Overloaded if too many wait to be proved.
    """
    if prepared.grammar is None:
        return prepared
    request = prepared.request
    if request.grammar is not None and request.grammar != prepared.grammar:
        engine.grammars.check(request.grammar)  # by itself: within the whole output its faults would be hard to find
    held = _with_forced_schemas(engine, prepared)
    if held is not None:
        try:
            return replace(prepared, matchers=_matchers(engine, prepared, held))
        except Overloaded:
            raise
        except StreamserveError:  # strict arguments were not asked for: free JSON is valid
            pass
    try:
        return replace(prepared, matchers=_matchers(engine, prepared, prepared.grammar))
    except BadRequest as error:
        raise _blamed(engine, request, prepared.grammar, error) from None


def _matchers(engine: LoadedEngine, prepared: Prepared, grammar: Grammar) -> tuple[Matcher, ...]:
    sampling = prepared.sampling
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else prepared.eos_token_ids)}
    shown = [prepared.resume.output_of(index) for index in range(prepared.request.n)]
    texts = [ids[:-1] if ids and ids[-1] in ends else ids for ids in shown]
    return engine.grammars.matchers(grammar, texts)


def _with_forced_schemas(engine: LoadedEngine, prepared: Prepared) -> Grammar | None:
    """Return the grammar that holds a forced call to its schema, strict or not; None where it holds no more.

    A caller that forces a call reads its arguments by the schema: `instructor` never says `strict`. A schema that
    cannot be enforced is left out.
    """
    request = prepared.request
    if engine.format is None or request.tool_choice.mode != "required":
        return None
    tools = tuple(tool if tool.strict else replace(tool, strict=_is_held(engine, tool)) for tool in request.tools)
    if tools == request.tools:
        return None
    try:
        return engine.format.grammar(replace(request, tools=tools), prepared.prompt)
    except BadRequest:  # the model's markup cannot hold it
        return None


def _is_held(engine: LoadedEngine, tool: Tool) -> bool:
    try:
        engine.grammars.check(_arguments(tool.parameters))
    except BadRequest:
        return False
    return True


def _arguments(parameters: Mapping[str, Any]) -> Grammar:
    return Grammar(kind="json_schema", value=json.dumps({"type": "object", **parameters}))


def _blamed(engine: LoadedEngine, request: GenerateRequest, grammar: Grammar, error: BadRequest) -> BadRequest:
    """Return the error with the strict tool at fault, if one is by itself; of `tools` where nothing else binds.

    Else the request's own grammar by itself is at fault, where it is: of that of the whole output callers know nothing.
    """
    for tool in [tool for tool in callable_tools(request) if tool.strict][:_MOST_BLAMED]:
        fault = engine.grammars.fault(_arguments(tool.parameters))
        if fault is not None:
            param = f"tools[{request.tools.index(tool)}]"
            return BadRequest(f"{tool.name}: {fault.message}", code=fault.code, param=param)
    if request.grammar is None:
        error.param = "tools"
        return without_place(error)
    if request.grammar == grammar:
        return error
    return engine.grammars.fault(request.grammar) or without_place(error)

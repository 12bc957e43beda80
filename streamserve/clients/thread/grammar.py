"""`constrain`: hold each choice of an accepted request to its grammar, or name the tool or field that is at fault.

Runs after acceptance.py, on the grammar threads: slow, as a grammar may have to be proved first. No engine thread and
no loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streamserve.clients.thread.acceptance import LoadedEngine, Prepared
from streamserve.engine.grammar.limits import without_place
from streamserve.engine.grammar.matcher import Matcher
from streamserve.engine.text.formats.lark import callable_tools
from streamserve.protocol.errors import BadRequest, Overloaded, StreamserveError
from streamserve.protocol.requests import GenerateRequest, Grammar, Tool

_MOST_BLAMED = 16  # strict tools whose schemas are looked at one by one when the whole grammar fails


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

    A caller that forces a call reads its arguments by the schema: `instructor` never sends `strict`. A schema that
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
    """Return the error with the strict tool at fault, if a tool is by itself; of `tools` where nothing else binds.

    Else the request's own grammar is blamed, where it has a fault by itself: callers do not know the grammar of the
    whole output.
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

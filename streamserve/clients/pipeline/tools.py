"""Python functions as tools of a model: their schemas from their signatures, and their calls.

    def weather(city: str, unit: Literal["C", "F"] = "C") -> str:
        '''Return the weather of a city.'''

    @tool(confirm=lambda number: f"Cancel invoice {number}?")
    def cancel_invoice(number: int) -> str: ...

The arguments that a model writes are checked against the signature; the model gets an error for wrong arguments, and
may try again. Pure but for the call.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from streamserve.protocol.json_body import loads_written
from streamserve.protocol.requests import Tool

_KINDS: Mapping[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_MAX_RESULT_CHARS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that a model has made: `arguments` is the JSON that it wrote, right or wrong."""

    id: str
    name: str
    arguments: str


# Whether a call needs its user's approval: always, never, or a function of the arguments, which returns what to ask.
Confirm = bool | Callable[..., Any]


class WrongCall(Exception):
    """A call that the function cannot take. The message is for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """A function, and its description for the model. `confirm`: see `tool`."""

    tool: Tool
    function: Callable[..., Any]
    confirm: Confirm = False
    kind: ClassVar[str] = "function"  # in a trace

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function, as its module does that has decorated it."""
        return self.function(*args, **options)

    def arguments(self, text: str) -> dict[str, Any]:
        """Return the arguments of a call. Raises WrongCall."""
        values = read_arguments(text)
        properties = self.tool.parameters["properties"]
        missing = [name for name in self.tool.parameters["required"] if name not in values]
        unknown = [name for name in values if name not in properties]
        if missing or unknown:
            known = ", ".join(properties) or "none"
            wrong = f"Missing: {', '.join(missing) or '-'}. Unknown: {', '.join(unknown) or '-'}."
            raise WrongCall(f"{wrong} Known: {known}.")
        for name, value in values.items():
            if not _matches(value, properties[name]):
                raise WrongCall(f"{name} must be {json.dumps(properties[name])}, not {json.dumps(value)[:100]}.")
        return values


def read_arguments(text: str) -> dict[str, Any]:
    """Return the JSON object that a model wrote as arguments. Raises WrongCall."""
    try:
        values = loads_written(text or "{}")
    except ValueError as error:
        raise WrongCall(f"The arguments are no JSON: {error}") from None
    if not isinstance(values, dict):
        raise WrongCall("The arguments are no JSON object.")
    return values


def tool(function: Callable[..., Any] | FunctionTool | None = None, *, confirm: Confirm = False) -> Any:
    """Return a function (or a tool, as of an MCP server) as a tool that asks first; also a decorator.

    With `confirm` True the run ends in `interrupt` at each call, until its user allows the call. A function is given
    the arguments of the call and returns what the user is asked, True for no question of its own, or False for a call
    that needs no approval. Raises TypeError for a parameter whose type has no schema here.
    """
    if function is None:
        return lambda one: tool(one, confirm=confirm)
    return replace(function_tool(function), confirm=confirm)


def function_tool(function: Callable[..., Any] | FunctionTool) -> FunctionTool:
    """Return a function as a tool; a tool as it is. Raises TypeError for a parameter whose type has no schema here."""
    if isinstance(function, FunctionTool):
        return function
    hints = get_type_hints(function)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"the tool {function.__name__} takes *args or **kwargs; name its parameters")
        if name not in hints:
            raise TypeError(f"the parameter {name} of the tool {function.__name__} has no type")
        properties[name] = _schema(hints[name], f"{function.__name__}({name})")
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    description = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0]
    return FunctionTool(
        tool=Tool(name=function.__name__, description=description, parameters=parameters), function=function
    )


def result_text(result: Any) -> str:
    """Return a result as the model gets it: text as it is, anything else as JSON; a long result is cut."""
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_RESULT_CHARS else text[:_MAX_RESULT_CHARS] + "…"


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _KINDS:
        return {"type": _KINDS[hint]}
    if origin is Literal and all(isinstance(one, str) for one in arguments):
        return {"type": "string", "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0], where)}
    if origin in (Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        (inner,) = [one for one in arguments if one is not type(None)]
        return _schema(inner, where)
    raise TypeError(f"{where} has the type {hint}: use str, int, float, bool, list[...] or Literal of strings")


def _matches(value: Any, schema: Mapping[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "array":
        return isinstance(value, list) and all(_matches(one, schema["items"]) for one in value)
    if isinstance(value, bool) or schema["type"] == "boolean":
        return isinstance(value, bool) and schema["type"] == "boolean"
    kinds: dict[str, Any] = {"string": str, "integer": int, "number": (int, float)}
    return isinstance(value, kinds[schema["type"]])

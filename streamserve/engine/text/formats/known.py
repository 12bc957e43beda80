"""The formats of known models, as data: how each marks thoughts and tool calls. docs/reasoning-and-tools.md lists them.

Sources of the markup: the models' chat templates and, for gpt-oss, OpenAI's harmony guide; tests/data/formats/ has real
answers with their origin. «tag» stands for a tag, which may be one token or not. Pure data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streamserve.engine.text.formats.regions import CALLS, TEXT, THINKING, TOOL_USE, Region
from streamserve.engine.text.formats.xml_call import calls_of

_NAME = r"(?P<name>[^\s\[\]{}<>\uD800-\uDFFF]{1,128})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMarkup:
    """One family of models. `is_it(template, has_tag)`: whether a tokenizer belongs to the family.

    The rest is how an output that a grammar holds is written. `thought` and `answer` have $text for what they frame,
    `call` has $name, or $bare_name, and $arguments, or $parameters in XML. Calls stand between `calls_begin` and
    `calls_end`, `calls_between` between two.
    """

    name: str
    regions: tuple[Region, ...]
    is_it: Callable[[str, Callable[[str], bool]], bool]
    call: str = ""
    calls_begin: str = ""
    calls_between: str = ""
    calls_end: str = ""
    thought: str = ""
    answer: str = "$text"


_THINK = Region(kind=THINKING, opening="«<think>»", closing=r"\s{0,8}«</think>»")
_THINK_TEXT = "«<think>»\n$text«</think>»\n\n"
_JSON_CALL = Region(kind=TOOL_USE, opening="«<tool_call>»", closing=r"\s*«</tool_call>»")
_JSON_CALL_TEXT = '«<tool_call>»\n{"name": $name, "arguments": $arguments}\n«</tool_call>»'

QWEN3 = ModelMarkup(
    name="qwen3",
    regions=(_THINK, _JSON_CALL),
    is_it=lambda template, has_tag: "<tool_call>" in template and "</think>" in template,
    thought=_THINK_TEXT,
    call=_JSON_CALL_TEXT,
    calls_between="\n",
)

# The model sometimes leaves out an outer tag. Without the first tag only tools of the request are calls; whether the
# last tag is there is decided by the text after it.
_XML_CALL = Region(
    kind=TOOL_USE,
    opening=rf"(?:(?P<tag>«<tool_call>»)\s*)?<function={_NAME}>",
    closing=r"(?:(?<=</parameter>\s*)|\A\s*)</function>"
    r"(?:\s*«</tool_call>»|(?=\s*+(?!«</tool_call>»)(?:[^\s<\uD800-\uDFFF]|.{12})))",
    read=calls_of,
)

QWEN3_CODER = ModelMarkup(
    name="qwen3_coder",
    regions=(_THINK, _XML_CALL),
    is_it=lambda template, has_tag: "<function=" in template and "<parameter=" in template,
    thought=_THINK_TEXT,
    call="«<tool_call>»\n<function=$bare_name>\n$parameters</function>\n«</tool_call>»",
    calls_between="\n",
)

SMOLLM3 = ModelMarkup(
    name="smollm3",
    regions=(_THINK, _JSON_CALL),
    is_it=lambda template, has_tag: "xml_tools" in template and "/no_think" in template,
    thought="«<think>»\n$text«</think>»\n",
    call='«<tool_call>»{"name": $name, "arguments": $arguments}«</tool_call>»',
    calls_between="\n",
)

HERMES = ModelMarkup(
    name="hermes",
    regions=(_JSON_CALL,),
    is_it=lambda template, has_tag: "<tool_call>" in template and "<function=" not in template,
    call=_JSON_CALL_TEXT,
    calls_between="\n",
)

THINK = ModelMarkup(
    name="think",
    regions=(_THINK,),
    is_it=lambda template, has_tag: "</think>" in template or (has_tag("<think>") and has_tag("</think>")),
    thought=_THINK_TEXT,
)

_LLAMA_NEXT = r"\s*(?:;|\n)\s*(?=\{)"

LLAMA3 = ModelMarkup(
    name="llama3",
    regions=(
        Region(kind=TOOL_USE, opening=r"«<|python_tag|>»\s*(?=\{)", separator=_LLAMA_NEXT),
        Region(kind=TOOL_USE, opening=r"\s{0,8}(?=\{)", separator=_LLAMA_NEXT, is_first=True),
    ),
    is_it=lambda template, has_tag: has_tag("<|python_tag|>"),
    call='{"name": $name, "parameters": $arguments}',
    calls_between="; ",
)

MISTRAL = ModelMarkup(
    name="mistral",
    regions=(
        Region(kind=THINKING, opening="«[THINK]»", closing=r"\s{0,8}«[/THINK]»"),
        Region(
            kind=TOOL_USE,
            opening=rf"«[TOOL_CALLS]»\s*{_NAME}\s*(?:«[CALL_ID]»\w{{1,64}})?(?:«[ARGS]»|(?=\s*\{{))",
        ),
        Region(kind=TOOL_USE, opening=r"«[TOOL_CALLS]»\s*\[(?=\s*\{)", separator=r"\s*,\s*(?=\{)", closing=r"\s*\]"),
    ),
    is_it=lambda template, has_tag: has_tag("[TOOL_CALLS]"),
    thought="«[THINK]»$text«[/THINK]»",
    call="«[TOOL_CALLS]»$bare_name«[ARGS]»$arguments",
)

# Mistral's models before the eleventh version of its tokenizer, which write one list of calls.
MISTRAL_LIST = ModelMarkup(
    name="mistral_list",
    regions=MISTRAL.regions,
    is_it=lambda template, has_tag: has_tag("[TOOL_CALLS]") and not has_tag("[ARGS]"),
    calls_begin="«[TOOL_CALLS]» [",
    call='{"name": $name, "arguments": $arguments}',
    calls_between=", ",
    calls_end="]",
)

_HEAD = "(?:«<|start|>»assistant)?"
_TO = r"\s*to=(?:functions\.)?(?P<name>[\w.-]{1,128})"
_KIND = r"\s*(?:«<|constrain|>»)?\s*\w{0,32}\s*"
_CHANNEL = r"«<|channel|>»"
_END = "«<|end|>»|«<|return|>»"

HARMONY = ModelMarkup(
    name="harmony",
    regions=(
        Region(
            kind=TOOL_USE,
            opening=rf"{_HEAD}(?:{_TO}\s*{_CHANNEL}\w{{1,32}}|{_CHANNEL}\w{{1,32}}{_TO}){_KIND}«<|message|>»",
            closing=r"\s*(?:«<|call|>»|«<|end|>»)",
        ),
        Region(kind=THINKING, opening=f"{_HEAD}{_CHANNEL}analysis«<|message|>»", closing=_END),
        Region(kind=TEXT, opening=f"{_HEAD}{_CHANNEL}(?:final|commentary){_KIND}«<|message|>»", closing=_END),
    ),
    is_it=lambda template, has_tag: all(map(has_tag, ("<|channel|>", "<|message|>", "<|start|>", "<|call|>"))),
    thought="«<|channel|>»analysis«<|message|>»$text«<|end|>»«<|start|>»assistant",
    call="«<|channel|>»commentary to=functions.$bare_name «<|constrain|>»json«<|message|>»$arguments",
    calls_between="«<|call|>»«<|start|>»assistant",
    answer="«<|channel|>»final«<|message|>»$text",
)

_DEEPSEEK_CALL = r"""(?:«<｜tool▁calls▁begin｜>»\s*)?«<｜tool▁call▁begin｜>»\s*"""

DEEPSEEK_R1 = ModelMarkup(
    name="deepseek_r1",
    regions=(
        _THINK,
        Region(
            kind=TOOL_USE,
            opening=_DEEPSEEK_CALL + rf"function«<｜tool▁sep｜>»{_NAME}\s*```json\s*",
            closing=r"\s*```\s*«<｜tool▁call▁end｜>»",
        ),
        Region(
            kind=TOOL_USE,
            opening=_DEEPSEEK_CALL + rf"{_NAME}«<｜tool▁sep｜>»\s*(?=\{{)",
            closing=r"\s*«<｜tool▁call▁end｜>»",
        ),
        Region(kind=CALLS, opening=r"\s*«<｜tool▁calls▁end｜>»"),
    ),
    is_it=lambda template, has_tag: "<｜tool▁calls▁begin｜>" in template,
    thought=_THINK_TEXT,
    calls_begin="«<｜tool▁calls▁begin｜>»",
    call="«<｜tool▁call▁begin｜>»function«<｜tool▁sep｜>»$bare_name\n```json\n$arguments\n```«<｜tool▁call▁end｜>»",
    calls_between="\n",
    calls_end="«<｜tool▁calls▁end｜>»",
)

# In the order in which they are recognised: the more particular families first.
KNOWN = (HARMONY, MISTRAL_LIST, MISTRAL, DEEPSEEK_R1, LLAMA3, SMOLLM3, QWEN3_CODER, QWEN3, HERMES, THINK)
# Other names for the setting.
ALIASES = {"qwen3.5": "qwen3_coder", "gpt-oss": "harmony", "deepseek-r1": "deepseek_r1", "qwen2": "hermes"}

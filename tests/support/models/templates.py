"""Chat templates in the forms of well-known families, each written here for the tests; and what each cannot show.

A form is what a template asks of a conversation: which roles, content as text or parts, arguments as an object or as
text, null or no text beside a call. The markup is the same in all: `<|role|>`, `<call>`, `<end>`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A template; `refuses` names the roles, and "calls", "tools" and "text beside calls", that it does not show."""

    template: str
    refuses: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()


def _shape(template: str, *refuses: str, reads: tuple[str, ...] = ()) -> Shape:
    return Shape(template, frozenset(refuses), frozenset(reads))


_ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_TOOLS = "{% if tools %}<|tools|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<end>{% endif %}"
_CALL = "<call>{{ call.function.name }} "
_RESULTS = ("tool", "function", "calls", "tools", "text beside calls")

SHAPES = {
    # Any role by its name, content only.
    "chatml": _shape(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>{% endfor %}" + _ASK,
        "calls", "tools",
    ),
    # System, user, assistant and tool, nothing else; arguments of both kinds; a switch of its own.
    "qwen3": _shape(
        _TOOLS
        + "{% for m in messages %}"
        "{% if m.role == 'user' or m.role == 'system' %}<|{{ m.role }}|>{{ m.content }}<end>"
        "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content if m.content is string else '' }}"
        "{% for call in m.tool_calls or [] %}" + _CALL
        + "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
        "{% endfor %}<end>"
        "{% elif m.role == 'tool' %}<|user|><result>{{ m.content }}<end>{% endif %}{% endfor %}" + _ASK
        + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
        reads=("enable_thinking",),
    ),
    # Content is parts, in turns of the user and the assistant only.
    "guard": _shape(
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<|{{ m.role }}|>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
        "<end>{% endfor %}" + _ASK,
        "system", "developer", *_RESULTS,
    ),
    # Calls beside null only, arguments joined as text; the last system turn counts; no tools.
    "r1": _shape(
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
        "{% set ns.system = m['content'] %}{% endif %}{% endfor %}{{ ns.system }}"
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>' + m['content'] }}{% endif %}"
        "{% if m['role'] == 'assistant' and m['content'] is none %}{% for call in m['tool_calls'] %}"
        "{{ '<call>' + call['type'] + call['function']['name'] + '\n' + call['function']['arguments'] + '<end>' }}"
        "{% endfor %}{% endif %}"
        "{% if m['role'] == 'assistant' and m['content'] is not none %}"
        "{{ '<|assistant|>' + m['content'].split('</think>')[-1] + '<end>' }}{% endif %}"
        "{% if m['role'] == 'tool' %}{{ '<result>' + m['content'] + '<end>' }}{% endif %}{% endfor %}" + _ASK,
        "tools",
    ),
    # The same, but text beside a call is a turn, and an empty one too.
    "r1-distill": _shape(
        _TOOLS
        + "{% for m in messages %}{% if m.role in ('user', 'system') %}<|{{ m.role }}|>{{ m.content }}<end>{% endif %}"
        "{% if m.role == 'assistant' %}{% if m.content is not none %}<|assistant|>{{ m.content }}<end>{% endif %}"
        "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + call.function.arguments }}<end>"
        "{% endfor %}{% endif %}"
        "{% if m.role == 'tool' %}<result>{{ m.content }}<end>{% endif %}{% endfor %}" + _ASK,
    ),
    # Arguments are iterated; a role that is unknown raises.
    "qwen-xml": _shape(
        _TOOLS
        + "{% for m in messages %}"
        "{% if m.role in ('user', 'system', 'assistant') %}<|{{ m.role }}|>{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}{% for name, value in "
        "call.function.arguments | items %}<{{ name }}>{{ value if value is string else value | tojson }}{% endfor %}"
        "{% endfor %}<end>"
        "{% elif m.role == 'tool' %}<result>{{ m.content }}<end>"
        "{% else %}{{ raise_exception('Unexpected message role.') }}{% endif %}{% endfor %}" + _ASK,
    ),
    # Turns alternate, ids are short, no text beside calls, tools before the last question, one system turn.
    "mistral": _shape(
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
        "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
        "{% set ns = namespace(index=0, last=-1) %}"
        "{% for m in turns %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
        "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
        "{% for m in turns %}{% if m.role == 'user' %}"
        "{% if tools and loop.index0 == ns.last %}<|tools|>{{ tools | tojson }}{% endif %}"
        "<|user|>{{ system if loop.first }} {{ m.content }}<end>"
        "{% elif m.tool_calls %}{% for call in m.tool_calls %}{% if call.id is not defined or call.id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
        "<call>{{ call.function | tojson }}{{ call.id }}{% endfor %}<end>"
        "{% elif m.role == 'assistant' %}{{ m.content }}<end>"
        "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
        "<result>{{ m.content }}{{ m.tool_call_id }}<end>"
        "{% else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}{% endfor %}",
    ),
    # No system turns.
    "gemma2": _shape(
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "<|{{ 'model' if m.role == 'assistant' else m.role }}|>{{ m.content | trim }}<end>{% endfor %}" + _ASK,
        "system", "developer", *_RESULTS,
    ),
    # Any role by its name; no text beside a call; results as JSON; null content is printed.
    "llama3": _shape(
        "{% if messages[0].role == 'system' %}<|system|>{{ messages[0].content | trim }}{% set turns = messages[1:] %}"
        "{% else %}<|system|>{% set turns = messages %}{% endif %}"
        "{% for tool in tools or [] %}{{ tool | tojson(indent=4) }}{% endfor %}<end>"
        "{% for m in turns %}{% if not (m.role == 'tool' or 'tool_calls' in m) %}"
        "<|{{ m.role }}|>{{ m.content | trim }}<end>"
        "{% elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
        "<|assistant|>{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}<end>"
        "{% else %}<|ipython|>{{ m.content | tojson }}<end>{% endif %}{% endfor %}" + _ASK
        + "{{ date_string if date_string is defined }}",
        reads=("date_string",),
    ),
    # Developers have a role of their own; results have the name of the last call; text beside an early call is dropped.
    "harmony": _shape(
        "{% if messages[0].role in ('system', 'developer') %}<|developer|>{{ messages[0].content }}<end>"
        "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}{{ tools | tojson if tools }}"
        "{% set ns = namespace(called=none) %}{% for m in turns %}"
        "{% if m.role == 'user' %}<|user|>{{ m.content }}<end>"
        "{% elif m.role == 'assistant' and m.tool_calls %}{% set future = namespace(final=false) %}"
        "{% for later in turns[loop.index:] %}{% if later.role == 'assistant' and not later.tool_calls %}"
        "{% set future.final = true %}{% endif %}{% endfor %}"
        "{% if m.content and not future.final %}<|analysis|>{{ m.content }}<end>{% endif %}"
        "{% set ns.called = m.tool_calls[0].function.name %}"
        "<call>{{ ns.called }} {{ m.tool_calls[0].function.arguments | tojson }}<end>"
        "{% elif m.role == 'assistant' %}<|final|>{{ m.content }}<end>{% set ns.called = none %}"
        "{% elif m.role == 'tool' %}{% if ns.called is none %}"
        "{{ raise_exception('a tool role without a call before it') }}{% endif %}"
        "<|{{ ns.called }}|>{{ m.content | tojson }}<end>{% endif %}{% endfor %}" + _ASK,
    ),
    # Text or parts; arguments are printed as they are, which of an object is Python's notation.
    "printed": _shape(
        _TOOLS
        + "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
        "{% for call in m.tool_calls or [] %}" + _CALL + "{{ call.function.arguments }}{% endfor %}<end>"
        "{% endfor %}" + _ASK,
    ),
}  # fmt: skip

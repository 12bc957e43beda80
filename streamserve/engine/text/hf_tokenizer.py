"""`HFTokenizer`: tokenizer and chat template of a model folder, hub id or GGUF file, as transformers would read them.

transformers is imported when a tokenizer is made. The template runs in transformers' own jinja sandbox, and control
tokens that a caller wrote into a message are encoded as ordinary text, so that a turn cannot be forged. Chats are
rendered one at a time and encoded side by side: transformers' wrapper changes settings of its Rust tokenizer on every
call, so each call has a wrapper to itself. All else uses a copy that never changes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from queue import LifoQueue
from typing import Any

from streamserve.engine.model.load.errors import ModelLoadError
from streamserve.engine.model.load.gguf.file import SUFFIX
from streamserve.engine.text.chat_template import ChatTemplate, variables
from streamserve.engine.text.gguf_tokenizer import open_gguf
from streamserve.engine.text.tokenizer import Prompt, checked_bytes, checked_ids, checked_kwargs
from streamserve.protocol.errors import BadRequest, EngineUnavailable, NoChatTemplate
from streamserve.protocol.requests import RESERVED_TEMPLATE_NAMES, GenerateRequest, Message, Tool

logger = logging.getLogger(__name__)

# Chats encoded at once: as many as there are tokenising threads (clients/thread/client.py).
NUM_ENCODERS = 2
_NOT_FAST = "{path} has no tokenizer.json that transformers can use. Save it again with a current transformers."

# The round-trip at load: what splits code points, has runs of spaces, and starts with or without a space.
_SAMPLES = (
    "Hello, world!",
    " leading space",
    "two  spaces\n\nand\ttab",
    "naïve café: 静かな河 🙂🦊",
    "👩‍🚀 क्षत्रिय, x = {1: 2}",
)
# What Mistral's templates refuse other ids of tool calls with: theirs have nine characters, or at least nine.
_SHORT_IDS = "Tool call IDs should be alphanumeric strings with length"
_SHORT_ID = re.compile(r"[0-9A-Za-z]{9}")
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "▁"


class HFTokenizer:
    """See `Tokenizer`. `chat_template`: the name of the template to use, of a model that has several; "": "default".

    A request with tools is rendered by the template named "tool_use", if the model has it.
    """

    def __init__(self, path: str, chat_template: str = "") -> None:
        from tokenizers import Tokenizer

        try:
            self._hf = _open(path)
        except ModelLoadError:
            raise
        except Exception as error:  # absent or cut; the tokenizers library raises bare `Exception`s
            cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
            raise EngineUnavailable(f"{_NOT_FAST.format(path=path)} ({cause})", code="load_failed") from error
        if not self._hf.is_fast:
            raise EngineUnavailable(_NOT_FAST.format(path=path), code="load_failed")
        _choose_template(self._hf, chat_template, path)
        self._renderer = _as_renderer(self._hf)
        self._options: dict[str, Any] = {}  # that `apply_chat_template` encodes with, the same each time
        self._encoders: LifoQueue[Any] = LifoQueue()  # those that encode no chat just now
        for encoder in (self._hf, *(copy.deepcopy(self._hf) for _ in range(NUM_ENCODERS - 1))):
            self._encoders.put(encoder)
        self._rust = Tokenizer.from_str(self._hf.backend_tokenizer.to_str())
        self._rust.no_truncation()
        self._rust.no_padding()
        self.has_chat_template: bool = self._hf.chat_template is not None
        self.chat_template = _joined_template(self._hf.chat_template)
        names = self._hf.special_tokens_map.keys() | RESERVED_TEMPLATE_NAMES
        self.template_variables = variables(self.chat_template) - names
        self.template = ChatTemplate(self._render) if self.has_chat_template else None
        self.response_template: dict[str, Any] | None = getattr(self._hf, "response_template", None)
        self.eos_token_ids: frozenset[int] = frozenset({self._hf.eos_token_id} - {None})
        added = self._rust.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_ids = {token.content: token_id for token_id, token in added.items()}
        decoder = json.loads(self._rust.to_str()).get("decoder") or {}
        self.strips_leading_space = _strips_leading_space(decoder)
        self._bytes = _bytes_of_ids(self._rust, decoder)
        self.vocab_size = len(self._bytes)  # the highest id + 1: there may be holes below it
        self.is_byte_exact = self._is_round_trip_exact()
        if not self.is_byte_exact:
            logger.warning("tokenizer %s is not a map from ids to bytes; its text is decoded by windows", path)

    def ids(self) -> dict[str, int]:
        """Return the id of each token, by the tokenizer's own spelling."""
        return self._rust.get_vocab(with_added_tokens=True)

    def encode(self, request: GenerateRequest) -> Prompt:
        """Render and tokenise. A template's text holds its special tokens; a bare prompt gets the model's own."""
        if request.prompt_token_ids is not None:
            return Prompt(token_ids=checked_ids(request.prompt_token_ids, self.vocab_size))
        if request.messages is not None:
            return Prompt(token_ids=checked_ids(self._encode_chat(request, request.messages), self.vocab_size))
        text = request.prompt or ""
        checked_bytes(text)
        return Prompt(token_ids=checked_ids(tuple(self._rust.encode(text).ids), self.vocab_size))

    def _encode_chat(self, request: GenerateRequest, messages: tuple[Message, ...]) -> tuple[int, ...]:
        if self.template is None:
            raise NoChatTemplate("this model has no chat template. Send `prompt` instead of `messages`.")
        options = checked_kwargs(request, self.template_variables)
        if request.continue_final_message:
            options["continue_final_message"] = True
        options.setdefault("add_generation_prompt", not options.get("continue_final_message", False))
        checked_bytes("".join(message.content for message in messages))
        has_tools = bool(request.tools) and request.tool_choice.mode != "none"
        tools = [_tool_as_dict(tool) for tool in request.tools] if has_tools else None
        text = self.template.prompt(messages, tools, has_own_system=request.has_public_system, **options)
        try:
            return tuple(self._encode_rendered(text))
        except Exception as error:
            logger.info("a rendered chat could not be encoded", exc_info=True)
            message = "the model's chat template cannot render these messages."
            raise BadRequest(message, code="template_error", param="messages") from error

    def _render(self, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **options: Any) -> str:
        """Return the text of a chat, with the control tokens that a caller wrote marked."""
        if _SHORT_IDS in self.chat_template:
            turns = [_with_short_ids(turn) for turn in turns]
        turns = [{name: _NULL if value is None else value for name, value in turn.items()} for turn in turns]
        text, self._options = self._renderer.apply_chat_template(
            turns, tools=tools, return_dict=False, sanitize_control_tokens=True, **options
        )
        return str(text)

    def _encode_rendered(self, text: str) -> list[int]:
        """Encode as `apply_chat_template` would have; here the GIL is free for the engine and for the next chat."""
        encoder = self._encoders.get()
        try:
            ids: list[int] = encoder(text, **self._options)["input_ids"]
        finally:
            self._encoders.put(encoder)
        return ids

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a piece of text, without those that begin or end a prompt."""
        return tuple(self._rust.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; b"" for ids without any."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is left out of the text."""
        return token_id in self._special

    def tag_id(self, text: str) -> int | None:
        """Return the id of an added token, None for text that is none."""
        return self.added_ids.get(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, specials left out."""
        return str(self._rust.decode(list(token_ids), skip_special_tokens=True))

    def _is_round_trip_exact(self) -> bool:
        return all(map(self._is_exact, _SAMPLES))

    def _is_exact(self, text: str) -> bool:
        ids = self._rust.encode(text, add_special_tokens=False).ids
        ours = b"".join(map(self.token_bytes, ids)).decode(errors="replace")
        if self.strips_leading_space:
            ours = ours.removeprefix(" ")
        return bool(ours == self.decode(ids))


def require_same_tokens(tokenizer: HFTokenizer, path: str, draft: str) -> None:
    """Raise `ModelLoadError` unless a draft model has the tokens of the model at `path`, each with its id."""
    own, other = tokenizer.ids(), HFTokenizer(draft).ids()
    differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    if not differing:
        return
    token = differing[0]
    ids = " and ".join("none" if token_id is None else str(token_id) for token_id in (own.get(token), other.get(token)))
    raise ModelLoadError(
        f"{draft} cannot be the draft model of {path}: {len(differing):,} of their {len(own):,} and {len(other):,} "
        f"tokens differ (the ids of {token!r} are {ids}). Name a smaller model of the same family in DRAFT, or none."
    )


def _open(path: str) -> Any:
    """Return transformers' tokenizer of a folder, a hub id, or a GGUF file."""
    from transformers import AutoTokenizer

    if path.endswith(SUFFIX):
        return open_gguf(path)
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def template_notes(folder: str, name: str = "") -> tuple[str, ...]:
    """Return what the chat template of a model folder shows, for operators; () where its tokenizer cannot be read."""
    try:
        tokenizer = HFTokenizer(folder, name)
    except Exception as error:
        logger.info("the tokenizer of %s cannot be read: %s", folder, error)
        return ()
    if tokenizer.template is None:
        return ("none",)
    reads = sorted(tokenizer.template_variables)
    return (*tokenizer.template.notes(), *([f"reads {', '.join(reads)}"] if reads else []))


def _choose_template(hf: Any, name: str, path: str) -> None:
    """Make the named template the default; raise where no template has that name, or there is no default."""
    templates = hf.chat_template
    if not isinstance(templates, dict):
        if name:
            has = "one chat template, without a name" if templates else "no chat template"
            raise _template_error(f"{path} has {has}. Take CHAT_TEMPLATE out.")
        return
    known = ", ".join(sorted(templates))
    chosen = name or ("default" if len(templates) > 1 else next(iter(templates), "default"))
    if chosen not in templates:
        reason = f"no chat template {name!r}" if name else "several chat templates and no default"
        raise _template_error(f"{path} has {reason}. Set CHAT_TEMPLATE to one of: {known}.")
    hf.chat_template = {**templates, "default": templates[chosen]}


def _template_error(message: str) -> EngineUnavailable:
    return EngineUnavailable(message, code="load_failed")


class _Null(str):
    """Stands for null in a turn on its way through `apply_chat_template`, which takes out fields that are null."""

    __slots__ = ()


_NULL = _Null()


def _as_renderer(hf: Any) -> Any:
    """Return a tokenizer whose `apply_chat_template` gives the text, and the options that it would be encoded with.

    Its templates see null where a turn has it: those that ask `content is none` leave out a call beside "". Should
    transformers rename the method that is overridden, they see "", and the probes find what that shows. Control tokens
    are marked in the keys of arguments, schemas and variables too: templates write them out.
    """

    def give_back(self: Any, text: str, **options: Any) -> dict[str, Any]:
        return {"input_ids": (text, options)}

    def mark(self: Any, template: str, chats: list[list[dict[str, Any]]], *rest: Any) -> Any:
        mark_inputs = super(type(self), self)._mark_chat_inputs
        marked = mark_inputs(template, chats, *rest)
        keys = sorted(_keys(marked))  # which it leaves as they are
        marked_keys = mark_inputs(template, [], keys, None, {}, True, False)[1]
        if marked_keys != keys:
            marked = _with_keys(marked, dict(zip(keys, marked_keys, strict=True)))
        nulls = [[[name for name, value in turn.items() if value is _NULL] for turn in chat] for chat in chats]
        with_nulls = [
            [{**turn, **dict.fromkeys(names)} for turn, names in zip(*pair, strict=True)]
            for pair in zip(marked[0], nulls, strict=True)
        ]
        return with_nulls, *marked[1:]

    renderer = copy.copy(hf)
    renderer.__class__ = type("Renderer", (type(hf),), {"__call__": give_back, "_mark_chat_inputs": mark})
    return renderer


def _keys(value: Any) -> set[str]:
    """Return the keys of all objects in a value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    own = {key for key in value if isinstance(key, str)} if isinstance(value, dict) else set()
    return own.union(*map(_keys, inner))


def _with_keys(value: Any, names: Mapping[str, str]) -> Any:
    """Return a value whose objects have other names for their keys. Raises ValueError for two of the same name."""
    if isinstance(value, list | tuple):
        return type(value)(_with_keys(one, names) for one in value)
    if not isinstance(value, dict):
        return value
    out = {names.get(key, key): _with_keys(one, names) for key, one in value.items()}
    if len(out) != len(value):
        raise ValueError("two keys differ in nothing but private marks")
    return out


def _bytes_of_ids(rust: Any, decoder: dict[str, Any]) -> list[bytes]:
    """Return each id's bytes. Added tokens are their own text, independent of the decoder."""
    kinds = _kinds(decoder)
    added = rust.get_added_tokens_decoder()
    out = [b""] * (max(rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
    for piece, token_id in rust.get_vocab(with_added_tokens=True).items():
        if token_id in added:
            out[token_id] = added[token_id].content.encode()
        else:
            out[token_id] = _byte_level(piece) if "ByteLevel" in kinds else _metaspace(piece)
    return out


def _byte_level(piece: str) -> bytes:
    """Undo byte-level BPE's alphabet; pieces outside it stand for themselves."""
    try:
        return bytes(_BYTES_OF_CHARACTERS[character] for character in piece)
    except KeyError:
        return piece.encode()


def _metaspace(piece: str) -> bytes:
    match = _BYTE_FALLBACK.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else piece.replace(_METASPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's table: printable bytes are themselves, other bytes are moved to 256 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    moved = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved


_BYTES_OF_CHARACTERS = _byte_alphabet()


def _kinds(decoder: dict[str, Any]) -> set[str]:
    """Return the types of a decoder and of those it is a sequence of."""
    parts = decoder.get("decoders", [])
    return {str(decoder.get("type"))}.union(*map(_kinds, parts)) if parts else {str(decoder.get("type"))}


def _strips_leading_space(decoder: dict[str, Any]) -> bool:
    """SentencePiece puts a space before the first word; its decoders take a space away again."""
    parts = decoder.get("decoders", [decoder])
    strips = any(part.get("type") == "Strip" and part.get("start", 0) > 0 for part in parts)
    metaspace = any(
        part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never" for part in parts
    )
    return strips or metaspace


def _joined_template(template: Any) -> str:
    """Return all of a model's chat templates: it may have a template for tools."""
    if isinstance(template, dict):
        return "\n".join(map(str, template.values()))
    return template or ""


def _with_short_ids(turn: dict[str, Any]) -> dict[str, Any]:
    """Return the turn with each id of a tool call as nine letters and digits, the same for the same id."""

    def short(one: object) -> object:
        if not isinstance(one, str) or _SHORT_ID.fullmatch(one):
            return one
        return hashlib.sha256(one.encode(errors="replace")).hexdigest()[:9]

    out = {**turn, **({"tool_call_id": short(turn["tool_call_id"])} if "tool_call_id" in turn else {})}
    if isinstance(turn.get("tool_calls"), list | tuple):
        out["tool_calls"] = [{**call, "id": short(call.get("id"))} for call in turn["tool_calls"]]
    return out


def _tool_as_dict(tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's shape, which chat templates read."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}

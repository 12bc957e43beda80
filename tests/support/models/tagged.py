"""Tokenizers with tags, and answers as blocks: what the tests of output formats share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from streamserve.engine.output import SequenceUpdate
from streamserve.engine.text.choice import Choice
from streamserve.engine.text.formats.base import AnswerSource, OutputFormat
from streamserve.engine.text.hf_tokenizer import HFTokenizer
from streamserve.engine.text.tokenizer import Prompt
from streamserve.protocol.engine import Accepted
from streamserve.protocol.events import BlockStart, BlockStop, Event, Token
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams, Tool
from streamserve.streams.transcript import Transcript

EOS = "<|eos|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = tuple(
    Tool(name=name, parameters={"type": "object"})
    for name in ("get_weather", "get_current_weather", "get_current_temperature", "add", "multiply", "sub")
)
QUESTION = (Message(role="user", content="?"),)


def tagged_tokenizer(
    folder: Path, *, special: Iterable[str] = (), added: Iterable[str] = (), template: str = CHATML, **fields: Any
) -> HFTokenizer:
    """Return a tokenizer of bytes, and of tags: `special` ones, which decoders leave out, and `added` ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: index for index, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in (EOS, *special)])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in added])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, chat_template=template, **fields)
    fast.save_pretrained(folder)
    return HFTokenizer(str(folder))


def ids_of(tokenizer: HFTokenizer, text: str) -> tuple[int, ...]:
    """Return the ids of an output's text: a tag that the tokenizer has is one."""
    return tuple(tokenizer._rust.encode(text, add_special_tokens=False).ids)


def ask(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": "m", "messages": QUESTION, "tools": TOOLS, **fields})


@dataclass
class Answer:
    """One answer: a tokenizer, its format, and a request. Makes choices at any place of it."""

    tokenizer: HFTokenizer
    format: OutputFormat
    request: GenerateRequest
    prompt: Prompt
    sampling: SamplingParams

    def choice(self, shown: Sequence[int] = (), index: int = 0) -> Choice:
        def make_parser() -> Any:
            return self.format.parser(self.request, self.prompt)

        is_plain = make_parser() is None
        source = AnswerSource(tags=self.format.tags, make_parser=make_parser, answer="s/1")
        return Choice(
            self.tokenizer,
            self.sampling,
            index=index,
            shown_token_ids=tuple(shown),
            source=None if is_plain else source,
        )


def answer_of(tokenizer: HFTokenizer, format_: OutputFormat, prompt: str | None = None, **fields: Any) -> Answer:
    """Return the answer to a question, or to a prompt whose text ends so."""
    sampling = SamplingParams(seed=1, **fields.pop("sampling", {}))
    request = ask(**fields, sampling=sampling)
    made = tokenizer.encode(request) if prompt is None else Prompt(token_ids=ids_of(tokenizer, prompt) or (0,))
    return Answer(tokenizer=tokenizer, format=format_, request=request, prompt=made, sampling=sampling)


def update(*token_ids: int, finish_reason: str | None = None) -> SequenceUpdate:
    return SequenceUpdate(seq_id=1, at=0.0, token_ids=token_ids, finish_reason=finish_reason)


def events_of(choice: Choice, token_ids: Sequence[int], finish_reason: str | None = "length") -> list[Event]:
    """Push one id after the other, the last with the finish reason; stop where the choice does."""
    out: list[Event] = []
    for index, token_id in enumerate(token_ids):
        reason = finish_reason if index == len(token_ids) - 1 else None
        out += choice.push(update(token_id, finish_reason=reason))
        if choice.finish_reason is not None:
            break
    return out


def blocks_of(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the blocks of one choice: their kind, name and text. The implied text block counts if it has text."""
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, BlockStart):
            blocks[event.index] = {"kind": event.kind, **({"name": event.name} if event.name else {}), "text": ""}
        elif isinstance(event, Token):
            block = blocks.setdefault(event.index, {"kind": "text", "text": ""})
            block["text"] += event.text
    return [block for block in blocks.values() if block["text"] or block["kind"] != "text"]


def resumed(answer: Answer, log: Sequence[Event], token_ids: Sequence[int], finish_reason: str) -> list[Event]:
    """Return the whole log of an answer whose first run was cut after the events of `log`.

    The second run begins with the ids that the log has, as a readmitted stream does, and what it repeats is dropped.
    """
    transcript = Transcript(Accepted(num_prompt_tokens=1, max_tokens=1, seed=1), 1, 0.0)
    for seq, event in enumerate(log, 1):
        transcript.note(event, seq)
    shown = transcript.token_ids[0]
    choice = answer.choice(shown)
    left = token_ids[len(shown) :]
    if left and choice.stopped_at is None:
        again = events_of(choice, left, finish_reason)
    else:
        again = choice.push(update(finish_reason=finish_reason))
    return [*log, *(event for event in again if not transcript.is_repeated(event))]


def is_markup_event(event: Event) -> bool:
    return isinstance(event, BlockStart | BlockStop)

"""Laws of a choice: ids in, events out, and a resumed choice continues exactly at its readers' position."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from streamserve.engine.echo import EOS, EchoTokenizer
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import RawLogprobs
from streamserve.engine.text.choice import Choice
from streamserve.engine.text.hf_tokenizer import HFTokenizer
from streamserve.protocol.events import Token
from tests.support.engines.cores import sampling
from tests.support.models.tagged import ids_of, tagged_tokenizer

ECHO = EchoTokenizer()


def update(*token_ids: int, **fields: object) -> SequenceUpdate:
    return SequenceUpdate(seq_id=1, at=0.0, token_ids=token_ids, **fields)  # type: ignore[arg-type]


def choice(*stop: str, shown: tuple[int, ...] = (), **fields: object) -> Choice:
    return Choice(ECHO, sampling(stop=stop, **fields), shown_token_ids=shown)


def event_of(one: Choice, news: SequenceUpdate) -> Token | None:
    """Return the one event of an update of plain text, or None."""
    events = one.push(news)
    assert len(events) <= 1
    return cast(Token, events[0]) if events else None


def ids(text: str) -> list[int]:
    return list(text.encode())


def texts(one: Choice, token_ids: list[int], finish_reason: str = "length") -> list[str]:
    """Push token by token; the last with the finish reason."""
    out = []
    for index, token_id in enumerate(token_ids):
        reason = finish_reason if index == len(token_ids) - 1 else None
        token = event_of(one, update(token_id, finish_reason=reason))
        if token is not None:
            out.append(token.text)
    return out


def test_each_update_is_one_event() -> None:
    """Tokens without text yet still count, with their ids."""
    assert choice().push(update(0xC3)) == [Token(text="", token_ids=(0xC3,))]


def test_update_without_tokens_is_no_event() -> None:
    """Being scheduled is no event for readers."""
    assert choice().push(update()) == []


def test_eos_is_counted_and_not_shown() -> None:
    """The last token of a "stop" is no text, whether it is special or not."""
    one = choice(stop_token_ids=(ord("b"),))
    assert texts(one, ids("ab"), "stop") == ["a", ""]
    assert (one.num_tokens, one.finish_reason) == (2, "stop")
    assert texts(choice(), [*ids("a"), EOS], "stop") == ["a", ""]


def test_held_text_comes_with_the_last_token() -> None:
    """A possible stop string is text at the end; half a code point is none."""
    assert texts(choice("xyz"), ids("axy")) == ["a", "", "xy"]
    assert texts(choice(), [ord("a"), 0xC3]) == ["a", ""]


def test_stop_string_across_tokens() -> None:
    """Found where its last token comes; the text before it is all that is shown."""
    one = choice("lo w")
    assert texts(one, ids("hello world")) == ["h", "e", "", "l", "", "", ""]
    assert (one.finish_reason, one.stopped_at, one.num_tokens) == ("stop", 7, 7)


def test_tokens_behind_a_stop_string_are_dropped() -> None:
    """Of several tokens in one update, those after the stop string are neither shown nor counted."""
    one = choice("b")
    token = event_of(one, update(*ids("abcd")))
    assert token == Token(text="a", token_ids=tuple(ids("ab")))
    assert one.push(update(*ids("efg"), finish_reason="length")) == []
    assert one.num_tokens == 2


def test_stop_string_in_the_last_update_wins() -> None:
    """A stop string in the last token has reason stop, not length."""
    one = choice("b")
    texts(one, ids("ab"))
    assert one.finish_reason == "stop"


def test_min_tokens_before_stop_strings_count() -> None:
    """A stop string that is complete before min_tokens is text."""
    one = choice("b", min_tokens=2)
    assert texts(one, ids("abab")) == ["a", "b", "a", ""]
    assert one.stopped_at == 4


def test_logprobs_carry_exact_bytes() -> None:
    """Half a code point is exact in bytes; its text is a replacement character."""
    one = choice(logprobs=1)
    raw = RawLogprobs(chosen=-0.5, top=((0xC3, -0.5),))
    token = event_of(one, update(0xC3, logprobs=(raw,)))
    assert token is not None
    assert token.logprobs is not None
    (position,) = token.logprobs
    assert (position.chosen.bytes_, position.chosen.token, position.chosen.logprob) == (b"\xc3", "\ufffd", -0.5)
    assert position.top == (position.chosen,)


@given(st.lists(st.sampled_from([*b"ab", 0xC3, 0xA9, 0xF0, EOS]), max_size=25), st.data())
def test_resume_continues_without_gap_or_repeat(token_ids: list[int], data: st.DataObject) -> None:
    """Cut anywhere and rebuilt from the ids shown: together exactly the events of the uninterrupted choice."""
    whole = texts(choice("aab", "bé"), token_ids)
    cut = data.draw(st.integers(0, len(token_ids)))
    first = choice("aab", "bé")
    before = [token.text for token_id in token_ids[:cut] if (token := event_of(first, update(token_id)))]
    if first.finish_reason is not None or cut == len(token_ids):
        return
    second = choice("aab", "bé", shown=tuple(token_ids[:cut]))
    assert before + texts(second, token_ids[cut:]) == whole


def test_resume_after_the_end_repeats_nothing() -> None:
    """Held text was shown with the last token; a resume behind it shows nothing more."""
    one = choice("xyz", shown=tuple(ids("axy")))
    assert one.push(update(finish_reason="length")) == []
    assert one.finish_reason == "length"


def test_resume_after_a_stop_string() -> None:
    """A choice whose shown ids hold a stop string has `stopped_at`."""
    one = choice("b", shown=tuple(ids("ab")))
    assert (one.stopped_at, one.stop_string) == (2, "b")
    assert one.push(update(finish_reason="stop")) == []
    assert one.finish_reason == "stop"


def test_the_token_that_ends_an_answer_can_be_kept() -> None:
    """`include_stop` keeps the text of a stop token, after what a stop string held back; a special one has no text."""
    one = choice("xyz", stop_token_ids=(ord("b"),), include_stop=True)
    assert texts(one, ids("axyb"), "stop") == ["a", "", "", "xyb"]
    assert (one.num_tokens, one.finish_reason, one.stop_string) == (4, "stop", None)
    assert texts(choice(include_stop=True), [*ids("a"), EOS], "stop") == ["a", ""]


def special_choice(folder: Path, **fields: object) -> tuple[Choice, HFTokenizer]:
    tokenizer = tagged_tokenizer(folder, special=("<|note|>",))
    return Choice(tokenizer, sampling(**fields)), tokenizer


def test_special_tokens_can_be_shown(tmp_path: Path) -> None:
    """`skip_special_tokens` false: they stand in the text as they are written; the end only with `include_stop`."""
    for fields, expected in (
        ({}, "ab"),
        ({"skip_special_tokens": False}, "a<|note|>b"),
        ({"skip_special_tokens": False, "include_stop": True}, "a<|note|>b<|eos|>"),
        ({"include_stop": True}, "ab"),
    ):
        one, tokenizer = special_choice(tmp_path, **fields)
        assert "".join(texts(one, [*ids_of(tokenizer, "a<|note|>b<|eos|>")], "stop")) == expected


def test_shown_special_tokens_take_part_in_stop_strings(tmp_path: Path) -> None:
    """What is text can stop the text, and half a code point before a special token is none."""
    one, tokenizer = special_choice(tmp_path, skip_special_tokens=False, stop=("<|note|>b",))
    assert "".join(texts(one, [*ids_of(tokenizer, "a<|note|>bc")])) == "a"
    assert one.stop_string == "<|note|>b"
    one, tokenizer = special_choice(tmp_path, skip_special_tokens=False)
    [half, _], [note] = ids_of(tokenizer, "é"), ids_of(tokenizer, "<|note|>")
    assert "".join(texts(one, [half, note])) == "<|note|>"

"""Fields of other servers' users, through the official OpenAI client, against a model that thinks."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.e2e.clients.conftest import HELLO, MODEL

pytestmark = pytest.mark.sampled("the trained model may say any byte")


def test_both_fields_of_thoughts_or_neither(ask: Any) -> None:
    """`reasoning` and `reasoning_content` have the thought; `include_reasoning` false leaves the text alone."""
    message = ask(HELLO).choices[0].message
    assert message.reasoning == message.reasoning_content != ""
    bare = ask(HELLO, extra_body={"include_reasoning": False}).choices[0].message
    assert bare.content == message.content
    assert not hasattr(bare, "reasoning")
    assert not hasattr(bare, "reasoning_content")


def test_ids_of_tokens_whole_and_streamed(ask: Any) -> None:
    """`return_token_ids`: the prompt's ids, and as many of the answer's as it has tokens."""
    extra = {"return_token_ids": True}
    whole = ask(HELLO, extra_body=extra)
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens
    assert len(whole.choices[0].token_ids) == whole.usage.completion_tokens
    chunks = list(ask(HELLO, stream=True, extra_body=extra))
    assert [number for chunk in chunks for number in chunk.choices[0].token_ids] == whole.choices[0].token_ids
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids


def test_a_thought_alone_has_no_log_probabilities_to_show(ask: Any) -> None:
    """Cut within the thought: the content of `logprobs` is an empty list."""
    (choice,) = ask(HELLO, max_tokens=3, logprobs=True).choices
    assert (choice.finish_reason, choice.message.content) == ("length", "")
    assert choice.logprobs.content == []


def test_special_tokens_and_the_end_can_be_shown(ask: Any) -> None:
    """`skip_special_tokens` false with vLLM's `include_stop_str_in_output`: the end token is the end of the text."""
    plain = ask(HELLO).choices[0].message.content
    extra = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    shown = ask(HELLO, extra_body=extra).choices[0].message.content
    assert shown == plain + "<|im_end|>"
    assert ask(HELLO, extra_body={"skip_special_tokens": False}).choices[0].message.content == plain


def test_a_clients_own_maximum_and_counts_in_every_chunk(ask: Any) -> None:
    """32,000 tokens are no error, and `continuous_usage_stats` counts up to what the last chunk says."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(HELLO, max_tokens=32_000, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2]
    assert len({chunk.system_fingerprint for chunk in chunks}) == 1
    assert chunks[0].system_fingerprint.startswith("fp_")


def test_the_names_that_clients_of_vllm_send(client: openai.OpenAI) -> None:
    """The usual body of a vLLM user is taken as a whole."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[*HELLO, {"role": "assistant", "content": "Hello"}],
        max_tokens=12,
        temperature=0,
        n=2,
        stop="",
        tool_choice="auto",
        extra_body={
            "top_k": -1,
            "min_p": 0,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "include_stop_str_in_output": False,
            "truncate_prompt_tokens": -1,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    assert len({choice.message.content for choice in answer.choices}) == 1

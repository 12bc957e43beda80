"""A small model that thinks and calls tools, trained for the tests: `thinking_model()` returns its folder.

Qwen3's shape and markup: a thought in <think>, calls in <tool_call> as {"name": …, "arguments": …}. It is kept in
tests/data/thinking_model. What it is used for does not depend on the machine: the training ends when each answer of
thinking_exam.py is right by a margin, and the turns that are wrong are trained too, round by round. After a change of
its world or of the exam, `python -m tests.support.models.thinking_model` trains it anew, in a minute of CPU.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tests.support.models import thinking_exam, thinking_world

KEPT = Path(__file__).resolve().parents[2] / "data" / "thinking_model"

BOS, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MAX_LEN = 2048
_SEED, _NUM_TOKENS, _BATCH_TOKENS, _POOL = 7, 260_000, 700, 256
_NUM_MORE_TOKENS, _NUM_MORE, _MORE_LR = 60_000, 9, 0.4  # rounds that follow while the exam is not passed
_PEAK_LR, _PEAK_MUON_LR = 2e-3, 5e-3
_LOOKED_UP_WEIGHT = 4.0  # of the loss at words that are chosen from the prompt
# Columns of the hidden state, at the start of the training: the kind of the token that is there, its own code, the kind
# of the token that follows. Attention of the later layers looks for the kind that follows, and copies the code.
_HIDDEN, _KIND_SIZE, _NUM_LAYERS, _NUM_HEADS, _HEAD_SIZE = 128, 16, 3, 4, 32
_OWN_KIND, _CODE, _NEXT_KIND = slice(0, 16), slice(16, 112), slice(112, 128)
_EMBEDDING_STD, _KIND_STD, _COPY_GAIN, _MATCH_GAIN, _NOISE = 0.04, 0.06, 0.15, 2.0, 0.01

Rows = list[tuple[list[int], int]]  # ids of a turn, and how many of them are its prompt's

CHAT_TEMPLATE = """\
{%- set first = messages[0] if messages else {} -%}
{%- set system = first.content if first.role in ('system', 'developer') else '' -%}
{%- if system or tools -%}
    {{- '<|im_start|>system\\n' + system -}}
    {%- if tools -%}
        {{- '\\n<tools>\\n' -}}
        {%- for tool in tools -%}
            {%- set function = tool.function or tool -%}
            {{- function.name + ': ' + ((function.parameters or {}).properties or {}) | join(', ') + '\\n' -}}
        {%- endfor -%}
        {{- '</tools>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' + (message.content or '') -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function or call -%}
            {%- set given = function.arguments -%}
            {%- set given = given if given is string else given | tojson(separators=(',', ':')) -%}
            {{- '\\n' if not loop.first -}}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' + given + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {%- if not (loop.last and continue_final_message) -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- elif message.role == 'user' or not loop.first -%}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""


def thinking_model() -> Path:
    """Return the folder of the trained model."""
    return KEPT


def train_tokenizer() -> Any:
    """Return a byte-level tokenizer in which each word of the world is one token, apart from the space before it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r" ?\w+| ?[^\w\s]+|\s+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PAD, BOS, END],
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    out = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[BOS],
        model_max_length=MAX_LEN,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    out.add_tokens(list(TAGS))  # not special, as in Qwen3
    return out


def _texts() -> Iterator[str]:
    """Yield the texts that the vocabulary is made of, each often enough."""
    words = [word for topic in thinking_world.TOPICS.values() for word in (*topic.names, *topic.values)]
    words += [word for values in (*thinking_world.FIELDS.values(), thinking_world.KINDS[-1]) for word in values]
    for _ in range(20):
        yield from (
            *words,
            *thinking_world.FIELDS,
            *thinking_world.KINDS[-1],
            *thinking_world.OTHER_TOOLS,
            *thinking_world.SYSTEMS,
        )
    for turn in islice(thinking_world.turns(_SEED), 2000):
        yield turn.thought
        yield turn.answer().replace("<tool_call>", "").replace("<think>", "")
        yield from (message["content"] for message in turn.messages)


def encode(tokenizer: Any, turn: thinking_world.Turn) -> tuple[list[int], int]:
    """Return the ids of the whole turn, and how many of them are its prompt's."""
    prompt = tokenizer.apply_chat_template(
        turn.messages,
        tools=turn.tools or None,
        add_generation_prompt=True,
        tokenize=False,
        **({} if turn.thinks else {"enable_thinking": False}),
    )
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    after = tokenizer(turn.answer(), add_special_tokens=False)["input_ids"]
    return [*before, *after, tokenizer.eos_token_id], len(before)


def batches(tokenizer: Any, seed: int) -> Iterator[Rows]:
    """Yield rows of like length, of about _BATCH_TOKENS tokens together."""
    from random import Random

    rng = Random(seed)
    stream = thinking_world.turns(seed)
    while True:
        pool = sorted((encode(tokenizer, turn) for turn in islice(stream, _POOL)), key=lambda row: len(row[0]))
        found: list[Rows] = [[]]
        for row in pool:
            if found[-1] and (len(found[-1]) + 1) * len(row[0]) > _BATCH_TOKENS:
                found.append([])
            found[-1].append(row)
        rng.shuffle(found)
        yield from found


def build_model(tokenizer: Any, seed: int) -> Any:
    """Return a new Qwen3 of 0.7 million parameters, which begins with a notion of looking words up.

    A model of this size finds by itself how to choose a word from its prompt only after millions of tokens. The start
    gives each kind of words a code, and the later layers' attention the habit to look for the kind that comes next and
    to copy what is found. Which kind comes next, and where to look, is learned.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=_NUM_LAYERS,
        num_attention_heads=_NUM_HEADS,
        num_key_value_heads=_NUM_HEADS,
        head_dim=_HEAD_SIZE,
        max_position_embeddings=MAX_LEN,
        rope_theta=1e6,
        tie_word_embeddings=False,
        initializer_range=_EMBEDDING_STD,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        _give_codes(model, tokenizer.get_vocab())
        for index, layer in enumerate(model.model.layers[1:]):
            _give_lookup(layer.self_attn, num_heads=_NUM_HEADS // 2 if index == 0 else _NUM_HEADS)
    return model


def _give_codes(model: Any, vocab: dict[str, int]) -> None:
    """Give each word its own code, going in and coming out, and the code of its kind; likewise after a space."""
    import torch

    inner, outer = model.model.embed_tokens.weight, model.lm_head.weight
    for columns in (_OWN_KIND, _NEXT_KIND):
        inner[:, columns] *= 0.1
    outer[:, _OWN_KIND] *= 0.1
    outer[:, _CODE] = inner[:, _CODE]
    kinds = torch.randint(0, 2, (len(thinking_world.KINDS), _KIND_SIZE)) * 2.0 - 1
    for kind, words in zip(kinds, thinking_world.KINDS, strict=True):
        ids = [vocab[word] for word in words]
        inner[ids, _OWN_KIND] = outer[ids, _NEXT_KIND] = kind * _KIND_STD
    for piece, token_id in vocab.items():
        word = vocab.get(piece.removeprefix("Ġ"))
        if piece.startswith("Ġ") and word is not None:
            inner[token_id, : _NEXT_KIND.start] = inner[word, : _NEXT_KIND.start]
            inner[token_id, _CODE] += 0.3 * _EMBEDDING_STD * torch.randn(_CODE.stop - _CODE.start)
            outer[token_id, _CODE] = inner[token_id, _CODE]
            outer[token_id, _NEXT_KIND] = outer[word, _NEXT_KIND]


def _give_lookup(attention: Any, *, num_heads: int) -> None:
    """Let the first heads match the next kind with the kinds that are there, and copy the code that is found.

    Kinds are matched in the columns that rotary embeddings turn slowest, so that distance matters little.
    """
    import torch

    slow = [*range(_HEAD_SIZE // 4, _HEAD_SIZE // 2), *range(3 * _HEAD_SIZE // 4, _HEAD_SIZE)]
    end = num_heads * _HEAD_SIZE
    query, key, value = (_NOISE * torch.randn(end, _HIDDEN) for _ in range(3))
    for head in range(num_heads):
        for number, column in enumerate(slow):
            query[head * _HEAD_SIZE + column, _NEXT_KIND.start + number] = 1.0
            key[head * _HEAD_SIZE + column, _OWN_KIND.start + number] = 1.0
    copied = torch.zeros(_HIDDEN, _HIDDEN)
    copied[_CODE, _CODE] = torch.eye(_CODE.stop - _CODE.start)
    attention.q_proj.weight[:end], attention.k_proj.weight[:end] = query, key
    attention.v_proj.weight[:end] = value + copied[:end]
    attention.o_proj.weight[:, :end] = _COPY_GAIN * copied[:, :end] + _NOISE / 2 * torch.randn(_HIDDEN, end)
    attention.q_norm.weight *= _MATCH_GAIN


def train(folder: Path, seed: int = _SEED, num_threads: int = 1) -> None:
    """Train the model until it passes the exam, and write it to `folder`, whole or not at all."""
    import torch

    torch.set_num_threads(num_threads)  # on a busy machine two threads would mostly wait for each other
    torch.set_flush_denormal(True)
    tokenizer = train_tokenizer()
    model = build_model(tokenizer, seed)
    rows = batches(tokenizer, seed)
    exam = [encode(tokenizer, turn) for turn in thinking_exam.turns()]
    wrong: Rows = []
    began = time.process_time()
    for number in range(1 + _NUM_MORE):
        if number == 0:
            _train_round(model, tokenizer, rows, num_tokens=_NUM_TOKENS, peak=1.0)
        else:
            again = ([*batch, row] for batch, row in zip(rows, cycle(wrong), strict=False))
            _train_round(model, tokenizer, again, num_tokens=_NUM_MORE_TOKENS, peak=_MORE_LR)
        wrong = thinking_exam.failed(model, exam)
        print(f"round {number}: {len(wrong)} wrong, {time.process_time() - began:.0f} s of CPU", flush=True)
        if not wrong:
            _save(model, tokenizer, folder)
            return
    raise RuntimeError("the exam was not passed:\n" + "\n".join(tokenizer.decode(ids) for ids, _ in wrong))


def _train_round(model: Any, tokenizer: Any, rows: Iterator[Rows], *, num_tokens: int, peak: float) -> None:
    """Train with a learning rate that rises to its peak and falls to nothing."""
    import torch

    from tests.support.models.muon import Muon

    matrices = [weight for name, weight in model.named_parameters() if "layers" in name and weight.ndim == 2]
    inner = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in inner]
    optimizers = (
        Muon(matrices, lr=_PEAK_MUON_LR * peak, weight_decay=0.05),
        torch.optim.AdamW(others, lr=_PEAK_LR * peak, betas=(0.9, 0.98), weight_decay=0.05),
    )
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    weights = torch.ones(len(tokenizer))
    weights[[tokenizer.get_vocab()[word] for kind in thinking_world.KINDS for word in kind]] = _LOOKED_UP_WEIGHT
    num_seen = 0
    for step, batch in enumerate(rows, start=1):
        share = num_seen / num_tokens
        if share >= 1:
            break
        loss = answer_loss(model, batch, tokenizer.pad_token_id, weights)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, highest in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = (
                highest * min(1.0, step / 30) * max(0.02, math.cos(math.pi * share / 2) ** 2)
            )
            optimizer.step()
        num_seen += sum(len(ids) for ids, _ in batch)


def answer_loss(model: Any, rows: Rows, pad_id: int, weights: Any) -> Any:
    """Return the mean cross entropy of the answers' tokens, weighted by token."""
    import torch

    length = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((len(rows), length), pad_id)
    is_learned = torch.zeros((len(rows), length), dtype=torch.bool)
    for index, (ids, num_before) in enumerate(rows):
        input_ids[index, : len(ids)] = torch.tensor(ids)
        is_learned[index, num_before : len(ids)] = True
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
    is_target = is_learned[:, 1:]
    logits = model.lm_head(hidden[:, :-1][is_target])  # the state at t predicts the token at t + 1
    return torch.nn.functional.cross_entropy(logits.float(), input_ids[:, 1:][is_target], weight=weights)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=eos, pad_token_id=pad)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


if __name__ == "__main__":
    train(Path(sys.argv[1]) if len(sys.argv) > 1 else KEPT, *map(int, sys.argv[2:]))

"""The demo model's tokenizer: byte-level BPE trained on the corpus, its special tokens, examples as token ids.

Every byte has a token and nothing is normalised, so any text survives a round trip. Does not know the model.
BPE: Sennrich et al. 2016; on bytes: Radford et al. 2019 (GPT-2).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.demo_model.corpus import Example

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 3072
BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLE_TOKENS = {role: f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
# Not "special": decoding with skip_special_tokens must keep them, for the parsers of thoughts and tool calls.
VISIBLE_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# The special tokens have the first ids, the visible ones the last.
TEXT_IDS = range(3 + len(ROLE_TOKENS), VOCAB_SIZE - len(VISIBLE_TOKENS))
CHAT_TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(corpus: Iterable[Example]) -> "Tokenizer":
    """Learn merges from every message; the same corpus gives the same tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    special = [PAD, BOS, END, *ROLE_TOKENS.values()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(VISIBLE_TOKENS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((message["content"] for example in corpus for message in example.messages), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in VISIBLE_TOKENS])
    return tokenizer


def wrap_tokenizer(tokenizer: "Tokenizer", max_len: int) -> "PreTrainedTokenizerFast":
    """Return the tokenizer with special tokens and chat template, in the form that `AutoTokenizer` loads."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=list(ROLE_TOKENS.values()),
        model_max_length=max_len,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE_PATH.read_text(encoding="utf-8"),
    )


def encode_example(tokenizer: "Tokenizer", example: Example) -> tuple[list[int], list[bool]]:
    """Return token ids, and for each id whether it is a target.

    <|bos|> <|user|> where is it ? <|end|> <|assistant|> under Orders <|end|>
       0       0      0   0   0  0    0          0          1     1      1
    """
    token_ids, is_learned = [token_id(tokenizer, BOS)], [False]
    for message in example.messages:
        content_ids = tokenizer.encode(message["content"], add_special_tokens=False).ids
        learn = message["role"] == "assistant"
        token_ids += [token_id(tokenizer, ROLE_TOKENS[message["role"]]), *content_ids, token_id(tokenizer, END)]
        is_learned += [False] + [learn] * (len(content_ids) + 1)
    return token_ids, is_learned


def token_id(tokenizer: "Tokenizer", token: str) -> int:
    """Return the id of a token that must exist."""
    found: int | None = tokenizer.token_to_id(token)
    assert found is not None, token
    return found

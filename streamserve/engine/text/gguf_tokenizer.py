"""The tokenizer and chat template that a GGUF file brings, as transformers' tokenizers.

transformers turns vocabulary, merges and special tokens into a tokenizer of the `tokenizers` library; here is what it
leaves out: the ways to split text before merges that its table lacks, which files begin a prompt with a token when they
do not say so, and tokens that its classes add. (What llama.cpp does with each entry: llama-vocab.cpp.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streamserve.engine.model.load.errors import ModelLoadError
from streamserve.engine.model.load.gguf.file import GGUFFile

# tokenizer.ggml.pre, beside those that transformers knows.
GPT_2_SPLITS = frozenset({"", "default", "gpt-2", "phi-2", "jais", "mpt", "olmo", "roberta-bpe", "granite-docling"})
DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
QWEN_SPLITS = frozenset({"stablelm2", "hunyuan", "megrez", "deepseek-r1-qwen"})
# These take a whole word that is a token before they merge, and begin a prompt with a token unless the file says no.
LLAMA_3_SPLITS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2", "tekken"})
SENTENCEPIECE, BYTE_LEVEL = "llama", "gpt2"
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def open_gguf(path: str) -> Any:
    """Return transformers' tokenizer of the file. Raises `ModelLoadError` for a kind that is not known."""
    from transformers import PreTrainedTokenizerFast

    file = GGUFFile(Path(path))
    tokens = file.strings("tokenizer.ggml.tokens")
    kind, split = (str(file.metadata.get(f"tokenizer.ggml.{key}", "")) for key in ("model", "pre"))
    if not tokens or kind not in (SENTENCEPIECE, BYTE_LEVEL):
        raise ModelLoadError(
            f"{path} has {f'a tokenizer of the kind {kind!r}' if kind else 'no tokenizer'}, and {BYTE_LEVEL!r} and "
            f"{SENTENCEPIECE!r} are read. Name the model's folder with tokenizer.json."
        )
    rust = _converted(file, kind, split, tokens)
    adds_bos = file.metadata.get("tokenizer.ggml.add_bos_token", kind == SENTENCEPIECE or split in LLAMA_3_SPLITS)
    special = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=rust,
        name_or_path=path,
        chat_template=_templates(file),
        clean_up_tokenization_spaces=False,
        add_bos_token=bool(adds_bos) and special["bos_token"] is not None,
        add_eos_token=bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)),
        **{
            name: tokens[token_id]
            for name, token_id in special.items()
            if isinstance(token_id, int) and token_id < len(tokens)
        },
    )


def _converted(file: GGUFFile, kind: str, split: str, tokens: list[str]) -> Any:
    """Return the `tokenizers.Tokenizer`."""
    from transformers.integrations.gguf import convert_gguf_tokenizer

    merges = file.strings("tokenizer.ggml.merges")
    parts = {
        "tokenizer_type": kind,
        "pre_tokenizer_type": split,
        "tokens": tokens,
        "scores": file.metadata.get("tokenizer.ggml.scores"),
        "token_type": file.metadata.get("tokenizer.ggml.token_type"),
        **({"merges": merges} if merges else {}),
    }
    rust, _ = convert_gguf_tokenizer(file.architecture, parts)
    if kind == BYTE_LEVEL:
        rust.pre_tokenizer = _splitter(file, split, rust.pre_tokenizer)
        rust.model.ignore_merges = split in LLAMA_3_SPLITS
    elif not file.metadata.get("tokenizer.ggml.add_space_prefix", True) and not file.architecture.startswith("gemma"):
        rust = _without_prefix(rust)
    return _without_tokens_from(rust, len(tokens))


def _splitter(file: GGUFFile, split: str, given: Any) -> Any:
    """Return what splits text before merges; `given` is transformers' choice."""
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split in DIGIT_SPLITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if split in QWEN_SPLITS:
        pattern = Regex(GGUF_PRE_TOKENIZER_SPLITS["qwen2"])
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), bytes_only])
    if split in GPT_2_SPLITS:
        return byte_level
    if split not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ModelLoadError(
            f"{file.path} splits text in the way {split!r} (tokenizer.ggml.pre), which is not known: its tokens would "
            "be others than the model learned. Name the model's folder with tokenizer.json."
        )
    return given


def _without_prefix(rust: Any) -> Any:
    """Return a SentencePiece tokenizer that puts no space before a text, and takes none away."""
    from tokenizers import decoders, pre_tokenizers

    rust.normalizer = None
    rust.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return rust


def _without_tokens_from(rust: Any, num_tokens: int) -> Any:
    """Return the tokenizer without tokens that the file does not have: transformers' classes add their own."""
    from tokenizers import Tokenizer

    if rust.get_vocab_size(with_added_tokens=True) <= num_tokens:
        return rust
    fields = json.loads(rust.to_str())
    fields["added_tokens"] = [token for token in fields["added_tokens"] if token["id"] < num_tokens]
    return Tokenizer.from_str(json.dumps(fields))


def _templates(file: GGUFFile) -> Any:
    """Return the file's chat template, or all by their names; None where it has none."""
    default = file.metadata.get("tokenizer.chat_template")
    names = file.strings("tokenizer.chat_templates")
    given = {"default": default, **{name: file.metadata.get(f"tokenizer.chat_template.{name}") for name in names}}
    found = {name: text for name, text in given.items() if isinstance(text, str)}
    return found if len(found) > 1 else next(iter(found.values()), None)

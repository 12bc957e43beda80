"""Builds tiny embedding models as folders: encoders for sentence-transformers, and a decoder without modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TEXT = "the a cat dog sat on mat red blue big small house garden train and or of in to what who where how is"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, *_TEXT.split(), *(f"##{letter}" for letter in "abcdefghij"), *"abcdefghij"]
WIDTH, MAX_LEN = 32, 64
_TYPES = "sentence_transformers.models."


def write_bert(folder: Path, *, pooling: str = "mean", normalize: bool = True, prompt: str = "", **extra: Any) -> Path:
    """Write a BERT of two layers with `modules.json`, as sentence-transformers has written for years."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=MAX_LEN, initializer_range=0.4, **extra,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    _write_tokenizer(folder, ["[CLS]", "[SEP]"])
    names = ["", "1_Pooling", *(["2_Normalize"] if normalize else [])]
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": _TYPES + kind}
        for index, (path, kind) in enumerate(zip(names, kinds, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": kind == pooling for name, kind in _MODES.items()}
    pool = {"word_embedding_dimension": WIDTH, **modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pool))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_LEN}))
    if prompt:
        prompts = {"prompts": {"query": prompt}, "default_prompt_name": "query"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


_MODES = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max"}


def write_decoder(folder: Path) -> Path:
    """Write a Qwen3 of two layers, as a language model: its folder does not say how it embeds."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(8)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY), hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=MAX_LEN,
        initializer_range=0.4, eos_token_id=3,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    _write_tokenizer(folder, ["[SEP]"])
    return folder


def _write_tokenizer(folder: Path, around: list[str]) -> None:
    """Write a WordPiece tokenizer that ends a text with [SEP], and begins it with [CLS] where `around` has that."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: index for index, word in enumerate(VOCABULARY)}
    rust = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    begin = "[CLS] " if "[CLS]" in around else ""
    rust.post_processor = processors.TemplateProcessing(
        single=f"{begin}$A [SEP]", special_tokens=[(name, ids[name]) for name in around]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=rust, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=MAX_LEN,
    ).save_pretrained(folder)  # fmt: skip

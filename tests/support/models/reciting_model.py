"""A tiny Llama that recites a text, whatever it is asked: safetensors with weights set by hand, made in a second.

Each piece of the text is a token. Embeddings are one-hot, attention and MLP add nothing, and the head maps each token
to the one that follows it: so the answer is what a model that was trained to write it would give, token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

MARKS = ["<|end|>", "<|answer|>"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<|answer|>{% endif %}"
_HEADS = 4


def save_reciting_model(folder: Path, pieces: Sequence[str], template: str = TEMPLATE) -> Path:
    """Write the model and its byte-level tokenizer into `folder`; no piece may be there twice."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    assert len(set(pieces)) == len(pieces)
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = [bytes_of.pre_tokenize_str(piece)[0][0] for piece in pieces]
    vocab = {token: at for at, token in enumerate(dict.fromkeys([*MARKS, *alphabet, *spelled]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = bytes_of, decoders.ByteLevel()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=MARKS[0], additional_special_tokens=MARKS[1:])
    saved.chat_template = template
    saved.save_pretrained(folder)

    hidden_size = -(-len(vocab) // (2 * _HEADS)) * 2 * _HEADS
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=hidden_size, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=_HEADS, num_key_value_heads=1, max_position_embeddings=8192, eos_token_id=0,
        bos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float32)
    answer = [vocab[MARKS[1]], *(vocab[one] for one in spelled), vocab[MARKS[0]]]
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(vocab), hidden_size))
        model.lm_head.weight.zero_()
        for token, following in itertools.pairwise(answer):
            model.lm_head.weight[following, token] = 1.0
    model.save_pretrained(folder, safe_serialization=True)
    return folder

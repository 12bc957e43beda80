"""Writes a tiny random model as GGUF, for llama-server: 300 tokens, two layers, a chat template, no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_NUM_BYTES = 256
_WIDTH, _NUM_LAYERS, _NUM_HEADS, _FEED_FORWARD, _CONTEXT = 64, 2, 4, 128, 2048
_CONTROL, _NORMAL = 3, 1  # token types
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_gguf(path: Path) -> Path:
    """Write the model to `path` and return it. Its tokens are the bytes and three of a chat; it says letters only."""
    import gguf
    import numpy as np

    random = np.random.default_rng(20_260)
    writer = gguf.GGUFWriter(str(path), "llama")
    tokens = [*_byte_tokens(), "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_NUM_LAYERS)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_NUM_HEADS)
    writer.add_head_count_kv(_NUM_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_WIDTH // _NUM_HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([_NORMAL] * _NUM_BYTES + [_CONTROL] * 3)
    writer.add_token_merges(["t h"])  # llama.cpp wants some; "th" is no token, so none applies
    writer.add_bos_token_id(_NUM_BYTES + 2)
    writer.add_eos_token_id(_NUM_BYTES + 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_CHAT_TEMPLATE)

    def add(name: str, *shape: int, rows: slice | None = None) -> None:
        values: Any = np.ones(shape) if len(shape) == 1 else random.normal(0.0, 0.3, shape)
        if rows is not None:  # the others' logits are 0, and the largest of many is above
            values[: rows.start] = values[rows.stop :] = 0.0
        writer.add_tensor(name, values.astype(np.float32))

    add("token_embd.weight", len(tokens), _WIDTH)
    add("output_norm.weight", _WIDTH)
    add("output.weight", len(tokens), _WIDTH, rows=slice(ord("A"), ord("z") + 1))
    for layer in range(_NUM_LAYERS):
        add(f"blk.{layer}.attn_norm.weight", _WIDTH)
        add(f"blk.{layer}.ffn_norm.weight", _WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", _WIDTH, _WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{name}.weight", _FEED_FORWARD, _WIDTH)
        add(f"blk.{layer}.ffn_down.weight", _WIDTH, _FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_tokens() -> list[str]:
    """Return the 256 bytes as GPT-2 writes them: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(_NUM_BYTES)]

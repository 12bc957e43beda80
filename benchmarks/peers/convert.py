"""A Llama or Qwen3 checkpoint as GGUF, in one of llama.cpp's formats. Runs in llama.cpp's environment:

    python -m benchmarks.peers.convert FOLDER f16|bf16|q8_0|q4_0|q4_K_M OUT.gguf

The values are quantised by llama.cpp's own function. Which matrix takes which type is as `llama_tensor_get_type` of
llama.cpp's src/llama-quant.cpp has it: the head, and in q4_K_M some of the values' and the MLP's second matrices, keep
more bits, and a row that K-quants do not divide takes the next older type.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType as FileType

FORMATS = {
    "f32": (Type.F32, FileType.ALL_F32),
    "f16": (Type.F16, FileType.MOSTLY_F16),
    "bf16": (Type.BF16, FileType.MOSTLY_BF16),
    "q8_0": (Type.Q8_0, FileType.MOSTLY_Q8_0),
    "q4_0": (Type.Q4_0, FileType.MOSTLY_Q4_0),
    "q4_K_M": (Type.Q4_K, FileType.MOSTLY_Q4_K_M),
}
_WITHOUT_K = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_NORMAL, _CONTROL = 1, 3  # token types


def main() -> None:
    """Convert what the command line names."""
    folder, name, out = sys.argv[1:]
    convert(Path(folder), name, Path(out))


def convert(folder: Path, name: str, out: Path) -> None:
    """Write the checkpoint in `folder` as `out`, whole or not at all. Raises ValueError for another family."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    if family not in ("llama", "qwen3"):
        raise ValueError(f"{folder} is a {family}; the converter knows llama and qwen3")
    part = out.with_suffix(".part")
    writer = gguf.GGUFWriter(str(part), family)
    writer.add_file_type(FORMATS[name][1])
    _add_shape(writer, config)
    _add_tokenizer(writer, folder, config)
    for tensor_name, values in _tensors(folder):
        _add_tensor(writer, tensor_name, values, name, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(out)


def _head_len(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head_len(config))
    writer.add_value_length(_head_len(config))
    writer.add_rope_dimension_count(_head_len(config))
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """Add a byte-level BPE: the tokens in order, their merges, and what splits a text before them."""
    content = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in content["added_tokens"]}
    tokens = {token_id: token for token, token_id in content["model"]["vocab"].items()} | special
    ids = range(config["vocab_size"])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2" if content["pre_tokenizer"]["type"] == "ByteLevel" else "qwen2")
    writer.add_token_list([tokens.get(token_id, f"[PAD{token_id}]") for token_id in ids])
    writer.add_token_types([_CONTROL if token_id in special else _NORMAL for token_id in ids])
    writer.add_token_merges(merges)
    end = config["eos_token_id"]
    writer.add_eos_token_id(end[0] if isinstance(end, list) else end)
    writer.add_add_bos_token(False)


def _tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield llama.cpp's names and the values in float32."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no dict
                yield _renamed(name.removesuffix(".weight")), weights.get_tensor(name).float().numpy()


def _renamed(name: str) -> str:
    if name in _NAMES:
        return f"{_NAMES[name]}.weight"
    number, inner = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{number}.{_LAYER_NAMES[inner]}.weight"


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, asked: str, config: dict[str, Any]) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values)
        return
    if config["model_type"] == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
        values = _interleaved(values, _head_len(config))
    chosen = _type_of(name, asked, values.shape[1], config)
    writer.add_tensor(name, quantized(values, chosen), raw_dtype=chosen)


def _interleaved(values: np.ndarray, head_len: int) -> np.ndarray:
    """Reorder each head's rows: llama.cpp rotates neighbours, transformers the halves of a head."""
    halves = values.reshape(-1, 2, head_len // 2, values.shape[1])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _type_of(name: str, asked: str, row_len: int, config: dict[str, Any]) -> Type:
    chosen = FORMATS[asked][0]
    is_head = name == "output.weight" or (config["tie_word_embeddings"] and name == "token_embd.weight")
    if asked.startswith("q4"):
        many = asked == "q4_K_M" and _has_more_bits(name, config["num_hidden_layers"])
        chosen = Type.Q6_K if is_head or many else chosen
    return _WITHOUT_K.get(chosen, chosen) if row_len % 256 else chosen


def _has_more_bits(name: str, num_layers: int) -> bool:
    """Whether q4_K_M keeps six bits of this matrix: in the first and last eighth, and every third between."""
    if not name.endswith(("attn_v.weight", "ffn_down.weight")):
        return False
    number, eighth = int(name.split(".")[1]), num_layers // 8
    return number < eighth or number >= 7 * num_layers // 8 or (number - eighth) % 3 == 2


def quantized(values: np.ndarray, chosen: Type) -> np.ndarray:
    """Return the rows of a matrix as llama.cpp's function packs them: bytes, (num_rows, bytes of a row)."""
    import xllamacpp.xllamacpp as library

    function = ctypes.CDLL(library.__file__).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    number, address = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, address, address, number, number, number, address]
    values = np.ascontiguousarray(values, np.float32)
    num_rows, row_len = values.shape
    group_len, group_bytes = gguf.GGML_QUANT_SIZES[chosen]
    packed = np.empty((num_rows, row_len // group_len * group_bytes), np.uint8)
    num_bytes = function(chosen.value, values.ctypes.data, packed.ctypes.data, 0, num_rows, row_len, None)
    if num_bytes != packed.nbytes:
        raise RuntimeError(f"llama.cpp packed {num_bytes} bytes instead of {packed.nbytes}")
    return packed


if __name__ == "__main__":
    main()

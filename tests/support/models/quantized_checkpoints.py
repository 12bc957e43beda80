"""Writes a tiny safetensors model in each format of quantised checkpoints, and beside it what its weights stand for.

Numbers, scales and zero points are random, and packed by loops over words, as the papers and tools that write such
files do it: a slow, plain reference that shares nothing with what reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's order_map: nibble i of a word is output order_map[i]
GROUP = 32
LAYERS = re.compile(r".*layers\.\d+\..*(proj|w1|w2|w3)\.weight")
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
Tensors = dict[str, torch.Tensor]
# Of a weight (out, in): its parts by the end of their names, and what they stand for, float32.
Quantize = Callable[[torch.Tensor, np.random.Generator], tuple[Tensors, torch.Tensor]]


def quantize_folder(source: Path, folder: Path, quantize: Quantize, config: dict[str, Any]) -> Path:
    """Write `source` with its layers quantised to `folder`, and what they stand for to `folder`/plain.

    `config` is the quantization_config. Return the folder.
    """
    from safetensors.torch import load_file, save_file

    rng = np.random.default_rng(11)
    quantized: Tensors = {}
    plain: Tensors = {}
    state: Tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        state |= load_file(file)
    for name, weight in state.items():
        if LAYERS.fullmatch(name):
            parts, plain[name] = quantize(weight.float(), rng)
            base = name.removesuffix(".weight")
            quantized |= {f"{base}.{end}": part.contiguous() for end, part in parts.items()}
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")) and config["quant_method"] == "mxfp4":
            parts, found = quantize(weight.float().transpose(1, 2), rng)
            plain[name] = found.transpose(1, 2).contiguous()
            quantized |= {f"{name}_{end}": part.contiguous() for end, part in parts.items()}
        else:
            quantized[name] = plain[name] = weight
    own = json.loads((source / "config.json").read_text())
    for place, tensors, more in ((folder / "plain", plain, {}), (folder, quantized, {"quantization_config": config})):
        place.mkdir(parents=True, exist_ok=True)
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps({**own, **more}))
    return folder


def from_gguf(path: Path, folder: Path, quantize: Quantize, config: dict[str, Any]) -> Path:
    """Write a GGUF file's model to `folder`, its layers quantised, others in bfloat16. Return the folder."""
    from safetensors.torch import save_file

    from streamserve.engine.model.load.gguf.config import config_of
    from streamserve.engine.model.load.gguf.file import GGUFFile
    from streamserve.engine.model.load.gguf.weights import GGUFWeights

    file, rng = GGUFFile(path), np.random.default_rng(11)
    weights, tensors = GGUFWeights(file), {}
    for name in weights.names():
        if LAYERS.fullmatch(name):
            base = name.removesuffix(".weight")
            parts, _ = quantize(weights.floats(name), rng)
            tensors |= {f"{base}.{end}": part.contiguous() for end, part in parts.items()}
        else:
            tensors[name] = weights.tensor(name).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config_of(file), "quantization_config": config}))
    return folder


def rounded_fp8(weight: torch.Tensor, _rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
    """Return a weight in e4m3 with a scale for 128 x 128 numbers, as DeepSeek and Qwen3-FP8 round them."""
    shape = tuple(-(-size // 128) for size in weight.shape)
    scales = torch.empty(shape)
    plain = torch.empty_like(weight)
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(shape[0]):
        for column in range(shape[1]):
            block = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
            scales[row, column] = weight[block].abs().max() / 448
            numbers[block] = (weight[block] / scales[row, column]).to(torch.float8_e4m3fn)
            plain[block] = numbers[block].float() * scales[row, column]
    return {"weight": numbers, "weight_scale_inv": scales}, plain


def gptq(*, bits: int = 4, group_size: int = GROUP, zero_offset: int = 1, act_order: bool = False) -> Quantize:
    """Return what AutoGPTQ writes; zero points are stored `zero_offset` lower."""

    def quantize(weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        num_inputs = weight.shape[1]
        size = group_size if group_size > 0 else num_inputs
        g_idx = np.arange(num_inputs) // size
        if act_order:
            g_idx = rng.permutation(g_idx)
        q, scales, zeros, plain = _integers(weight, bits, g_idx, rng, lowest_zero=zero_offset)
        return {
            "qweight": _packed_rows(q.T, bits),
            "qzeros": _packed_rows(zeros - zero_offset, bits).T,
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(g_idx.astype(np.int32)),
        }, plain

    return quantize


def awq(*, group_size: int = GROUP) -> Quantize:
    """Return what AutoAWQ's gemm version writes."""

    def packed(numbers: np.ndarray) -> torch.Tensor:
        words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.uint32)
        for column in range(words.shape[1]):
            for place, output in enumerate(AWQ_ORDER):
                words[:, column] |= numbers[:, column * 8 + output].astype(np.uint32) << np.uint32(4 * place)
        return torch.from_numpy(words.view(np.int32))

    def quantize(weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        g_idx = np.arange(weight.shape[1]) // group_size
        q, scales, zeros, plain = _integers(weight, 4, g_idx, rng)
        return {
            "qweight": packed(q.T),
            "qzeros": packed(zeros.T),
            "scales": torch.from_numpy(scales.T.copy()),
        }, plain

    return quantize


def packed_integers(*, bits: int = 4, group_size: int = GROUP, symmetric: bool = True) -> Quantize:
    """Return what compressed-tensors writes as pack-quantized."""

    def quantize(weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        num_rows, num_inputs = weight.shape
        size = group_size if group_size > 0 else num_inputs
        q, scales, zeros, plain = _integers(
            weight, bits, np.arange(num_inputs) // size, rng, zero=2 ** (bits - 1) if symmetric else None
        )
        parts = {
            "weight_packed": _packed_rows(q.T, bits).T,
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor([num_rows, num_inputs]),
        }
        if not symmetric:
            parts["weight_zero_point"] = _packed_rows(zeros, bits)
        return parts, plain

    return quantize


def int8(*, per: str = "row") -> Quantize:
    """Return what compressed-tensors writes as int-quantized: int8 with a scale for a row, or for 32 inputs of it."""

    def quantize(weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        num_rows, num_inputs = weight.shape
        columns = 1 if per == "row" else num_inputs // GROUP
        q = torch.from_numpy(rng.integers(-127, 128, weight.shape).astype(np.int8))
        scales = torch.from_numpy(rng.uniform(0.5, 1.5, (num_rows, columns))).float() / 64 / num_inputs**0.5
        scales = scales.bfloat16()
        wide = scales.float().repeat_interleave(num_inputs // columns, dim=1)
        return {"weight": q, "weight_scale": scales}, q.float() * wide

    return quantize


def fp8(*, block: tuple[int, int] | None = None, per: str = "tensor", name: str = "weight_scale") -> Quantize:
    """Return e4m3 weights with a scale for the weight, a row, or a block."""

    def quantize(weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        num_rows, num_inputs = weight.shape
        numbers = (weight * 100).to(torch.float8_e4m3fn)
        rows, columns = block or (1 if per == "row" else num_rows, num_inputs)
        shape = (-(-num_rows // rows), -(-num_inputs // columns))
        scales = torch.from_numpy(rng.uniform(0.5, 1.5, shape)).float() / 100
        plain = numbers.float()
        for row in range(shape[0]):
            for column in range(shape[1]):
                plain[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns] *= scales[row, column]
        scale = scales.flatten()[0] if block is None and per == "tensor" else scales
        return {"weight": numbers, name: scale, "input_scale": torch.ones(())}, plain

    return quantize


def mxfp4() -> Quantize:
    """Return gpt-oss' blocks and scales of (num_experts, out, in); its other layers stay as they are."""

    def quantize(weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        if weight.ndim == 2:
            return {"weight": weight}, weight
        shape = (*weight.shape[:2], weight.shape[2] // GROUP, GROUP // 2)
        blocks = rng.integers(0, 256, shape).astype(np.uint8)
        scales = rng.integers(122, 126, shape[:3]).astype(np.uint8)
        values = np.array(FP4, dtype=np.float32)
        plain = np.empty((*shape[:3], GROUP), dtype=np.float32)
        for place in range(GROUP // 2):
            plain[..., 2 * place] = values[blocks[..., place] & 15]
            plain[..., 2 * place + 1] = values[blocks[..., place] >> 4]
        plain *= 2.0 ** (scales.astype(np.float32)[..., None] - 127)
        return {"blocks": torch.from_numpy(blocks), "scales": torch.from_numpy(scales)}, torch.from_numpy(
            plain.reshape(weight.shape)
        )

    return quantize


def _integers(
    weight: torch.Tensor,
    bits: int,
    g_idx: np.ndarray,
    rng: np.random.Generator,
    *,
    lowest_zero: int = 0,
    zero: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]:
    """Return q (out, in), scales and zeros (out, groups), and scale * (q - zero), all random."""
    num_rows, num_inputs = weight.shape
    num_groups, most = int(g_idx.max()) + 1, 2**bits
    q = rng.integers(1 if bits == 8 else 0, most, (num_rows, num_inputs))  # -127 to 127: -128 is none of ours
    scales = (rng.uniform(0.5, 1.5, (num_rows, num_groups)) * 4 / most / num_inputs**0.5).astype(np.float16)
    middle = most // 2
    zeros = rng.integers(max(lowest_zero, middle - 2), middle + 2, (num_rows, num_groups))
    if zero is not None:
        zeros[:] = zero
    zeros[0, 0] = max(lowest_zero, 0) if zero is None else zero
    plain = np.empty((num_rows, num_inputs), dtype=np.float32)
    for column in range(num_inputs):
        group = g_idx[column]
        plain[:, column] = scales[:, group].astype(np.float32) * (q[:, column] - zeros[:, group])
    return q, scales, zeros, torch.from_numpy(plain)


def _packed_rows(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """Return numbers (m, n) packed along m: (m * bits / 32, n), int32, the first in the lowest bits."""
    per_word = 32 // bits
    words = np.zeros((-(-numbers.shape[0] // per_word), numbers.shape[1]), dtype=np.uint32)
    for row in range(numbers.shape[0]):
        words[row // per_word] |= numbers[row].astype(np.uint32) << np.uint32(bits * (row % per_word))
    return torch.from_numpy(words.view(np.int32))

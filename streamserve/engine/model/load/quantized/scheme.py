"""How a folder's weights are quantised, by the `quantization_config` of its config.json; what is not read is refused.

No torch and no tensors: refused here is what the tensors would not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from streamserve.engine.model.load.errors import UnsupportedModel

GPTQ_BITS = (2, 4, 8)
GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero point: the first version took 1 away
# Formats of compressed-tensors: 4 or 8 bits in words, int8, and two names of FP8.
COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
PACKED_WORDS, FP8_DTYPES = (".qweight", ".weight_packed"), ("F8_E4M3", "F8_E5M2")
READ = (
    "GPTQ (2, 4 and 8 bits), AWQ (4 bits, gemm), FP8 (fp8 and fbgemm_fp8), MXFP4, and of compressed-tensors "
    "pack-quantized, int-quantized and float-quantized"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way of quantising. `title` names it in messages.

    `bits` are those of a number in packed words; `group_size` inputs have a scale of their own, None: all inputs, or as
    the shapes of the scales say. `zero_offset` is added to stored zero points; `block` (rows, columns): FP8 weights
    with a scale.
    """

    method: str
    title: str
    bits: int = 8
    group_size: int | None = None
    zero_offset: int = 0
    block: tuple[int, int] | None = None


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return the `quantization_config` of a config of transformers, or of its text part."""
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None)
        if found:
            return dict(found if isinstance(found, Mapping) else found.to_dict())
    return None


def scheme_of(config: Any) -> Scheme | None:
    """Return how a model's weights are quantised; None: they are not. Raise `UnsupportedModel` for another way."""
    given = quantization_of(config)
    return None if given is None else read_scheme(given)


def read_scheme(given: Mapping[str, Any]) -> Scheme:
    """Return what a `quantization_config` says. Raise `UnsupportedModel` for a way that is not read."""
    method = str(given.get("quant_method", ""))
    if method not in SCHEMES:
        raise refusal(f"its weights are quantised by {method or 'a method without a name'}")
    return SCHEMES[method](given)


def require_plain(headers: Iterable[Mapping[str, Any]]) -> None:
    """Raise `UnsupportedModel` for quantised weights, by files' headers, where the config has no word of them.

    transformers would take the numbers without their scales.
    """
    for header in headers:
        for name, place in header.items():
            if name.endswith(PACKED_WORDS) or (name.endswith(".weight") and place["dtype"] in FP8_DTYPES):
                raise refusal(
                    f"{name} is quantised, and its config.json has no quantization_config that says how (an old "
                    "checkpoint has it in quantize_config.json)"
                )


def refusal(reason: str) -> UnsupportedModel:
    """Return the error for a way of quantising that is not read."""
    return UnsupportedModel(
        f"The checkpoint is not supported: {reason}. What is read: {READ}. Take the model in one of these, in bfloat16 "
        "(QUANTIZE makes int8 or int4 of it), or as a GGUF file."
    )


def _gptq(given: Mapping[str, Any]) -> Scheme:
    bits, kind = given.get("bits"), given.get("checkpoint_format") or given.get("format") or "gptq"
    if bits not in GPTQ_BITS:
        raise refusal(f"its GPTQ weights have {bits} bits")
    if kind not in GPTQ_FORMATS:
        raise refusal(f"its GPTQ weights are in the format {kind}")
    return Scheme(
        method="gptq",
        title=f"GPTQ int{bits}",
        bits=bits,
        group_size=_group_size(given.get("group_size")),
        zero_offset=GPTQ_FORMATS[kind],
    )


def _awq(given: Mapping[str, Any]) -> Scheme:
    bits = given.get("bits", given.get("w_bit", 4))
    kind = str(given.get("version") or given.get("format") or "gemm").lower()
    if bits != 4:
        raise refusal(f"its AWQ weights have {bits} bits")
    if kind != "gemm":
        raise refusal(f"its AWQ weights are in the format {kind}")
    return Scheme(
        method="awq",
        title="AWQ int4",
        bits=4,
        group_size=_group_size(given.get("group_size", given.get("q_group_size"))),
    )


def _fp8(given: Mapping[str, Any]) -> Scheme:
    block = given.get("weight_block_size")
    return Scheme(method="fp8", title="FP8", block=None if not block else (int(block[0]), int(block[1])))


def _mxfp4(_given: Mapping[str, Any]) -> Scheme:
    return Scheme(method="mxfp4", title="MXFP4", bits=4, group_size=32)


def _compressed(given: Mapping[str, Any]) -> Scheme:
    groups = list((given.get("config_groups") or {}).values())
    formats = {group.get("format") or given.get("format") for group in groups} or {given.get("format")}
    unknown = sorted(str(name) for name in formats if name not in COMPRESSED)
    if unknown:
        raise refusal(f"its compressed-tensors weights are in the format {unknown[0]}")
    if (given.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise refusal("its compressed-tensors weights are sparse")
    if given.get("transform_config"):
        raise refusal("its compressed-tensors weights are rotated, and inputs would have to be")
    weights = [group.get("weights") or {} for group in groups]
    bits = sorted({f"{one.get('type', 'int')}{one.get('num_bits', '')}" for one in weights})
    return Scheme(
        method="compressed-tensors",
        title=f"compressed-tensors {', '.join(bits)}".strip(),
        bits=min((int(one["num_bits"]) for one in weights if one.get("num_bits")), default=8),
        block=next((_block(one) for one in weights if one.get("block_structure")), None),
    )


def _block(weights: Mapping[str, Any]) -> tuple[int, int]:
    rows, columns = weights["block_structure"]
    return int(rows), int(columns)


def _group_size(given: Any) -> int | None:
    return None if given is None or int(given) <= 0 else int(given)


SCHEMES = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
}

"""Compile each Triton kernel for GPUs that are not here, and print what it takes: `python -m` this module.

Exits with an error where a kernel does not compile. Needs triton, whose wheel brings the assembler; no GPU.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from streamserve.engine.model.cuda import draw, gate, heads, norm, paged_attention

CAPABILITIES = (80, 90, 100)  # A100, H100 and H200, B200
HALF = "*bf16"
_STRIDES = {"query_row": "i32", "query_head": "i32", "num_slots": "i32", "scaling": "fp32"}
_HEAD = {"G": 4, "D": 128, "DV": 128, "BLOCK_SIZE": 32, "PADDED": 128, "PADDED_V": 128, "KEYS": 64}
_POINTERS = dict.fromkeys(("query", "keys", "values", "sinks", "out"), HALF)
PLAIN = {"WINDOW": 0, "SOFTCAP": 0.0, "HAS_SINKS": False}
FULL = {"WINDOW": 128, "SOFTCAP": 30.0, "HAS_SINKS": True}

# The function, the types of its arguments, its constants, and its warps.
Kernel = tuple[Any, dict[str, str], dict[str, Any], int]


def kernels() -> list[Kernel]:
    """Return all kernels, attention without and with all that it knows."""
    found: list[Kernel] = []
    for kind in (PLAIN, FULL):
        types = _POINTERS | _STRIDES | {"tables": "*i32", "positions": "*i64", "sums": "*fp32", "table_row": "i32"}
        splits = {"SPLITS": 8, "ROWS": 16}
        found.append((paged_attention._decode, types | {"out": "*fp32"}, {**_HEAD, **kind, **splits}, 4))
        types = _POINTERS | _STRIDES | {"table": "*i64", "start": "i32", "num_rows": "i32"}
        found.append((paged_attention._prompt, types, {**_HEAD, **kind, "ROWS": 64}, 4))
    types = {"parts": "*fp32", "sums": "*fp32", "out": HALF}
    found.append((paged_attention._join, types, {"DV": 128, "SPLITS": 8, "PADDED_V": 128}, 1))
    types = dict.fromkeys(("qkv", "weights", "cos", "sin", "scales", "query", "keys", "values"), HALF)
    sizes = {"HQ": 32, "HKV": 8, "D": 128, "TURNED": 128, "HAS_NORM": True, "HAS_SCALE": True, "PADDED": 128}
    found.append((heads._heads, types | {"slots": "*i64", "num_slots": "i32", "eps": "fp32"}, sizes, 1))
    types = dict.fromkeys(("rows", "change", "weight", "total", "out"), HALF) | {"size": "i32", "eps": "fp32"}
    found.append((norm._norm, types, {"HAS_CHANGE": True, "PADDED": 4096}, 8))
    found.append((gate._gate, {"both": HALF, "out": HALF, "size": "i32"}, {"KIND": 1, "COLUMNS": gate.COLUMNS}, 4))
    types = {"logits": "*fp32", "shapes": "*fp32", "keys": "*i32", "token_ids": "*i64", "finite": "*i8"}
    sizes = {"COLUMNS": draw.COLUMNS}
    found.append((draw._draw, types | {"row_stride": "i32", "vocab_size": "i32"}, sizes, 16))
    return found


def main() -> None:
    """Print a line for each kernel and capability."""
    for function, types, constants, num_warps in kernels():
        signature = {name: "constexpr" if name in constants else types[name] for name in function.arg_names}
        source = ASTSource(fn=function, signature=signature, constexprs=constants)
        for capability in CAPABILITIES:
            target = GPUTarget("cuda", capability, 32)
            made = triton.compile(source, target=target, options={"num_warps": num_warps})
            size, shared = len(made.asm["cubin"]), made.metadata.shared
            print(f"{function.__name__} sm_{capability}: {size} bytes, {shared} bytes of shared memory", flush=True)


if __name__ == "__main__":
    main()

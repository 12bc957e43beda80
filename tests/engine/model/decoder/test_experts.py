"""Experts in one native call compute what the plain experts do, and a token's numbers depend on no other token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.engine.model.decoder.decoder import Decoder
from streamserve.engine.model.decoder.experts import Experts
from streamserve.engine.model.decoder.native_experts import native_experts
from streamserve.engine.model.decoder.parts import Norm
from streamserve.engine.model.decoder.spec import ExpertsSpec, Routing
from streamserve.engine.model.kernels import Kernels
from streamserve.engine.model.linear.base import PlainLinear
from streamserve.engine.model.linear.native import dequantized, from_groups, group_wise, pack
from streamserve.native.build import find_compiler
from streamserve.native.library import Library
from tests.native.conftest import library  # noqa: F401  (a fixture)
from tests.support.models.model_driver import load_tiny
from tests.support.models.tiny_models import save_model

KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": None, "int4": None}
# Relative to the norm: bf16 weights may be multiplied with bf16 inputs, grouped kinds with int8.
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 2e-3, "int8": 6e-2, "int4": 6e-2}


class Weights:
    """The weights of experts in a kind, as native layers and as the float32 matrices that they stand for."""

    def __init__(self, native: Library, kind: str, dtype: torch.dtype, generator: torch.Generator) -> None:
        self.native, self.kind, self.dtype, self.generator = native, kind, dtype, generator

    def random(self, *shape: int) -> torch.Tensor:
        """Return numbers that are exact in every dtype of the states."""
        return torch.randn(shape, generator=self.generator).to(torch.bfloat16).half().float()

    def layers(self, num_outputs: int, num_inputs: int, bias: torch.Tensor | None) -> tuple[Any, Any]:
        """Return a native layer and its plain reference."""
        weight = self.random(num_outputs, num_inputs) / num_inputs**0.5
        if self.kind in ("int8", "int4"):
            groups = group_wise(self.native, self.kind, weight)
            return from_groups(self.native, groups, bias, self.dtype), PlainLinear(dequantized(groups), bias)
        short = weight.to(KINDS[self.kind])
        layer = pack(self.native, short, bias)
        layer.dtype = self.dtype
        return layer, PlainLinear(short.float(), bias)


def make(
    native: Library,
    *,
    kind: str = "fp32",
    dtype: torch.dtype = torch.float32,
    num_experts: int = 7,
    num_taken: int = 3,
    hidden: int = 40,
    inner: int = 32,
    routing: Routing = Routing.SOFTMAX_ALL,
    activation: str = "silu",
    has_bias: bool = False,
    is_clamped: bool = False,
    has_norms: bool = False,
    seed: int = 0,
) -> tuple[Experts, Experts]:
    """Return experts that the library computes in `dtype`, and their reference in float32."""
    weights = Weights(native, kind, dtype, torch.Generator().manual_seed(seed))
    random = weights.random
    spec = ExpertsSpec(
        num_experts=num_experts,
        num_taken=num_taken,
        intermediate_size=inner,
        routing=routing,
        has_bias=has_bias,
        clamp=(1.5, 1.702) if is_clamped else None,
    )
    gate_up = [weights.layers(2 * inner, hidden, random(2 * inner) if has_bias else None) for _ in range(num_experts)]
    down = [weights.layers(hidden, inner, random(hidden) if has_bias else None) for _ in range(num_experts)]
    router, router_bias = random(num_experts, hidden), random(num_experts) if has_bias else None
    norms = [random(hidden) + 1 for _ in range(3)]

    def of(place: int, dtype: torch.dtype) -> Experts:
        return Experts(
            spec=spec,
            router=router.to(dtype),
            router_bias=None if router_bias is None else router_bias.to(dtype),
            gate_up=[pair[place] for pair in gate_up],
            down=[pair[place] for pair in down],
            activation=activation,
            router_scale=norms[0] if has_norms else None,
            expert_scale=norms[0][:num_experts] if has_norms and num_experts <= hidden else None,
            eps=1e-6,
            norm=Norm(norms[1], 1e-6) if has_norms else None,
            after_norm=Norm(norms[2], 1e-6) if has_norms else None,
        )

    found, wanted = of(0, dtype), of(1, torch.float32)
    found.native = native_experts(Kernels(native), found)
    assert found.native is not None
    return found, wanted


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@settings(max_examples=40)
@given(
    kind=st.sampled_from(list(KINDS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    shape=st.tuples(st.integers(1, 70), st.integers(1, 9), st.integers(16, 100), st.integers(2, 5)),
    routing=st.sampled_from(Routing),
    activation=st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu"]),
    parts=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    num_tokens=st.integers(1, 50),
    seed=st.integers(0, 1 << 30),
)
def test_equals_the_plain_experts(
    library: Library,  # noqa: F811
    kind: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    routing: Routing,
    activation: str,
    parts: tuple[bool, bool, bool],
    num_tokens: int,
    seed: int,
) -> None:
    """Any shape, routing, activation, kind of weights and dtype of the states, within their rounding."""
    num_experts, num_taken, hidden, inner = shape
    found, wanted = make(
        library,
        kind=kind,
        dtype=dtype,
        num_experts=num_experts,
        num_taken=min(num_taken, num_experts),
        hidden=hidden,
        inner=16 * inner,
        routing=routing,
        activation=activation,
        has_bias=parts[0],
        is_clamped=parts[1],
        has_norms=parts[2] and dtype is torch.float32,  # or a rounded router takes other experts
        seed=seed,
    )
    tokens = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)
    rounding = max(TOLERANCE[kind], {torch.float32: 0.0, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype])
    assert error(found(tokens), wanted(tokens.float())) < rounding


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_the_same_alone(library: Library, kind: str) -> None:  # noqa: F811
    """Bit for bit: neither what its neighbours are nor their number changes it, nor the number of threads."""
    experts, _ = make(library, kind=kind, num_experts=20, num_taken=4, hidden=100, inner=80)
    tokens = torch.randn(33, 100)
    whole = experts(tokens)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for row in range(0, 33, 5):
                assert torch.equal(experts(tokens[row : row + 1])[0], whole[row])
            for num_tokens in (2, 7, 33):
                assert torch.equal(experts(tokens[:num_tokens]), whole[:num_tokens])
    finally:
        torch.set_num_threads(before)
    tokens[1:] *= 1e4
    assert torch.equal(experts(tokens)[0], whole[0])


def test_many_tokens_are_several_passes(library: Library) -> None:  # noqa: F811
    """What does not fit the memory of a pass is computed in the next, and gives the same."""
    experts, wanted = make(library, num_experts=4, num_taken=4, hidden=17, inner=2048)
    tokens = torch.randn(1100, 17)
    found = experts(tokens)
    assert torch.equal(experts(tokens[1000:]), found[1000:])
    assert error(found, wanted(tokens)) < TOLERANCE["fp32"]


@pytest.mark.parametrize("is_clamped", [False, True])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_stays_so(library: Library, is_clamped: bool, broken: float) -> None:  # noqa: F811
    """The sampler finds it, and it changes no other token."""
    experts, _ = make(library, is_clamped=is_clamped)
    tokens = torch.randn(6, 40)
    wanted = experts(tokens)
    tokens[3, 5] = broken
    found = experts(tokens)
    others = [0, 1, 2, 4, 5]
    assert not found[3].isfinite().all()
    assert torch.equal(found[others], wanted[others])


def test_equal_logits_take_the_first_experts(library: Library) -> None:  # noqa: F811
    """A tie is broken by the experts' numbers, on every level."""
    experts, _ = make(library, num_taken=2)
    experts.router[:] = 0
    experts.native = native_experts(Kernels(library), experts)
    tokens = torch.randn(3, 40)
    outputs = [experts.down[i](experts._gate(experts.gate_up[i](tokens))) for i in (0, 1)]
    assert error(experts(tokens), (outputs[0] + outputs[1]) / 7) < TOLERANCE["fp32"]


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "mixtral", "gemma4_text"])
def test_the_engine_takes_them(name: str, tmp_path: Path) -> None:
    """Where there are kernels; a shape that they do not have, or no kernels, is computed by torch."""
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler: apt install g++")
    fields: dict[str, Any] = {
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
        "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
    }.get(name, {})
    inner = "moe_intermediate_size" if name in ("qwen3_moe", "gemma4_text") else "intermediate_size"
    takes: Callable[..., list[bool]] = lambda folder, **options: [  # noqa: E731
        layer.experts.native is not None for layer in layers_of(folder, **options)
    ]
    folder = save_model(tmp_path / "32", name, **fields, **{inner: 32})
    assert all(takes(folder))
    assert not any(takes(folder, native=False))
    assert not any(takes(save_model(tmp_path / "24", name, **fields, **{inner: 24})))


def layers_of(folder: Path, **options: Any) -> Any:
    model = load_tiny(folder, **options).loaded.model
    assert isinstance(model, Decoder)
    return model.layers

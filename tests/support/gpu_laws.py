"""Laws of the Triton kernels against torch, on a GPU or on a CPU by Triton's interpreter."""

from __future__ import annotations

import random

import torch

from streamserve.engine.model.attention import Variant, attend_decodes, attend_prefill
from streamserve.engine.model.batch import StepBatch, build_batch
from streamserve.engine.model.cuda.kernels import GPUKernels
from streamserve.engine.model.decoder.parts import ACTIVATION, HeadsNorm, Norm, Rotary, gated
from streamserve.engine.model.decoder.spec import RotarySpec
from streamserve.engine.model.kv_cache import KVCache, LayerShape
from streamserve.engine.model.sampler import sample
from streamserve.engine.plan import Chunk, StepPlan
from tests.support.engines.specs import spec_of

ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def check_attention(kernels: GPUKernels, dtype: torch.dtype, seed: int) -> None:
    """A random shape: decodes by any number of splits and a chunk are torch's; slots that are nobody's hold NaN."""
    rng, device = random.Random(seed), kernels.device
    torch.manual_seed(seed)
    block_size, num_kv_heads, group = rng.choice([4, 16, 32]), rng.choice([1, 2, 3]), rng.choice([1, 3, 4])
    key_dim = rng.choice([8, 24, 64, 80])
    shape = LayerShape(num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=rng.choice([key_dim, 16]))
    num_heads = num_kv_heads * group
    kv = KVCache({0: shape}, num_blocks=220, block_size=block_size, dtype=dtype, device=device)
    batch = _batch(kv, rng)
    variant = Variant(
        scaling=key_dim**-0.5,
        window=rng.choice([None, 7, 24]),
        softcap=rng.choice([None, 2.0]),
        sinks=torch.randn(num_heads, device=device, dtype=dtype) if rng.random() < 0.5 else None,
    )
    plain, pools = _exact(kv), (kv.keys[0], kv.values[0])
    group_of = batch.decodes[0]
    query = torch.randn(group_of.positions.numel(), num_heads, key_dim, device=device).to(dtype).transpose(0, 1)
    wanted = attend_decodes(query.float(), plain, 0, group_of, _exact_variant(variant))
    for num_programs in (1, 40, 1000):
        found = kernels.attend_decodes(
            query, *pools, group_of.positions, group_of.block_tables, block_size, **variant.arguments,
            num_programs=num_programs,
        )  # fmt: skip
        torch.testing.assert_close(found.float(), wanted, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    span = batch.prefills[0]
    query = torch.randn(span.num_tokens, num_heads, key_dim, device=device).to(dtype).transpose(0, 1)
    wanted = attend_prefill(query.float(), *plain.read(0, span.context), span, _exact_variant(variant))
    found = kernels.attend_prompt(query, *pools, span.start, span.block_table, block_size, **variant.arguments)
    torch.testing.assert_close(found.float(), wanted, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def _batch(kv: KVCache, rng: random.Random) -> StepBatch:
    """Return five decodes and a chunk, whose slots hold random numbers, and all others NaN."""
    for pool in (kv.keys[0], kv.values[0]):
        pool.fill_(float("nan"))
    deck = list(range(1, kv.num_blocks))
    rng.shuffle(deck)

    def chunk(seq_id: int, start: int, num_tokens: int) -> Chunk:
        last = start + num_tokens
        table = tuple(deck.pop() for _ in range((last - 1) // kv.block_size + 1))
        for index, block in enumerate(table):
            size = min(kv.block_size, last - index * kv.block_size)
            for pool in (kv.keys[0], kv.values[0]):
                pool[:, block * kv.block_size : block * kv.block_size + size].normal_()
        return Chunk(seq_id=seq_id, start=start, token_ids=(1,) * num_tokens, block_table=table)

    chunks = [chunk(index, start, 1) for index, start in enumerate([0, 15, 16, 97, 150])]
    chunks.append(chunk(9, rng.choice([0, 33]), rng.choice([5, 70])))
    plan = StepPlan(step_id=0, chunks=tuple(chunks))
    return build_batch(plan, kv.block_size, kv.keys[0].device, groups_decodes=False)


def _exact(kv: KVCache) -> KVCache:
    """Return the same memory in float32."""
    copy = KVCache(
        {}, num_blocks=kv.num_blocks, block_size=kv.block_size, dtype=torch.float32, device=torch.device("cpu")
    )
    copy.keys, copy.values = {0: kv.keys[0].float()}, {0: kv.values[0].float()}
    return copy


def _exact_variant(variant: Variant) -> Variant:
    sinks = None if variant.sinks is None else variant.sinks.float()
    return Variant(scaling=variant.scaling, window=variant.window, softcap=variant.softcap, sinks=sinks)


def check_heads(kernels: GPUKernels, dtype: torch.dtype, seed: int) -> None:
    """Norms of heads, a rotation of all or a part of them, and where keys and values are stored."""
    rng, device = random.Random(seed), kernels.device
    torch.manual_seed(seed)
    num_heads, num_kv_heads, head_dim = rng.choice([(4, 2, 16), (3, 1, 24), (2, 2, 8), (8, 2, 64)])
    dim, num_tokens, num_slots = rng.choice([head_dim, 8]), 5, 40
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=device).to(dtype)
    keys = torch.zeros(num_kv_heads, num_slots, head_dim, device=device, dtype=dtype)
    values = torch.zeros_like(keys)
    slots = torch.tensor([3, 9, 1, 20, 39], device=device)
    weights = torch.randn(num_heads + num_kv_heads, head_dim, device=device).to(dtype) if rng.random() < 0.5 else None
    scale = torch.rand(num_tokens, 1, 1, device=device).to(dtype) if rng.random() < 0.5 else None
    spec = RotarySpec(frequencies=tuple(10.0**-i for i in range(dim // 2)))
    turn = Rotary(spec, dtype, device).at(torch.tensor([0, 5, 9, 100, 3], device=device))
    query = kernels.turn_and_store(
        qkv, keys, values, slots, num_heads=num_heads, turn=(turn.cos, turn.sin), weights=weights, eps=1e-6,
        query_scale=scale,
    )  # fmt: skip
    heads = qkv.float().view(num_tokens, -1, head_dim)
    turned = heads[:, : num_heads + num_kv_heads]
    if weights is not None:
        turned = HeadsNorm(weights.float(), 1e-6)(turned)
    exact = Rotary(spec, torch.float32, device).at(torch.tensor([0, 5, 9, 100, 3], device=device))
    turned = exact(turned)
    wanted = turned[:, :num_heads] if scale is None else turned[:, :num_heads] * scale.float()
    bound = {"rtol": ROUNDING[dtype], "atol": ROUNDING[dtype]}
    torch.testing.assert_close(query.float(), wanted.transpose(0, 1), **bound)
    torch.testing.assert_close(keys[:, slots].float(), turned[:, num_heads:].transpose(0, 1), **bound)
    torch.testing.assert_close(values[:, slots].float(), heads[:, num_heads + num_kv_heads :].transpose(0, 1), **bound)
    assert not keys[:, [0, 2, 38]].any()


def check_norms(kernels: GPUKernels, dtype: torch.dtype) -> None:
    """A norm, and that of a sum, with a weight in the rows' dtype and in float32; rows that lie apart."""
    bound = {"rtol": ROUNDING[dtype], "atol": ROUNDING[dtype]}
    for size, weight_dtype in ((24, dtype), (576, torch.float32), (2048, dtype)):
        tokens, change = (torch.randn(5, size, device=kernels.device).to(dtype) for _ in range(2))
        weight = torch.randn(size, device=kernels.device).to(weight_dtype)
        plain = Norm(weight.float(), 1e-6)
        torch.testing.assert_close(kernels.norm(tokens, weight, 1e-6).float(), plain(tokens.float()), **bound)
        apart = torch.cat((tokens, change), dim=-1)[:, :size]
        assert torch.equal(kernels.norm(apart, weight, 1e-6), kernels.norm(tokens, weight, 1e-6))
        total, normed = kernels.add_norm(tokens, change, weight, 1e-6)
        assert torch.equal(total, tokens + change)
        torch.testing.assert_close(normed.float(), plain((tokens + change).float()), **bound)


def check_gates(kernels: GPUKernels, dtype: torch.dtype) -> None:
    """Each activation, over a size that no tile divides."""
    for name, activation in ACTIVATION.items():
        both = torch.randn(3, 2 * 1500, device=kernels.device).to(dtype)
        bound = {"rtol": ROUNDING[dtype], "atol": ROUNDING[dtype]}
        torch.testing.assert_close(kernels.gated(both, name).float(), gated(both.float(), activation), **bound)


def check_draws(kernels: GPUKernels, num_rows: int, vocab_size: int) -> None:
    """Whatever is sampled how, the kernel's tokens are those of the sampler on a CPU, and so are the broken rows."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(2)) * 2
    logits[-1, 5], logits[-2], logits[-3, 3] = float("nan"), float("-inf"), float("inf")
    specs = [
        spec_of(
            i,
            seed=i,
            temperature=[0.9, 0.0, 1.3, 1e-6][i % 4],
            top_p=[0.9, 1.0, 0.3, 0.05, 1e-9][i % 5],
            top_k=[0, 100, 1][i % 3],
            min_p=[0.0, 0.01][i % 2],
        )
        for i in range(num_rows)
    ]
    wanted = sample(logits, specs)
    found = sample(logits.to(kernels.device), specs, kernels=kernels)
    assert torch.equal(found.finite.cpu(), wanted.finite)
    assert torch.equal(found.token_ids.cpu()[:-3], wanted.token_ids[:-3])

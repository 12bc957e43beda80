"""Attention over block tables equals the plain sum, and a row depends on its own blocks alone; so of a prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")

from streamserve.engine.model.kernels import Kernels  # noqa: E402  (after the skip)
from streamserve.engine.model.kv_cache import dequantize, quantize  # noqa: E402
from streamserve.native.library import Library  # noqa: E402

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
NUM_CASES = 60


@dataclass(frozen=True, kw_only=True)
class Case:
    """Pools, tables and queries of one call, and how it attends."""

    query: torch.Tensor  # (Hq, S, D)
    keys: torch.Tensor  # (Hkv, num_slots, D)
    values: torch.Tensor
    positions: torch.Tensor  # (S,)
    block_tables: torch.Tensor  # (S, num_blocks)
    block_size: int
    how: dict[str, Any]


def make_case(rng: random.Random, dtype: torch.dtype) -> Case:
    """Return random shapes: odd dims, values narrower than keys, all groups, contexts of one part and of several."""
    num_kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4, 5, 8])
    key_dim = rng.choice([1, 7, 16, 33, 64, 80, 128])
    value_dim, block_size = rng.choice([key_dim, 5, 64]), rng.choice([1, 4, 16, 32])
    lengths = [rng.choice([1, 5, 63, 64, 65, 200, 511, 512, 513, 1100]) for _ in range(rng.randint(1, 5))]
    sizes = [-(-length // block_size) for length in lengths]
    deck = list(range(1, sum(sizes) + 1))
    rng.shuffle(deck)
    tables = torch.zeros(len(lengths), max(sizes), dtype=torch.int64)
    for row, size in enumerate(sizes):
        tables[row, :size], deck = torch.tensor(deck[:size]), deck[size:]
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_slots, num_heads = (sum(sizes) + 1) * block_size, num_kv_heads * group
    return Case(
        query=numbers(len(lengths), num_heads, key_dim).transpose(0, 1),
        keys=numbers(num_kv_heads, num_slots, key_dim),
        values=numbers(num_kv_heads, num_slots, value_dim),
        positions=torch.tensor(lengths) - 1,
        block_tables=tables,
        block_size=block_size,
        how={
            "scaling": rng.choice([key_dim**-0.5, 0.3]),
            "window": rng.choice([None, None, 1, 7, 100, 600]),
            "softcap": rng.choice([None, None, 2.0, 50.0]),
            "sinks": rng.choice([None, numbers(num_heads)]),
        },
    )


def attend(kernels: Kernels, case: Case, rows: slice = slice(None)) -> torch.Tensor:
    return kernels.attend_decodes(
        case.query[:, rows],
        case.keys,
        case.values,
        case.positions[rows],
        case.block_tables[rows],
        case.block_size,
        **case.how,
    )


def slots_of(case: Case, row: int) -> torch.Tensor:
    """Return the slots that a row may read."""
    last, window = int(case.positions[row]), case.how["window"]
    seen = torch.arange(0 if window is None else max(0, last + 1 - window), last + 1)
    return case.block_tables[row, seen // case.block_size] * case.block_size + seen % case.block_size


def reference(case: Case) -> torch.Tensor:
    """Return the same in float64, row by row, by definition."""
    num_heads, rows = case.query.shape[0], []
    for row in range(len(case.positions)):
        slots = slots_of(case, row)
        keys, values = (
            pool[:, slots].double().repeat_interleave(num_heads // pool.shape[0], 0)
            for pool in (case.keys, case.values)
        )
        scores = (keys @ case.query[:, row, :, None].double())[..., 0] * case.how["scaling"]
        if case.how["softcap"] is not None:
            scores = torch.tanh(scores / case.how["softcap"]) * case.how["softcap"]
        if case.how["sinks"] is not None:
            scores = torch.cat([scores, case.how["sinks"].double()[:, None]], 1)
        weights = scores.softmax(1)[:, : len(slots)]
        rows.append((weights[:, None] @ values)[:, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_equals_the_plain_sum(library: Library, dtype: torch.dtype) -> None:
    """Whatever the heads, dims, blocks, lengths, window, softcap and sinks are."""
    kernels = Kernels(library)
    for seed in range(NUM_CASES):
        case = make_case(random.Random(seed), dtype)
        error = float((attend(kernels, case).double() - reference(case)).abs().max())
        assert error < TOLERANCE[dtype], f"seed {seed}: {error}"


def test_a_row_is_the_same_alone(library: Library) -> None:
    """Bit for bit: other rows, and their number, change nothing."""
    kernels = Kernels(library)
    for seed in range(NUM_CASES):
        case = make_case(random.Random(seed), torch.float32)
        together = attend(kernels, case)
        for row in range(len(case.positions)):
            assert torch.equal(attend(kernels, case, slice(row, row + 1))[0], together[row]), f"seed {seed}"


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_change_nothing(library: Library, num_threads: int) -> None:
    """Bit for bit: a context is cut at the same places whatever the number of threads."""
    kernels = Kernels(library)
    before = torch.get_num_threads()
    cases = [make_case(random.Random(seed), torch.float32) for seed in range(20)]
    found = []
    try:
        for count in (1, num_threads):
            torch.set_num_threads(count)
            found.append([attend(kernels, case) for case in cases])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, many) for one, many in zip(*found, strict=True))


def test_only_slots_of_the_row_are_read(library: Library) -> None:
    """NaN in every other slot changes nothing, and NaN in one of the row's own is seen."""
    kernels = Kernels(library)
    for seed in range(20):
        case = make_case(random.Random(seed), torch.float32)
        row = len(case.positions) - 1
        wanted = attend(kernels, case, slice(row, row + 1))
        slots = slots_of(case, row)
        hidden = torch.ones(case.keys.shape[1], dtype=torch.bool).index_fill_(0, slots, False)
        case.keys[:, hidden] = case.values[:, hidden] = float("nan")
        assert torch.equal(attend(kernels, case, slice(row, row + 1)), wanted)
        case.keys[:, slots[len(slots) // 2]] = float("nan")
        assert attend(kernels, case, slice(row, row + 1)).isnan().all()


def as_prompt(case: Case, seed: int) -> Case:
    """Return tokens of the case's last sequence as rows, the last of them its newest."""
    last = int(case.positions[-1])
    start = random.Random(seed).choice([0, last // 2, max(0, last - 5)])
    num_rows = last + 1 - start
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_rows, len(case.query), case.query.shape[2], generator=generator).to(case.query.dtype)
    return replace(
        case,
        query=query.transpose(0, 1),
        positions=torch.arange(start, last + 1),
        block_tables=case.block_tables[-1:].repeat(num_rows, 1),
    )


def attend_prompt(kernels: Kernels, case: Case, rows: slice = slice(None)) -> torch.Tensor:
    """Attend with neighbouring rows of one sequence."""
    start, table = int(case.positions[rows][0]), case.block_tables[0]
    return kernels.attend_prompt(case.query[:, rows], case.keys, case.values, start, table, case.block_size, **case.how)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_prompt_equals_the_plain_sum(library: Library, dtype: torch.dtype) -> None:
    """Whatever the heads, dims, blocks, window, softcap and sinks are, and wherever the chunk begins."""
    kernels = Kernels(library)
    for seed in range(NUM_CASES // 3):
        case = as_prompt(make_case(random.Random(seed), dtype), seed)
        few = slice(-min(len(case.positions), 40), None)
        last = replace(
            case, query=case.query[:, few], positions=case.positions[few], block_tables=case.block_tables[few]
        )
        error = float((attend_prompt(kernels, case)[few].double() - reference(last)).abs().max())
        assert error < TOLERANCE[dtype], f"seed {seed}: {error}"


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_scores_may_rise_from_tile_to_tile(library: Library, dtype: torch.dtype) -> None:
    """Scores that grow with their position, a little or in leaps, are weighed as those that come in any other order."""
    kernels = Kernels(library)
    for seed in range(NUM_CASES // 3):
        case = make_case(random.Random(seed), dtype)
        for row in range(len(case.positions)):
            slots = slots_of(case, row)
            case.keys[:, slots] *= torch.linspace(0, 1 + seed % 4, len(slots)).to(dtype)[:, None]
        error = float((attend(kernels, case).double() - reference(case)).abs().max())
        assert error < 2 * TOLERANCE[dtype], f"seed {seed}: {error}"


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_prompts_rows_are_decodes(library: Library, dtype: torch.dtype) -> None:
    """Bit for bit: what a token sees decides, not whether it is computed alone or beside its neighbours."""
    kernels = Kernels(library)
    for seed in range(NUM_CASES):
        case = as_prompt(make_case(random.Random(seed), dtype), seed)
        assert torch.equal(attend_prompt(kernels, case), attend(kernels, case)), f"seed {seed}"


def test_chunks_change_nothing(library: Library) -> None:
    """Bit for bit: wherever a prompt is cut, and in whatever number of rows."""
    kernels = Kernels(library)
    for seed in range(NUM_CASES):
        case = as_prompt(make_case(random.Random(seed), torch.float32), seed)
        cut = random.Random(seed).randint(1, len(case.positions))
        cuts = [slice(0, cut), slice(cut, None)] if cut < len(case.positions) else [slice(None)]
        parts = [attend_prompt(kernels, case, rows) for rows in cuts]
        assert torch.equal(torch.cat(parts), attend_prompt(kernels, case)), f"seed {seed}"


def test_a_prompt_reads_its_slots_alone(library: Library) -> None:
    """NaN in every slot that its first row's window and its last row do not hold changes nothing."""
    kernels = Kernels(library)
    for seed in range(20):
        case = as_prompt(make_case(random.Random(seed), torch.float32), seed)
        wanted = attend_prompt(kernels, case)
        seen = torch.cat([slots_of(case, 0), slots_of(case, len(case.positions) - 1)])
        seen = torch.cat([seen, *(slots_of(case, row)[-1:] for row in range(len(case.positions)))])
        hidden = torch.ones(case.keys.shape[1], dtype=torch.bool).index_fill_(0, seen, False)
        case.keys[:, hidden] = case.values[:, hidden] = float("nan")
        assert torch.equal(attend_prompt(kernels, case), wanted), f"seed {seed}"


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_vectors_reach_their_slots(library: Library, dtype: torch.dtype) -> None:
    """And nothing else is written, whatever the strides of the vectors."""
    kernels = Kernels(library)
    for shape in ((3, 5, 16), (1, 1, 7), (2, 8, 33)):
        num_heads, num_tokens, dim = shape
        vectors = torch.randn(num_tokens, num_heads + 2, dim).to(dtype)[:, 1:-1].transpose(0, 1)
        pool = torch.zeros(num_heads, 40, dim, dtype=dtype)
        slots = torch.randperm(40, generator=torch.Generator().manual_seed(dim))[:num_tokens]
        wanted = pool.clone().index_copy_(1, slots, vectors)
        kernels.write_slots(pool, slots, vectors)
        assert torch.equal(pool, wanted)


def test_int8_pools_are_read_as_what_they_stand_for(library: Library) -> None:
    """Decodes over rows in eight bits equal those over their numbers; a prompt's tokens are decodes, bit for bit."""
    kernels, rng = Kernels(library), random.Random(5)
    for _ in range(NUM_CASES):
        case = make_case(rng, rng.choice([torch.float32, torch.bfloat16]))
        rows = replace(case, keys=quantize(case.keys), values=quantize(case.values))
        whole = replace(
            case,
            query=case.query.float(),
            keys=dequantize(rows.keys, torch.float32),
            values=dequantize(rows.values, torch.float32),
        )
        found = attend(kernels, rows)
        tolerance = TOLERANCE[case.query.dtype]
        assert torch.allclose(found.float(), attend(kernels, whole), atol=tolerance, rtol=tolerance)
        for row, position in enumerate(case.positions.tolist()):
            prompt = kernels.attend_prompt(
                case.query[:, row : row + 1],
                rows.keys,
                rows.values,
                position,
                case.block_tables[row],
                case.block_size,
                **case.how,
            )
            assert torch.equal(prompt[0], found[row])


def test_a_vector_that_is_not_finite_reaches_its_readers(library: Library) -> None:
    case = make_case(random.Random(6), torch.float32)
    slots = slots_of(case, 0)
    values = case.values.clone()
    values[0, slots[-1], 0] = float("nan")
    rows = replace(case, keys=quantize(case.keys), values=quantize(values))
    assert bool(attend(Kernels(library), rows)[0, 0].isnan().any())

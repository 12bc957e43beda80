"""`HFRunner`: plans in, tokens out, through Hugging Face modelling code with our KV memory and attention.

Holds the model and the KV memory; knows no requests. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.plan import RawLogprobs, Sampled, SampleSpec, StepPlan, StepResult

from . import attention
from .batch import StepBatch, build_batch
from .errors import ModelLoadError, UnsupportedModel
from .kv_cache import (
    KVCache,
    LayerShape,
    bytes_per_block,
    default_budget,
    max_tokens_that_fit,
    most_useful_blocks,
    num_blocks_for,
)
from .loader import LoadedModel, Progress, load_model, no_progress
from .sampler import Draws, raw_logprobs, sample
from .support import max_model_len

NUMERICAL_ERROR = "numerical_error"


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step. Tensors may still be in the making on the GPU.

    `sampling[i]` is the place in the batch of the chunk whose token is draws[i]; `healthy` has one flag per chunk.
    """

    plan: StepPlan
    batch: StepBatch
    sampling: tuple[int, ...]
    specs: tuple[SampleSpec, ...]
    healthy: torch.Tensor
    draws: Draws | None


class HFRunner:
    """Runs plans on one model. See `plan.Runner` for the contract."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        layers: dict[int, LayerShape],
        block_size: int,
        num_blocks: int,
        max_model_len: int,
    ) -> None:
        self.loaded = loaded
        self.layers = layers
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.vocab_size = loaded.vocab_size
        self.eos_token_ids = loaded.eos_token_ids
        self.num_parameters = loaded.num_parameters
        self.dtype = str(loaded.dtype).removeprefix("torch.")
        self.device = str(loaded.device)
        self.revision = loaded.revision
        self.kv = self.new_kv(num_blocks)

    @property
    def max_tokens_that_fit(self) -> int:
        """Tokens that the whole KV memory can hold for one sequence."""
        return max_tokens_that_fit(self.num_blocks, self.block_size)

    def new_kv(self, num_blocks: int) -> KVCache:
        """Allocate KV memory of this model's shape."""
        return KVCache(
            self.layers,
            num_blocks=num_blocks,
            block_size=self.block_size,
            dtype=self.loaded.dtype,
            device=self.loaded.device,
        )

    def launch(self, plan: StepPlan) -> StepHandle:
        """Run the step; on a GPU this returns while it is still working."""
        with torch.inference_mode():
            batch = build_batch(plan, self.block_size, self.loaded.device)
            sampling = tuple(i for i, chunk in enumerate(batch.chunks) if chunk.sample is not None)
            specs = tuple(chunk.sample for chunk in batch.chunks if chunk.sample is not None)
            hidden, logits = self.forward(batch, [batch.last_rows[i] for i in sampling])
            healthy = _healthy_chunks(hidden, batch)
            draws = None if logits is None else sample(logits, specs)
        return StepHandle(plan, batch, sampling, specs, healthy, draws)

    def forward(self, batch: StepBatch, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the last hidden states (num_tokens, hidden) and the logits (len(rows), vocab_size) of `rows`."""
        model = self.loaded.model
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
        with self.loaded.attention.step(self.kv, batch):
            if not rows:
                return model.base_model(**inputs).last_hidden_state[0], None
            with _last_hidden_state(model) as seen:
                index = torch.tensor(rows, device=self.loaded.device)
                logits = model(**inputs, logits_to_keep=index).logits
        return seen[0][0], logits[0]

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for the step and return its tokens as plain numbers, in the plan's order."""
        found = dict(_failures(handle))
        if handle.draws is not None:
            found = dict(_samples(handle)) | found
        sampled = (found.get(chunk.seq_id) for chunk in handle.plan.chunks)
        return StepResult(step_id=handle.plan.step_id, sampled=tuple(entry for entry in sampled if entry is not None))

    def close(self) -> None:
        """Free the model and the KV memory; the runner is unusable afterwards."""
        del self.loaded, self.kv


@contextmanager
def _last_hidden_state(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect what the model's body gives its head."""
    seen: list[torch.Tensor] = []
    hook = model.base_model.register_forward_hook(lambda _module, _inputs, out: seen.append(out[0]))
    try:
        yield seen
    finally:
        hook.remove()


def _healthy_chunks(hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
    """One flag per chunk: all of its last hidden states are finite. hidden (num_tokens, hidden_size)."""
    rows = torch.isfinite(hidden.float().sum(dim=-1))  # (num_tokens,)
    num_decodes = len(batch.chunks) - len(batch.prefills)
    flags = [rows[:num_decodes], *(rows[span.rows].all()[None] for span in batch.prefills)]
    return torch.cat(flags)


def _failures(handle: StepHandle) -> Iterator[tuple[int, Sampled]]:
    healthy = handle.healthy.tolist()
    for chunk, is_healthy in zip(handle.batch.chunks, healthy, strict=True):
        if not is_healthy:
            yield chunk.seq_id, _failed(chunk.seq_id)


def _samples(handle: StepHandle) -> Iterator[tuple[int, Sampled]]:
    assert handle.draws is not None
    logprobs = raw_logprobs(handle.draws, handle.specs)
    rows = zip(handle.sampling, handle.draws.token_ids.tolist(), handle.draws.finite.tolist(), strict=True)
    for row, (place, token_id, finite) in enumerate(rows):
        seq_id = handle.batch.chunks[place].seq_id
        yield seq_id, _succeeded(seq_id, token_id, logprobs.get(row)) if finite else _failed(seq_id)


def _succeeded(seq_id: int, token_id: int, logprobs: RawLogprobs | None) -> Sampled:
    return Sampled(seq_id=seq_id, token_id=token_id, logprobs=logprobs)


def _failed(seq_id: int) -> Sampled:
    return Sampled(seq_id=seq_id, token_id=None, error=NUMERICAL_ERROR)


def load_runner(model_config: ModelConfig, engine_config: EngineConfig, progress: Progress = no_progress) -> HFRunner:
    """Load a model, give it KV memory, and prove by numbers that it answers as transformers would."""
    from .probe import probe

    loaded = load_model(model_config, progress)
    layers = record_layers(loaded)
    longest = max_model_len(loaded.config, engine_config.max_model_len)
    runner = HFRunner(
        loaded,
        layers=layers,
        block_size=engine_config.block_size,
        num_blocks=choose_num_blocks(loaded, layers, engine_config, longest),
        max_model_len=longest,
    )
    if model_config.parity_probe:
        progress("probe", 0.0)
        probe(runner)
    progress("probe", 1.0)
    return runner


def record_layers(loaded: LoadedModel) -> dict[int, LayerShape]:
    """Run one token through the model and note which layers attend, and in what shape."""
    model = loaded.model
    model.config._attn_implementation = attention.NAME
    token = torch.zeros(1, 1, dtype=torch.long, device=loaded.device)
    try:
        with torch.inference_mode(), loaded.attention.recording() as layers:
            model.base_model(input_ids=token, position_ids=token, use_cache=False)
    except Exception as error:  # modelling code not made for an external attention may raise anything
        raise UnsupportedModel(
            f"Models of type {loaded.model_type} are not supported: their code does not run over an external "
            f"attention ({type(error).__name__}: {error}). Choose another model."
        ) from error
    num_layers = loaded.config.get_text_config().num_hidden_layers
    if len(layers) != num_layers or loaded.attention.num_calls != num_layers:
        raise UnsupportedModel(
            f"Models of type {loaded.model_type} are not supported: {num_layers} layers made "
            f"{loaded.attention.num_calls} calls to attention as {len(layers)} layers. Choose another model."
        )
    return layers


def choose_num_blocks(loaded: LoadedModel, layers: dict[int, LayerShape], config: EngineConfig, longest: int) -> int:
    """Blocks by the config, by its budget of bytes, or by the default share of memory."""
    if config.num_blocks is not None:
        return config.num_blocks
    budget = config.kv_cache_bytes if config.kv_cache_bytes is not None else default_budget(loaded.device)
    block_bytes = bytes_per_block(layers, config.block_size, loaded.dtype)
    useful = most_useful_blocks(config.max_num_seqs, longest, config.block_size)
    num_blocks = num_blocks_for(budget, block_bytes, most_useful=useful)
    if num_blocks < 2:
        raise ModelLoadError(
            f"KV memory of {budget:,} bytes holds less than two blocks of {block_bytes:,} bytes. Raise kv_cache_bytes."
        )
    return num_blocks

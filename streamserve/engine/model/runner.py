"""`HFRunner`: plans in, tokens out, through Hugging Face modelling code with our KV memory and attention.

Holds the model and the KV memory; knows no requests. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from streamserve.engine.capacity import max_tokens_that_fit, most_useful_blocks, num_blocks_for
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.model import attention
from streamserve.engine.model.batch import StepBatch, build_batch
from streamserve.engine.model.kv_cache import KVCache, LayerShape, bytes_per_block, pool_bytes
from streamserve.engine.model.linear import forget_inputs
from streamserve.engine.model.load.device import give_back_memory, is_out_of_memory, on_device
from streamserve.engine.model.load.errors import ModelLoadError, UnsupportedModel
from streamserve.engine.model.load.loader import LoadedModel, load_model
from streamserve.engine.model.load.support import max_model_len
from streamserve.engine.model.sampler import sample
from streamserve.engine.model.step import LaunchedStep
from streamserve.engine.plan import Progress, StepOutOfMemory, StepPlan, StepResult, no_progress

T = TypeVar("T")


class HFRunner:
    """Runs plans on one model. See `plan.Runner` for the contract.

    `can_overlap`: by default on a GPU; on a CPU, where `launch` does all the work, it works too and gains nothing.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        layers: dict[int, LayerShape],
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        can_overlap: bool | None = None,
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
        self.can_overlap = loaded.device.type == "cuda" if can_overlap is None else can_overlap
        self.kv = self.new_kv(num_blocks)
        self._last: LaunchedStep | None = None  # whose tokens the next plan may take from the device

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

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Run the step; on a GPU this returns while it is still working."""
        return self._within_memory(lambda: self._launch(plan))

    def collect(self, handle: LaunchedStep) -> StepResult:
        """Wait for the step and return its tokens as plain numbers, in the plan's order."""
        return self._within_memory(handle.result)

    def _within_memory(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            message = str(error)
        # Out here, as the exception held the frames that hold the step's tensors.
        forget_inputs(self.loaded.model)
        give_back_memory(self.loaded.device)
        raise StepOutOfMemory(message)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        with torch.inference_mode():
            batch = build_batch(plan, self.block_size, self.loaded.device)
            self._fill_pending(batch)
            specs = {
                row: chunk.sample for row, chunk in zip(batch.last_rows, batch.chunks, strict=True) if chunk.sample
            }
            hidden, logits = self.forward(batch, list(specs))
            draws = None if logits is None else sample(logits, tuple(specs.values()))
            step = LaunchedStep.of(plan, batch, hidden, draws)
        self._last = step
        return step

    def _fill_pending(self, batch: StepBatch) -> None:
        """Put tokens of the step before into the batch, from device to device."""
        pending, device = batch.pending, self.loaded.device
        if not pending:
            return
        assert self._last is not None, "a pending token without a step before"
        assert self._last.draws is not None, "a pending token of a step that gives none"
        places = on_device(list(pending), torch.int64, device)
        source = on_device([self._last.rows[seq_id] for seq_id in pending.values()], torch.int64, device)
        batch.input_ids[0].index_copy_(0, places, self._last.draws.token_ids.index_select(0, source))

    def forward(self, batch: StepBatch, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the last hidden states (num_tokens, hidden) and the logits (len(rows), vocab_size) of `rows`."""
        model = self.loaded.model
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
        with self.loaded.attention.step(self.kv, batch):
            if not rows:
                return model.base_model(**inputs).last_hidden_state[0], None
            with _last_hidden_state(model) as seen:
                index = on_device(rows, torch.int64, self.loaded.device)
                logits = model(**inputs, logits_to_keep=index).logits
        return seen[0][0], logits[0]

    def close(self) -> None:
        """Free the model and the KV memory; the runner is unusable afterwards."""
        del self.loaded, self.kv, self._last


@contextmanager
def _last_hidden_state(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect what the model's body gives its head."""
    seen: list[torch.Tensor] = []
    hook = model.base_model.register_forward_hook(lambda _module, _inputs, out: seen.append(out[0]))
    try:
        yield seen
    finally:
        hook.remove()


def load_runner(model_config: ModelConfig, engine_config: EngineConfig, progress: Progress = no_progress) -> HFRunner:
    """Load a model, give it KV memory, and prove by numbers that it answers as transformers would."""
    from streamserve.engine.model.load.probe import probe

    loaded = load_model(model_config, progress)
    layers = record_layers(loaded)
    longest = max_model_len(loaded.config, engine_config.max_model_len)
    runner = HFRunner(
        loaded,
        layers=layers,
        block_size=engine_config.block_size,
        num_blocks=choose_num_blocks(loaded, layers, engine_config, longest),
        max_model_len=longest,
        can_overlap=engine_config.overlap or None,
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
    """Blocks by the config, or by the bytes that it gives them, as far as a batch can use them."""
    if config.num_blocks is not None:
        return config.num_blocks
    budget = pool_bytes(config, loaded.device)
    block_bytes = bytes_per_block(layers, config.block_size, loaded.dtype)
    useful = most_useful_blocks(config.max_num_seqs, longest, config.block_size)
    num_blocks = num_blocks_for(budget, block_bytes, most_useful=useful)
    if num_blocks < 2:
        raise ModelLoadError(
            f"KV memory of {budget:,} bytes holds less than two blocks of {block_bytes:,} bytes. Raise kv_cache_bytes "
            "or memory_share."
        )
    return num_blocks

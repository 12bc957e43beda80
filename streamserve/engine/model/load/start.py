"""`load_runner`: from a folder to a runner: weights, layers, KV memory, and the probe of the whole.

Loading only: it knows neither requests nor steps, but for the probe's own.
"""

from __future__ import annotations

import torch

from streamserve.engine.capacity import most_useful_blocks, most_whole, num_blocks_for
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.model import attention
from streamserve.engine.model.kv_cache import LayerShape, bytes_per_block, pool_bytes
from streamserve.engine.model.load.loader import LoadedModel, load_model
from streamserve.engine.model.load.probe import probe
from streamserve.engine.model.load.source import ModelLoadError, UnsupportedModel
from streamserve.engine.model.load.support import max_model_len
from streamserve.engine.model.runner import HFRunner, body_outputs
from streamserve.engine.plan import Progress, no_progress


def load_runner(model_config: ModelConfig, engine_config: EngineConfig, progress: Progress = no_progress) -> HFRunner:
    """Load a model, allocate its KV memory, and check by numbers that it computes what transformers does."""
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
        with torch.inference_mode(), loaded.attention.recording() as layers, body_outputs(model) as seen:
            model(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1)
    except Exception as error:  # modelling code not made for an external attention may raise anything
        raise UnsupportedModel(
            f"Models of type {loaded.model_type} are not supported: their code does not run over an external "
            f"attention ({type(error).__name__}: {error}). Choose another model."
        ) from error
    if len(seen) != 1:
        raise UnsupportedModel(
            f"Models of type {loaded.model_type} are not supported: their head does not read the decoder that this "
            "engine looks at. Choose another model."
        )
    num_layers = loaded.config.get_text_config().num_hidden_layers
    if len(layers) != num_layers or loaded.attention.num_calls != num_layers:
        raise UnsupportedModel(
            f"Models of type {loaded.model_type} are not supported: {num_layers} layers made "
            f"{loaded.attention.num_calls} calls to attention as {len(layers)} layers. Choose another model."
        )
    return layers


def choose_num_blocks(loaded: LoadedModel, layers: dict[int, LayerShape], config: EngineConfig, longest: int) -> int:
    """Return the number of blocks by the config, or by its bytes, as far as a batch can use them."""
    if config.num_blocks is not None:
        return config.num_blocks
    budget = pool_bytes(config, loaded.device)
    block_bytes = bytes_per_block(layers, config.block_size, loaded.dtype)
    useful = most_useful_blocks(most_whole(config), longest, config.block_size)
    num_blocks = num_blocks_for(budget, block_bytes, most_useful=useful)
    if num_blocks < 2:
        raise ModelLoadError(
            f"KV memory of {budget:,} bytes holds fewer than two blocks of {block_bytes:,} bytes. Raise kv_cache_bytes "
            "or memory_share."
        )
    return num_blocks

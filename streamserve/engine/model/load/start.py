"""`load_runner`: from a folder to a runner: the model, its KV memory, and the probe of the whole.

A model of a family that our decoder has is built of our layers, and compared with what transformers computes of the
same files, which is computed before: no more than one of the two is in memory. Any other model, and one that differs,
runs on transformers' own code. Loading only: it knows neither requests nor steps, but for the probe's own.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from dataclasses import replace

import torch

from streamserve.engine.capacity import NULL_BLOCKS, blocks_of
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.model.decoder.build import check_names
from streamserve.engine.model.decoder.checkpoint import UnlikeSpec, Weights
from streamserve.engine.model.decoder.decoder import Decoder
from streamserve.engine.model.decoder.spec import DecoderSpec, spec_of
from streamserve.engine.model.kernels import Kernels
from streamserve.engine.model.kv_cache import Groups, bytes_per_block, groups_for, pool_bytes, windows_of
from streamserve.engine.model.linear.native import dequantized, group_wise
from streamserve.engine.model.linear.packs import Packs
from streamserve.engine.model.load.loader import (
    LoadedModel,
    Source,
    StoredWeights,
    dtype_of,
    is_kept_quantized,
    kernels_for,
    load_decoder,
    load_hf,
    open_source,
    open_weights,
    read_ahead,
)
from streamserve.engine.model.load.probe import ProbeTokens, Reference, probe
from streamserve.engine.model.load.source import (
    ModelLoadError,
    UnsupportedModel,
    available_memory,
    cache_folder,
    require_safetensors,
)
from streamserve.engine.model.load.support import max_model_len
from streamserve.engine.model.runner import ModelRunner
from streamserve.engine.plan import Progress, no_progress

logger = logging.getLogger(__name__)

# Of the free memory: the most that the plain weights of a quantised model may take, for the moment of its probe.
PROBE_SHARE = 0.5


def load_runner(
    model_config: ModelConfig, engine_config: EngineConfig, progress: Progress = no_progress
) -> ModelRunner:
    """Load a model, allocate its KV memory, and check by numbers that it computes what transformers does."""
    source = open_source(model_config, progress)
    if engine_config.kv_dtype == "int8" and source.device.type != "cpu":
        raise ModelLoadError(
            f"{source.folder} is to keep its keys and values in int8, which is computed on a CPU. Set DEVICE to cpu, "
            "or take KV_DTYPE out."
        )
    draft = _draft_runner(source, model_config, engine_config, progress)
    runner = _own_runner(source, model_config, engine_config, progress, draft)
    if runner is None:
        runner = _hf_runner(source, model_config, engine_config, progress, draft)
    if draft is not None:
        runner.take_draft(draft)
    progress("probe", 1.0)
    _or_without_kernels(runner, lambda: runner.capture(engine_config.max_num_seqs, progress))
    return runner


def _draft_runner(
    source: Source, model_config: ModelConfig, engine_config: EngineConfig, progress: Progress
) -> ModelRunner | None:
    """Load the draft model, if there is one that would propose anything; it gets its KV memory with the model."""
    if not model_config.draft or engine_config.speculation == "off":
        return None
    if engine_config.overlap or (engine_config.overlap is None and source.device.type == "cuda"):
        logger.warning("%s is not loaded: nothing is proposed while steps overlap", model_config.draft)
        return None
    own = replace(
        model_config,
        path=model_config.draft,
        quantize=model_config.draft_quantize,
        draft="",
        draft_quantize="",
        adapters={},
    )
    draft_source, least = open_source(own, progress), replace(engine_config, num_blocks=NULL_BLOCKS + 1)
    return _own_runner(draft_source, own, least, progress) or _hf_runner(draft_source, own, least, progress)


def load_hf_runner(model_config: ModelConfig, engine_config: EngineConfig) -> ModelRunner:
    """Load a model of any family as one that our decoder does not have (to compare the two)."""
    return _hf_runner(open_source(model_config), model_config, engine_config, no_progress)


def _hf_runner(
    source: Source,
    model_config: ModelConfig,
    engine_config: EngineConfig,
    progress: Progress,
    draft: ModelRunner | None = None,
) -> ModelRunner:
    read_ahead(require_safetensors(source.folder), progress)
    loaded = load_hf(source, model_config, kernels_for(source, model_config, progress), progress)
    runner = _runner_of(loaded, engine_config, draft)
    if model_config.parity_probe:
        progress("probe", 0.0)
        _or_without_kernels(runner, lambda: probe(runner))
    return runner


def _or_without_kernels(runner: ModelRunner, work: Callable[[], object]) -> None:
    """Do `work`; where it fails with the GPU's kernels, say so, and do it once more with torch alone."""
    try:
        work()
    except Exception as error:  # Triton, the driver and the parity probe raise each in its own way
        if not runner.has_gpu_kernels:
            raise
        logger.warning(
            "GPU kernels are off for this model, whose steps take several times as long: %s: %s",
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        runner.leave_kernels()
        work()


def _own_runner(
    source: Source,
    model_config: ModelConfig,
    engine_config: EngineConfig,
    progress: Progress,
    draft: ModelRunner | None = None,
) -> ModelRunner | None:
    """Return a runner of our own layers; None for a model that they do not compute."""
    found = own_spec(source)
    if found is None:
        return None
    spec, checkpoint = found
    reference = None
    kernels = kernels_for(source, model_config, progress)
    rounded = rounding(model_config.quantize, kernels)
    is_quantized = rounded is not None or (kernels is not None and is_kept_quantized(model_config, checkpoint))
    packs = None
    if is_quantized and kernels is not None and model_config.keep_packed:
        packs = _packs(source, model_config, kernels, dtype_of(source, checkpoint))
    read_ahead([] if packs is not None and packs.is_found else require_safetensors(source.folder), progress)
    has_room = not is_quantized or plain_bytes(source, checkpoint) <= PROBE_SHARE * available_memory()
    if model_config.parity_probe and not has_room:
        logger.warning("%s is not compared with transformers: its plain weights are more than fits", source.folder)
    elif model_config.parity_probe:
        windows = [layer.window for layer in spec.layers if layer.window]
        tokens = ProbeTokens.of(
            windows,
            block_size=engine_config.block_size,
            max_model_len=max_model_len(source.config, engine_config.max_model_len),
            device=source.device,
            vocab_size=spec.vocab_size,
        )
        reference = _reference(
            tokens,
            packs,
            lambda: Reference.of(
                source, tokens, has_experts=any(layer.experts for layer in spec.layers), rounded=rounded
            ),
        )
    loaded = load_decoder(source, spec, checkpoint, model_config, kernels, progress, packs)
    runner = _runner_of(loaded, engine_config, draft)
    if reference is not None:
        progress("probe", 0.0)
        try:
            _or_without_kernels(runner, lambda: probe(runner, reference))
        except UnsupportedModel as error:
            logger.warning("%s runs on transformers' own code, more slowly: %s", model_config.path, error)
            runner.close()
            return None
    if packs is not None:
        packs.save()
    return runner


def _packs(source: Source, model_config: ModelConfig, kernels: Kernels, dtype: torch.dtype) -> Packs:
    """Return what an earlier load of these files has left."""
    variant = model_config.quantize or "as stored"
    return Packs(
        cache_folder() / "packs", f"{source.folder.resolve()} {variant}", (source.revision, variant),
        kernels.library, dtype,
    )  # fmt: skip


def _reference(tokens: ProbeTokens, packs: Packs | None, compute: Callable[[], Reference]) -> Reference:
    """Return what transformers computes. It is kept beside the weights: loading its model takes longest of all."""
    if packs is None:
        return compute()
    place = f"reference {zlib.crc32(repr(tokens).encode()):08x}"
    logits = packs.tensor(f"{place} logits")
    if logits is not None:
        return Reference(tokens=tokens, logits=logits, noisy=packs.tensor(f"{place} noisy"))
    found = compute()
    packs.add_tensor(f"{place} logits", found.logits.float())
    if found.noisy is not None:
        packs.add_tensor(f"{place} noisy", found.noisy.float())
    return found


def rounding(kind: str, kernels: Kernels | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what QUANTIZE makes of a weight of a linear layer; None where nothing is rounded."""
    if not kind or kernels is None:
        return None
    library = kernels.library
    return lambda weight: dequantized(group_wise(library, kind, weight.contiguous())).to(weight.dtype)


def plain_bytes(source: Source, checkpoint: Weights) -> int:
    """Return what a model's weights take as they are computed with when they are not quantised."""
    if isinstance(checkpoint, StoredWeights):
        return checkpoint.num_bytes()
    return sum(file.stat().st_size for file in require_safetensors(source.folder))


def own_spec(source: Source) -> tuple[DecoderSpec, Weights] | None:
    """Return what our decoder would compute of a source and its weights; None where it has another architecture."""
    spec = spec_of(source.config.get_text_config())
    if spec is None:
        return None
    if source.device.type != "cpu" and any(layer.experts for layer in spec.layers):
        return None  # our experts wait for the device to count their tokens; transformers' multiply in groups there
    try:
        checkpoint = open_weights(source)
        check_names(spec, checkpoint)
    except UnlikeSpec as unlike:
        logger.warning("%s runs on transformers' own code, more slowly: it has %s", source.folder, unlike)
        return None
    return spec, checkpoint


def _runner_of(loaded: LoadedModel, config: EngineConfig, draft: ModelRunner | None) -> ModelRunner:
    longest = max_model_len(loaded.config, config.max_model_len)
    groups = _groups_of(loaded, longest) if draft is None else ()
    return ModelRunner(
        loaded,
        block_size=config.block_size,
        num_blocks=choose_num_blocks(loaded, config, longest, None if draft is None else draft.loaded, groups),
        max_model_len=longest,
        can_overlap=config.overlap or None,
        has_int8_kv=config.kv_dtype == "int8",
        groups=groups,
    )


def _groups_of(loaded: LoadedModel, longest: int) -> Groups:
    """Return the groups of layers with a block table each; none where transformers' code or a GPU computes."""
    is_own = isinstance(loaded.model, Decoder) and loaded.device.type == "cpu"
    return groups_for(loaded.layers, longest) if is_own else ()


def choose_num_blocks(
    loaded: LoadedModel, config: EngineConfig, longest: int, draft: LoadedModel | None = None, groups: Groups = ()
) -> int:
    """Return the number of blocks by the config, or by its bytes, as far as a batch can use them.

    A `draft` model has as many.
    """
    models = [loaded] if draft is None else [loaded, draft]
    budget = pool_bytes(config, loaded.device, sum(one.weight_bytes for one in models))
    is_int8 = config.kv_dtype == "int8"
    block_bytes = sum(
        bytes_per_block(one.layers, config.block_size, one.dtype, is_int8=is_int8, groups=groups) for one in models
    )
    windows = windows_of(groups, loaded.layers, longest)
    num_blocks = blocks_of(config, budget, block_bytes, longest=longest, windows=windows)
    if draft is not None:
        of_draft = bytes_per_block(draft.layers, config.block_size, draft.dtype, is_int8=is_int8)
        logger.info(
            "%s drafts for %s: %.2f GB of weights, and %s of the %s bytes of each of %d KV blocks",
            draft.source.folder, loaded.source.folder, draft.weight_bytes / 1e9, f"{of_draft:,}", f"{block_bytes:,}",
            num_blocks,
        )  # fmt: skip
    least = NULL_BLOCKS + len(windows)
    if num_blocks < least:
        raise ModelLoadError(
            f"KV memory of {budget:,} bytes holds {num_blocks} blocks of {block_bytes:,} bytes, and a sequence needs "
            f"{least}. Raise kv_cache_bytes or memory_share."
        )
    return num_blocks

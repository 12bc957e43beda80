"""Load a causal language model into memory: find it, check it, and build it of our layers, or of transformers' own.

`support_of` returns whether this engine runs a model that is on this machine, and why not, without reading its weights
(for `streamserve_models`). What is refused there is refused at a load by the same functions, with the same words.

Knows transformers; not the KV memory, not plans. Runs once, before the engine thread's loop.
"""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from streamserve.engine.config import ModelConfig
from streamserve.engine.model import attention
from streamserve.engine.model.cuda.kernels import GPUKernels, open_gpu_kernels
from streamserve.engine.model.decoder.build import build, sample_weights
from streamserve.engine.model.decoder.checkpoint import Checkpoint, UnlikeSpec, Weights, lacking
from streamserve.engine.model.decoder.decoder import Decoder
from streamserve.engine.model.decoder.spec import DecoderSpec
from streamserve.engine.model.hf import HFModel
from streamserve.engine.model.kernels import Kernels, open_kernels
from streamserve.engine.model.kv_cache import LayerShape
from streamserve.engine.model.language_model import LanguageModel
from streamserve.engine.model.linear.base import PLAIN, BackEnd, Linear
from streamserve.engine.model.linear.choose import LinearMaker, choose
from streamserve.engine.model.linear.kept import Kept
from streamserve.engine.model.linear.modules import keep_float_logits, linear_weights, pack_linears
from streamserve.engine.model.linear.native import native_back_end, quantizing_back_end
from streamserve.engine.model.linear.packer import Packer
from streamserve.engine.model.linear.packs import Packs
from streamserve.engine.model.load.adapters import read_adapter
from streamserve.engine.model.load.gguf.file import GGUFFile
from streamserve.engine.model.load.gguf.weights import GGUFWeights
from streamserve.engine.model.load.quantized.scheme import require_plain, scheme_of
from streamserve.engine.model.load.quantized.weights import QuantizedCheckpoint
from streamserve.engine.model.load.source import (
    ModelLoadError,
    UnsupportedModel,
    available_memory,
    cache_folder,
    find,
    is_gguf,
    read_headers,
    require_safetensors,
    resolve,
    revision,
    total_memory,
)
from streamserve.engine.model.load.source import read_config as read_fields
from streamserve.engine.model.load.support import PROVEN, eos_token_ids, max_model_len, require_supported
from streamserve.engine.plan import Progress, no_progress

logger = logging.getLogger(__name__)

READ_BYTES = 16 << 20  # at once: a few hundred reports a minute from a disk, each a chance to give up
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF = (torch.bfloat16, torch.float16)
StoredWeights = GGUFWeights | QuantizedCheckpoint  # that may be quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a model is loaded from. `dtype` "auto": the checkpoint's."""

    folder: Path
    config: Any
    dtype: torch.dtype | str
    device: torch.device
    revision: str

    def kept(self, dtype: torch.dtype, kernels: Kernels | None) -> Kept:
        """Return where the choice of its back end is kept, which is made anew when kernels come, go or change."""
        return Kept(cache_folder(), self.revision, dtype, "" if kernels is None else kernels.library.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, without KV memory. `model_type` names it in messages.

    `layers` are the shapes of what its layers store; `weight_bytes` is what linear layers and embedding take; `linears`
    names the back ends of its linear layers, the most used first.
    """

    model: LanguageModel
    layers: Mapping[int, LayerShape]
    source: Source
    kernels: Kernels | GPUKernels | None
    num_parameters: int
    weight_bytes: int
    linears: str

    @classmethod
    def of(cls, decoder: Decoder, source: Source, kernels: Kernels | GPUKernels | None) -> LoadedModel:
        """Return a decoder of our own layers, which computes with `kernels` from now on."""
        decoder.use(kernels)
        return cls(
            model=decoder,
            layers=decoder.layer_shapes,
            source=source,
            kernels=kernels,
            num_parameters=decoder.num_parameters,
            weight_bytes=decoder.weight_bytes,
            linears=names_of(decoder.linears),
        )

    @property
    def config(self) -> Any:
        """The config of transformers."""
        return self.source.config

    @property
    def model_type(self) -> str:
        """Its name in messages."""
        return str(self.source.config.model_type)

    @property
    def vocab_size(self) -> int:
        """Tokens that logits are of."""
        return self.model.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, hidden states and KV memory."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.source.device

    @property
    def revision(self) -> str:
        """A hash that changes when config or weights change."""
        return self.source.revision


def open_source(model_config: ModelConfig, progress: Progress = no_progress) -> Source:
    """Find what `model_config` names and check it. Raises `ModelLoadError` with the way out in its message."""
    progress("config", 0.0)
    if model_config.num_threads is not None:
        torch.set_num_threads(model_config.num_threads)
    device = choose_device(model_config.device)
    folder = resolve(model_config.path)
    config = read_config(folder)
    require_supported(config)
    require_safetensors(folder)
    if not is_gguf(folder) and scheme_of(config) is None:
        require_plain(read_headers(folder))
    dtype = choose_dtype(model_config.dtype)
    return Source(folder=folder, config=config, dtype=dtype, device=device, revision=revision(folder))


def load_decoder(
    source: Source,
    spec: DecoderSpec,
    checkpoint: Weights,
    model_config: ModelConfig,
    kernels: Kernels | None = None,
    progress: Progress = no_progress,
    packs: Packs | None = None,
) -> LoadedModel:
    """Build a decoder of our own layers. Raises `UnlikeSpec` or `ModelLoadError` for weights that do not fit."""
    dtype = dtype_of(source, checkpoint)
    maker = LinearMaker(back_end=PLAIN)
    if model_config.quantize:
        maker = _quantizing(model_config.quantize, source, kernels)
    elif kernels is not None and is_kept_quantized(model_config, checkpoint):
        assert isinstance(checkpoint, StoredWeights)
        require_room(checkpoint, is_packed=True)
        maker = _keeping(checkpoint, kernels, dtype)
    elif model_config.packed is not False:
        if isinstance(checkpoint, StoredWeights):
            require_room(checkpoint, is_packed=False)
        maker = choose(
            dtype,
            source.device,
            sample_weights(spec, checkpoint, dtype),
            source.kept(dtype, kernels),
            preferred=native_back_ends(kernels),
        )
    progress("packing", 0.0)
    maker = replace(maker, packs=packs)
    decoder = build(spec, checkpoint, maker, dtype, source.device, lambda fraction: progress("packing", fraction))
    take_adapters(decoder, model_config, kernels, dtype, source.device)
    return LoadedModel.of(decoder, source, kernels or gpu_kernels_for(source, model_config))


def take_adapters(
    decoder: Decoder, model_config: ModelConfig, kernels: Kernels | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Read the adapters of a model. They stay in its dtype, also where its own weights are rounded."""
    is_native = kernels is not None and model_config.packed is not False
    back_end = native_back_end(kernels.library) if kernels is not None and is_native else PLAIN
    maker = LinearMaker(back_end=back_end)
    for name, path in model_config.adapters.items():
        folder = Path(path).expanduser()
        decoder.adapters[name] = read_adapter(
            name, folder, decoder.spec, lambda weight: maker.make(weight.to(device)), dtype
        )


def is_kept_quantized(model_config: ModelConfig, checkpoint: Weights) -> bool:
    """Return whether a checkpoint's quantised weights stay so, where there are kernels for them."""
    is_quantized = isinstance(checkpoint, StoredWeights) and checkpoint.is_quantized
    return is_quantized and model_config.packed is not False


def _keeping(checkpoint: StoredWeights, kernels: Kernels, dtype: torch.dtype) -> LinearMaker:
    """Return the maker that packs a checkpoint's quantised weights, and others of a folder in the model's dtype.

    A GGUF file has few others (of types that are not packed): they become int8.
    """
    is_file = isinstance(checkpoint, GGUFWeights)
    back_end = quantizing_back_end(kernels.library, "int8") if is_file else native_back_end(kernels.library)
    return LinearMaker(back_end=back_end, packer=Packer(kernels.library, checkpoint, dtype))


def _quantizing(kind: str, source: Source, kernels: Kernels | None) -> LinearMaker:
    """Return the maker for QUANTIZE. Raise where its kernels are off: it is not to take more memory than planned."""
    if source.device.type != "cpu":
        raise ModelLoadError(
            f"{source.folder} is to be quantised to {kind}, which is computed on a CPU. Set DEVICE to cpu, or take "
            "QUANTIZE out."
        )
    if kernels is None:
        raise ModelLoadError(
            f"{source.folder} is to be quantised to {kind}, which the native kernels compute, and they are off. "
            "Install g++ and run python -m streamserve.native.build, or take QUANTIZE out."
        )
    return LinearMaker(back_end=quantizing_back_end(kernels.library, kind))


def dtype_of(source: Source, checkpoint: Weights) -> torch.dtype:
    """Return the dtype of a decoder of these weights."""
    return source.dtype if isinstance(source.dtype, torch.dtype) else own_dtype(source.config, checkpoint)


def own_dtype(config: Any, checkpoint: Weights) -> torch.dtype:
    """Return the dtype that the config names, else that of the weights."""
    for part in (config, config.get_text_config()):
        dtype = getattr(part, "dtype", None)
        if dtype is not None:
            return dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."))
    return checkpoint.dtype()


def load_hf(
    source: Source, model_config: ModelConfig, kernels: Kernels | None = None, progress: Progress = no_progress
) -> LoadedModel:
    """Load transformers' own code, for an architecture that is no family of our decoder."""
    if model_config.adapters:
        raise ModelLoadError(
            f"{source.folder} runs on transformers' own code, which takes no adapters here. Take ADAPTERS out, or "
            "choose a model of a family that our own layers compute (docs/adapters.md)."
        )
    model = read_weights(source)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    head = model.get_output_embeddings()
    kept = head.weight.detach() if type(head) is torch.nn.Linear and model.dtype in HALF else None
    linears = _pack(model, source, model_config, kernels, progress, kept)
    if kept is not None:
        keep_float_logits(model, kept, head.bias)
    used = kernels or gpu_kernels_for(source, model_config)
    hf = HFModel(model, attention.attach(model, used))
    return LoadedModel(
        model=hf,
        layers=record_layers(hf, source),
        source=source,
        kernels=used,
        num_parameters=num_parameters,
        weight_bytes=num_parameters * model.dtype.itemsize,
        linears=names_of(linears),
    )


def native_back_ends(kernels: Kernels | None) -> list[BackEnd]:
    """Return the back ends of the native library."""
    return [] if kernels is None else [native_back_end(kernels.library)]


def record_layers(hf: HFModel, source: Source) -> dict[int, LayerShape]:
    """Run one token through the model and note which layers attend, and in what shape."""
    model, kind = hf.model, source.config.model_type
    model.config._attn_implementation = attention.NAME
    token = torch.zeros(1, 1, dtype=torch.long, device=source.device)
    before = hf.num_body_calls
    try:
        with torch.inference_mode(), hf.attention.recording() as layers:
            model(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1)
    except Exception as error:  # modelling code not made for an external attention may raise anything
        raise UnsupportedModel(
            f"Models of type {kind} are not supported: their code does not run over an external "
            f"attention ({type(error).__name__}: {error}). Choose another model."
        ) from error
    if hf.num_body_calls != before + 1:
        raise UnsupportedModel(
            f"Models of type {kind} are not supported: their head does not read the decoder that this "
            "engine looks at. Choose another model."
        )
    num_layers = source.config.get_text_config().num_hidden_layers
    if len(layers) != num_layers or hf.attention.num_calls != num_layers:
        raise UnsupportedModel(
            f"Models of type {kind} are not supported: {num_layers} layers made "
            f"{hf.attention.num_calls} calls to attention as {len(layers)} layers. Choose another model."
        )
    return layers


def kernels_for(source: Source, model_config: ModelConfig, progress: Progress) -> Kernels | None:
    """Return the native kernels for a source's device; None where there are none, or none are wanted."""
    if source.device.type != "cpu" or not model_config.native:
        return None
    progress("kernels", 0.0)
    return open_kernels(lambda fraction: progress("kernels", fraction))


def gpu_kernels_for(source: Source, model_config: ModelConfig) -> GPUKernels | None:
    """Return the GPU's kernels for a source's device; None where there are none, or none are wanted."""
    if source.device.type != "cuda" or not model_config.native:
        return None
    return open_gpu_kernels(source.device)


def choose_device(name: str) -> torch.device:
    """Return the device to run on: "auto" is CUDA where there is a GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelLoadError("device is cuda, but torch sees no CUDA GPU. Use device=auto or cpu, or check the driver.")
    return torch.device(name)


def choose_dtype(name: str) -> torch.dtype | str:
    """Return what `from_pretrained` understands."""
    if name == "auto":
        return "auto"
    if name not in DTYPES:
        raise ModelLoadError(f"dtype {name!r} is not known; use auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def read_config(folder: Path) -> Any:
    """Read config.json or a GGUF file's metadata; an architecture that is not known is refused by name."""
    from transformers import AutoConfig

    if is_gguf(folder):
        return AutoConfig.for_model(**read_fields(folder))
    if not (folder / "config.json").exists():
        raise ModelLoadError(f"{folder} has no config.json; so it is no model folder. Name the folder that has it.")
    try:
        json.loads((folder / "config.json").read_bytes())
    except ValueError as error:
        raise ModelLoadError(f"{folder}/config.json is no valid JSON ({error}). Copy or download it again.") from error
    except OSError as error:
        raise ModelLoadError(f"{folder}/config.json cannot be read: {error.strerror}.") from error
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel(
            f"transformers cannot read {folder}/config.json ({_first_line(error)}). Models that bring their own code "
            "are not loaded; update transformers or choose another model."
        ) from error


def read_ahead(files: Sequence[Path], progress: Progress) -> None:
    """Bring the weights into the system's cache, front to back, reporting the bytes: the slow part of a cold load.

    transformers then maps what is there already (without reporting progress). Weights larger than the memory that
    is free would push themselves out again: they are left to it.
    """
    total = sum(file.stat().st_size for file in files)
    progress("weights", 0.0, 0, total)
    loaded, buffer = 0, bytearray(READ_BYTES)
    for file in files if total <= available_memory() else ():
        with file.open("rb", buffering=0) as stream:
            while num_read := stream.readinto(buffer):
                loaded += num_read
                progress("weights", loaded / total, loaded, total)
    progress("weights", 1.0, total, total)


def read_weights(source: Source) -> Any:
    """Return transformers' own model with plain weights, in eager attention."""
    from safetensors import SafetensorError
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    folder, config, dtype = source.folder, source.config, source.dtype
    hf_logging.disable_progress_bar()  # `progress` reports it instead
    kind: Any = AutoModelForCausalLM
    name: Path | None = folder
    weights = None
    stored = open_stored(source)
    if stored is not None:
        require_room(stored, is_packed=False)
        kind, name = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], None
        config, dtype, weights = _without_quantization(config), stored.dtype(), stored.lazily()
    try:
        model, found = kind.from_pretrained(
            name,
            state_dict=weights,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except (ValueError, KeyError, OSError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(
            f"The {config.model_type} model in {folder} could not be loaded: {_first_line(error)}"
        ) from error
    if found["missing_keys"]:  # transformers makes up random ones, and only warns
        raise lacking(folder, sorted(found["missing_keys"]))
    return model.to(source.device).eval().requires_grad_(False)


def open_weights(source: Source) -> Weights:
    """Return a source's weights. Raise `UnlikeSpec` for names that are no decoder's here."""
    return open_stored(source) or Checkpoint(source.folder)


def open_stored(source: Source) -> StoredWeights | None:
    """Return the weights of a GGUF file, or of a folder that is quantised; None for a folder of plain weights."""
    dtype = source.dtype if isinstance(source.dtype, torch.dtype) else None
    if is_gguf(source.folder):
        return GGUFWeights(GGUFFile(source.folder), dtype)
    scheme = scheme_of(source.config)
    if scheme is None:
        return None
    try:
        checkpoint = Checkpoint(source.folder)
    except UnlikeSpec as unlike:
        raise UnsupportedModel(
            f"{source.folder} is quantised ({scheme.title}), and has {unlike}. Take the model in bfloat16."
        ) from unlike
    return QuantizedCheckpoint(checkpoint, scheme, dtype or own_dtype(source.config, checkpoint))


def require_room(weights: StoredWeights, *, is_packed: bool) -> None:
    """Say what weights take when they are packed, or dequantised; raise for more than the machine has."""
    size = weights.packed_bytes() if is_packed else weights.num_bytes()
    name = str(weights.dtype()).removeprefix("torch.")
    logger.info(
        "%s: weights of type %s take %.2f GB %s",
        weights.path, weights.main_type, size / 1e9, "packed" if is_packed else f"in {name}",
    )  # fmt: skip
    if size <= total_memory():
        return
    how = "are packed" if is_packed else f"are in {name}"
    smaller = not is_packed and weights.is_quantized and weights.packed_bytes() <= total_memory()
    way_out = (
        f"Packed they take {weights.packed_bytes() / 1e9:.1f} GB: install g++, take PACKED and NATIVE out, run on the "
        "CPU; or take a smaller model"
        if smaller
        else "Take a smaller model"
    )
    raise ModelLoadError(
        f"{weights.path} takes {size / 1e9:.1f} GB when its {weights.main_type} weights {how}, and this machine has "
        f"{total_memory() / 1e9:.1f} GB. {way_out}, or serve it with llama-server or vLLM and point streamserve's "
        "remote client at it."
    )


def _without_quantization(config: Any) -> Any:
    """Return a config of the same model with plain weights."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return plain


def _pack(
    model: Any,
    source: Source,
    model_config: ModelConfig,
    kernels: Kernels | None,
    progress: Progress,
    kept: torch.Tensor | None,
) -> list[Linear]:
    if model_config.quantize:
        maker = _quantizing(model_config.quantize, source, kernels)
    elif model_config.packed is False:
        return []
    else:
        weights = linear_weights(model)
        kept_choice = source.kept(model.dtype, kernels)
        maker = choose(model.dtype, model.device, weights, kept_choice, preferred=native_back_ends(kernels))
    if maker.back_end is PLAIN:
        return []
    progress("packing", 0.0)
    return pack_linears(model, maker, lambda fraction: progress("packing", fraction), kept=kept)


def end_token_ids(source: Source) -> tuple[int, ...]:
    """Return the tokens that end an answer, by the folder's generation_config.json, else by the model's config."""
    from transformers import GenerationConfig

    has_file = (source.folder / "generation_config.json").exists()
    given = GenerationConfig.from_pretrained(source.folder, local_files_only=True) if has_file else None
    return eos_token_ids(given, source.config)


def names_of(linears: Sequence[Linear]) -> str:
    """Return the names of their back ends, the most used first."""
    names = Counter(linear.name for linear in linears)
    return ", ".join(name for name, _ in names.most_common()) or PLAIN.name


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:300]


# What a model can be.
IS_PROVEN, IS_TRIED, IS_REFUSED, IS_ABSENT = "supported", "tried at load", "refused", "not here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """One model. `traits` are what its attention has beside the plain kind; `reason`: why it is refused."""

    verdict: str
    model_type: str = ""
    traits: tuple[str, ...] = ()
    reason: str = ""


def support_of(path: str) -> Support:
    """Return what is known of the model named `path`: a folder, a GGUF file, or a hub id that was downloaded."""
    folder = find(path)
    if folder is None:
        return Support(
            verdict=IS_ABSENT, reason="It is no folder or GGUF file, and was not downloaded from the hub yet."
        )
    try:
        config = read_config(folder)
        require_supported(config)
        require_safetensors(folder)
        stored_traits = _stored_traits(folder, config)
    except ModelLoadError as error:
        return Support(verdict=IS_REFUSED, model_type=_type_of(folder), reason=str(error))
    verdict = IS_PROVEN if config.get_text_config().model_type in PROVEN else IS_TRIED
    traits = (*_traits(config.get_text_config()), *stored_traits)
    return Support(verdict=verdict, model_type=config.model_type, traits=traits)


def _stored_traits(folder: Path, config: Any) -> tuple[str, ...]:
    """Return the type of most weights, and what all take in memory; nothing of plain weights."""
    weights = open_stored(Source(folder=folder, config=config, dtype="auto", device=torch.device("cpu"), revision=""))
    if weights is None:
        return ()
    plain = f"{weights.num_bytes() / 1e9:.2f} GB of weights in {str(weights.dtype()).removeprefix('torch.')}"
    if weights.is_quantized:
        plain = f"{weights.packed_bytes() / 1e9:.2f} GB of weights ({plain} without the native kernels)"
    return f"GGUF {weights.main_type}" if is_gguf(folder) else weights.main_type, plain


def _type_of(folder: Any) -> str:
    try:
        return str(read_fields(folder).get("model_type", ""))
    except ModelLoadError:
        return ""


def _traits(text: Any) -> list[str]:
    """Return the parts of the model that the paged attention takes care of, each in a few words."""
    out = [f"context of {max_model_len(text, None):,}"]
    kinds = list(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    if window and (not kinds or "sliding_attention" in kinds):
        share = f" in {kinds.count('sliding_attention')} of {len(kinds)} layers" if kinds else ""
        out.append(f"window of {window:,}{share}")
    rope = getattr(text, "rope_parameters", None) or {}
    scaled = {part.get("rope_type", "default") for part in (rope, *rope.values()) if isinstance(part, dict)}
    out += [f"rope {kind}" for kind in sorted(scaled - {"default"})]
    if getattr(text, "attn_logit_softcapping", None):
        out.append("softcap")
    if text.model_type == "gpt_oss":
        out.append("attention sinks")
    if getattr(text, "tie_word_embeddings", False):
        out.append("tied head")
    return out

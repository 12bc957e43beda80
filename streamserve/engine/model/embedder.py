"""`TorchEmbedder`: an embedding model of a folder: encoders by sentence-transformers, decoders by their last token.

    modules.json            what it lists, by sentence-transformers: transformer, pooling, dense layers, normalising
    a causal model alone    transformers' own code; the last hidden state of the last token, of length 1
    an encoder alone        the mean of the last hidden states, of length 1

Inputs of a pass are padded on the right to the longest. Attention does not see what fills them up, so that a vector
does not depend on what else is in its pass, up to rounding. Reads safetensors only, and runs no code of a folder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

from streamserve.engine.config import EmbedderConfig
from streamserve.engine.model.load.size import EMBEDDER_FILES
from streamserve.engine.model.load.source import (
    ModelLoadError,
    UnsupportedModel,
    read_config,
    require_safetensors,
    resolve,
)
from streamserve.engine.plan import Progress
from streamserve.engine.text.spelling import refuse_unknown_ids
from streamserve.protocol.spelling import Spell, Spelled

logger = logging.getLogger(__name__)

_MODULES = "modules.json"
# Modules of sentence-transformers whose weights and settings are plain data.
_KNOWN_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
_KNOWN_ACTIVATIONS = "torch.nn.modules."
_LARGEST_LEN = 1_000_000  # what a tokenizer without a bound gives is far above


def load_embedder(config: EmbedderConfig, progress: Progress) -> TorchEmbedder:
    """Return the embedder of a folder or hub id. Raises ModelLoadError."""
    progress("files", 0.0)
    folder = resolve(config.path, EMBEDDER_FILES, progress)
    require_safetensors(folder)
    settings = read_config(folder)
    device = _device(config.device)
    progress("weights", 0.0)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    dtype = _dtype(config.dtype, settings)
    if (folder / _MODULES).exists():
        _check_modules(folder)
        model: torch.nn.Module = _sentence_transformer(folder, device, dtype)
        tokenizer, prompt = model.tokenizer, _default_prompt(model)
        dimensions = int(model.get_embedding_dimension() or 0)
    else:
        from transformers import AutoTokenizer

        model = _LastStates(_transformer(folder, device, dtype), is_causal=_is_causal(settings))
        tokenizer, prompt = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False), ""
        dimensions = int(model.body.config.get_text_config().hidden_size)
    if not tokenizer.is_fast:
        raise UnsupportedModel(f"{config.path} has no tokenizer.json, which the tokenizers library reads.")
    return TorchEmbedder(
        model.eval(),
        tokenizer,
        prompt=prompt,
        dimensions=dimensions,
        max_model_len=_longest(config, tokenizer, settings),
        allows_fewer=_allows_fewer(config, settings),
        device=device,
    )


class TorchEmbedder:
    """See `Embedder` in engine/embedding.py. `model` maps features to `sentence_embedding` (N, C)."""

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        *,
        prompt: str,
        dimensions: int,
        max_model_len: int,
        allows_fewer: bool,
        device: torch.device,
    ) -> None:
        from tokenizers import Tokenizer

        self.dimensions, self.max_model_len, self.allows_fewer = dimensions, max_model_len, allows_fewer
        self._model, self._prompt, self._device = model, prompt, device
        self._rust = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._rust.no_truncation()
        self._rust.no_padding()
        self._pad_id = int(tokenizer.pad_token_id or 0)
        self.vocab_size = max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        weights = next(model.parameters())
        self.dtype, self.device = str(weights.dtype).removeprefix("torch."), device.type
        self.num_parameters = sum(one.numel() for one in model.parameters())

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Return the ids of texts, the model's default prompt before each. The GIL is free meanwhile."""
        return [one.ids for one in self._rust.encode_batch([self._prompt + text for text in texts])]

    def spell(self, asked: Spell) -> Spelled:
        """Return ids of a bare text, or texts of ids, special tokens with their names."""
        if asked.text is not None:
            return Spelled(token_ids=tuple(self._rust.encode(asked.text, add_special_tokens=False).ids))
        refuse_unknown_ids(asked.token_ids, self.vocab_size)
        groups = [[one] for one in asked.token_ids] if asked.is_apart else [list(asked.token_ids)]
        return Spelled(texts=tuple(self._rust.decode_batch(groups, skip_special_tokens=False)))

    def embed(self, inputs: Sequence[Sequence[int]], dimensions: Sequence[int | None]) -> list[bytes | None]:
        """Return the vectors, cut to their `dimensions` and made of length 1 again."""
        lengths = torch.tensor([len(ids) for ids in inputs])
        longest = int(lengths.max())
        ids = torch.full((len(inputs), longest), self._pad_id, dtype=torch.long)
        for row, one in enumerate(inputs):
            ids[row, : len(one)] = torch.tensor(one)
        mask = (torch.arange(longest)[None, :] < lengths[:, None]).long()  # (N, T)
        features = {"input_ids": ids.to(self._device), "attention_mask": mask.to(self._device)}
        with torch.inference_mode():
            vectors = self._model(features)["sentence_embedding"].float().cpu()  # (N, C)
        return [_bytes_of(vector, num) for vector, num in zip(vectors, dimensions, strict=True)]


class _LastStates(torch.nn.Module):  # type: ignore[misc]
    """Pools the last hidden states: of a causal model the last token's, of an encoder their mean. Of length 1."""

    def __init__(self, body: Any, *, is_causal: bool) -> None:
        super().__init__()
        self.body, self._is_causal = body, is_causal

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mask = features["attention_mask"]  # (N, T)
        hidden = self.body(**features, **({"use_cache": False} if self._is_causal else {})).last_hidden_state
        if self._is_causal:
            rows = torch.arange(len(mask), device=mask.device)
            pooled = hidden[rows, mask.sum(dim=1) - 1]  # (N, C)
        else:
            shown = mask[:, :, None].to(hidden.dtype)
            pooled = (hidden * shown).sum(dim=1) / shown.sum(dim=1)
        return {"sentence_embedding": normalize(pooled.float(), dim=1)}


def _bytes_of(vector: torch.Tensor, num: int | None) -> bytes | None:
    if not bool(torch.isfinite(vector).all()):
        return None
    if num is not None and num < len(vector):
        vector = normalize(vector[:num], dim=0)
    return bytes(vector.contiguous().numpy().astype("<f4").tobytes())


def _sentence_transformer(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise ModelLoadError(
            f'{folder} needs sentence-transformers, which is not installed: pip install "streamserve[embeddings]"'
        ) from None
    return SentenceTransformer(
        str(folder),
        device=str(device),
        local_files_only=True,
        trust_remote_code=False,
        model_kwargs={"dtype": dtype, "use_safetensors": True},
    )


def _transformer(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoModel

    body = AutoModel.from_pretrained(str(folder), dtype=dtype, use_safetensors=True, trust_remote_code=False)
    return body.to(device)


def _check_modules(folder: Path) -> None:
    """Refuse modules that we do not know, and what of their settings would import code."""
    for module in json.loads((folder / _MODULES).read_text()):
        kind = str(module.get("type", ""))
        name = kind.rpartition(".")[2]
        if not kind.startswith("sentence_transformers.") or name not in _KNOWN_MODULES:
            known = ", ".join(_KNOWN_MODULES)
            raise UnsupportedModel(f"{folder} has the module {kind!r}. Modules of embedding models here: {known}.")
        if name == "Dense":
            settings = json.loads((folder / str(module.get("path", "")) / "config.json").read_text())
            activation = str(settings.get("activation_function", _KNOWN_ACTIVATIONS))
            if not activation.startswith(_KNOWN_ACTIVATIONS):
                raise UnsupportedModel(f"{folder} has a dense layer with {activation!r}, which is none of torch's own.")


def _default_prompt(model: Any) -> str:
    """Return the text that the model itself puts before each input."""
    prompt = str(model.prompts.get(model.default_prompt_name) or "") if model.default_prompt_name else ""
    if prompt and any(getattr(module, "include_prompt", True) is False for module in model):
        raise UnsupportedModel("The model leaves its prompt out of the pooling, which is not computed here.")
    return prompt


def _is_causal(settings: dict[str, Any]) -> bool:
    return any("CausalLM" in str(name) for name in settings.get("architectures") or ())


def _longest(config: EmbedderConfig, tokenizer: Any, settings: dict[str, Any]) -> int:
    """Return the tokens of the longest input: by the tokenizer, the model and the site."""
    text = settings.get("text_config", settings)
    known = [tokenizer.model_max_length, text.get("max_position_embeddings"), config.max_model_len]
    return int(min(one for one in (*known, _LARGEST_LEN) if one))


def _allows_fewer(config: EmbedderConfig, settings: dict[str, Any]) -> bool:
    if config.matryoshka is not None:
        return config.matryoshka
    return bool(settings.get("is_matryoshka") or settings.get("matryoshka_dimensions"))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _dtype(name: str, settings: dict[str, Any]) -> torch.dtype:
    """Return the dtype of the weights; float16 only on a GPU's checkpoint, else float32."""
    wanted = (settings.get("dtype") or settings.get("torch_dtype") or "float32") if name == "auto" else name
    found = torch.float32
    with suppress(AttributeError):
        found = getattr(torch, str(wanted))
    return torch.float32 if found is torch.float16 and not torch.cuda.is_available() else found

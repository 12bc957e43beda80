"""A model of a shape with random weights, made on a device: nothing is written, and an 8B takes seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from streamserve.engine.model.cuda.kernels import open_gpu_kernels
from streamserve.engine.model.decoder.build import build
from streamserve.engine.model.decoder.spec import spec_of
from streamserve.engine.model.linear.base import PLAIN
from streamserve.engine.model.linear.choose import LinearMaker
from streamserve.engine.model.load.loader import LoadedModel, Source
from streamserve.engine.model.runner import ModelRunner


class RandomWeights:
    """Weights by transformers' names, each made when it is asked for (decoder.checkpoint.Weights)."""

    prefix = "model."

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        """`config` is transformers'."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._dtype, self._device = dtype, device
        self.head_name = None if config.tie_word_embeddings else "lm_head.weight"

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def names(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`."""
        return (name for name in self._shapes if name.startswith(prefix))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of small random numbers; of a norm, of ones."""
        weight = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        return weight.fill_(1.0) if weight.dim() == 1 else weight.normal_(std=0.02)

    def dtype(self) -> torch.dtype:
        """Return the dtype to compute in."""
        return self._dtype

    def require(self, names: Iterable[str]) -> None:
        """Accept all names: they are the shape's."""


def random_runner(
    shape: dict[str, Any],
    *,
    dtype: torch.dtype,
    device: str,
    num_blocks: int,
    block_size: int,
    most_rows: int,
    has_kernels: bool = True,
) -> ModelRunner:
    """Return a runner of our decoder layers. Not `has_kernels`: with torch alone, without Triton and graphs."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**shape)
    place = torch.device(device)
    source = Source(folder=Path("random"), config=config, dtype=dtype, device=place, revision="random")
    spec = spec_of(config)
    assert spec is not None
    with torch.inference_mode():
        decoder = build(spec, RandomWeights(config, dtype, place), LinearMaker(back_end=PLAIN), dtype, place)
    kernels = open_gpu_kernels(place) if has_kernels else None
    longest = config.max_position_embeddings
    loaded = LoadedModel.of(decoder, source, kernels)
    runner = ModelRunner(loaded, block_size=block_size, num_blocks=num_blocks, max_model_len=longest)
    runner.capture(most_rows)
    return runner

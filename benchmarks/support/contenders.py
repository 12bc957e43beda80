"""The contenders of `benchmarks.engine`: our engine, transformers `generate`, transformers continuous batching.

Each measures the same two times: one decode step of n streams, and the first token of a long prompt.
"""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.model.load.start import load_hf_runner, load_runner
from streamserve.engine.sequence import SequenceRequest
from streamserve.protocol.requests import START, Admission, Resume, SamplingParams

# It warns at every round that its manager was sized for the round before.
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)

VOCAB_SIZE = 49_152
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
_clocks = {"wall": time.perf_counter, "cpu": time.process_time}
_chosen = ["wall"]


def choose_clock(name: str) -> None:
    """Measure "wall" time, or "cpu" time of this process, which other programs on the machine disturb less."""
    _chosen[0] = name


def clock() -> float:
    """Seconds by the chosen clock."""
    return _clocks[_chosen[0]]()


class Contender(Protocol):
    """One engine to be timed."""

    name: str

    def decode(self, num_streams: int, prompt_len: int, num_steps: int) -> float:
        """Seconds of one decode step of `num_streams` streams whose prompts are computed."""

    def first_token(self, prompt_len: int) -> float:
        """Seconds from a new prompt to its first token."""

    def close(self) -> None:
        """Free the memory."""


def make_prompt(length: int, seed: int) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


class Ours:
    """The whole engine: scheduler, block pool, runner, sampler."""

    name = "ours"

    def __init__(
        self,
        folder: str,
        dtype: str,
        device: str = "cpu",
        num_blocks: int = 1024,
        *,
        on_transformers: bool = False,
        adapters: Mapping[str, str] | None = None,
        of_streams: tuple[str, ...] = ("",),
        **options: Any,
    ) -> None:
        """`on_transformers`: with transformers' decoder layers instead of ours. `options` are the engine's.

        `of_streams`: the streams' adapters in turn, "" for none; `adapters`: the folder of each.
        """
        self.config = EngineConfig(num_blocks=num_blocks, prefill_chunk=2048, max_num_batched_tokens=8192, **options)
        self.of_streams = of_streams
        model = ModelConfig(alias="ours", path=folder, dtype=dtype, device=device, adapters=adapters or {})
        self.runner = load_hf_runner(model, self.config) if on_transformers else load_runner(model, self.config)
        self.core = EngineCore(self.runner, self.config, time.monotonic)
        self.seq_id = 0

    def decode(self, num_streams: int, prompt_len: int, num_steps: int) -> float:
        """Prefill all streams, then time `num_steps` steps in which every one of them decodes."""
        self.start(num_streams, prompt_len, num_steps + 1000)
        seconds = self.time_steps(num_streams, num_steps)
        self.stop(num_streams)
        return seconds

    def start(self, num_streams: int, prompt_len: int, max_tokens: int) -> None:
        """Prefill as many streams."""
        for _ in range(num_streams):
            self._add(make_prompt(prompt_len, self.seq_id), max_tokens)
        started: set[int] = set()
        while len(started) < num_streams:
            started |= {update.seq_id for update in self.core.step() if update.token_ids}

    def time_steps(self, num_streams: int, num_steps: int) -> float:
        """Return the mean of the next steps, in each of which all streams decode."""
        started_at = clock()
        for _ in range(num_steps):
            assert len(self.core.step()) == num_streams
        return (clock() - started_at) / num_steps

    def stop(self, num_streams: int) -> None:
        """End the streams started last."""
        for seq_id in range(self.seq_id - num_streams + 1, self.seq_id + 1):
            self.core.abort(seq_id)
        self.core.step()

    def first_token(self, prompt_len: int) -> float:
        """Return a prompt that is not in the prefix cache."""
        return self._time_one(make_prompt(prompt_len, self.seq_id + 1_000_000))

    def first_token_after_prefix(self, prefix_len: int, tail_len: int, prefix: int) -> float:
        """A prompt of a numbered prefix and a tail of its own."""
        tail = make_prompt(tail_len, self.seq_id + 2_000_000)
        return self._time_one(make_prompt(prefix_len, prefix + 3_000_000) + tail)

    def _time_one(self, prompt: list[int]) -> float:
        started_at = clock()
        self._add(prompt, 1)
        while self.core.has_work:
            self.core.step()
        return clock() - started_at

    def park(self, prompt_len: int, answer_len: int) -> tuple[float, float, float, int]:
        """Drop an answer and resume it, cached and not: seconds of a plain step and to both next tokens; cached."""
        prompt = make_prompt(prompt_len, self.seq_id + 4_000_000)
        self._add(prompt, 4 * answer_len)
        token_ids, gaps = [self._next_token()[0]], []
        while len(token_ids) < answer_len:
            started_at = clock()
            token_ids.append(self._next_token()[0])
            gaps.append(clock() - started_at)
        self.core.abort(self.seq_id)
        warm, num_cached = self._resume(prompt, token_ids, "")
        cold, none_cached = self._resume(prompt, token_ids, f"salt {self.seq_id}")
        assert num_cached > 0 == none_cached
        return statistics.median(gaps), warm, cold, num_cached

    def _resume(self, prompt: list[int], token_ids: list[int], salt: str) -> tuple[float, int]:
        started_at = clock()
        self._add(prompt, 4 * len(token_ids), salt=salt, resume=Resume(output_token_ids=(tuple(token_ids),)))
        _, num_cached = self._next_token()
        seconds = clock() - started_at
        self.core.abort(self.seq_id)
        return seconds, num_cached

    def _next_token(self) -> tuple[int, int]:
        """Step until the only sequence has one more update; return it, and the number of cached prompt tokens."""
        while True:
            for update in self.core.step():
                if update.token_ids:
                    return update.token_ids[0], update.num_cached_tokens

    def _add(self, prompt: list[int], max_tokens: int, *, salt: str = "", resume: Resume = START) -> None:
        self.seq_id += 1
        sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=self.seq_id, max_tokens=max_tokens, ignore_eos=True)
        request = SequenceRequest(
            seq_id=self.seq_id,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            admission=Admission(owner="", tenant="", salt=salt, arrived_at=time.monotonic()),
            resume=resume,
            adapter=self.of_streams[self.seq_id % len(self.of_streams)],
            latency_class="document",  # it may wait longer than a chat: no request is refused here
        )
        self.core.add(request)

    def close(self) -> None:
        """Free the memory."""
        self.runner.close()


class Generate:
    """transformers `generate`, one static batch, SDPA, dynamic cache: its best settings on a CPU."""

    name = "generate"

    def __init__(self, folder: str, dtype: str, device: str = "cpu", how: dict[str, Any] = SAMPLED) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
        self.model = model.to(device).eval()
        self.device = device
        self.how = how
        self.seed = 0

    def decode(self, num_streams: int, prompt_len: int, num_steps: int) -> float:
        """The difference between a long and a short run, by the steps between them."""
        inputs = self._inputs(num_streams, prompt_len)
        return (self._time(inputs, num_steps + 1) - self._time(inputs, 1)) / num_steps

    def first_token(self, prompt_len: int) -> float:
        """One new token."""
        return self._time(self._inputs(1, prompt_len), 1)

    def _inputs(self, num_streams: int, prompt_len: int) -> torch.Tensor:
        self.seed += 1
        prompts = [make_prompt(prompt_len, self.seed * 1000 + i) for i in range(num_streams)]
        return torch.tensor(prompts, device=self.device)

    def _time(self, inputs: torch.Tensor, num_tokens: int) -> float:
        started_at = clock()
        with torch.inference_mode():
            output = self.model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
                **self.how,
            )
        assert output.shape[1] == inputs.shape[1] + num_tokens
        return clock() - started_at

    def close(self) -> None:
        """Free the memory."""
        del self.model


class ContinuousBatching(Generate):
    """transformers continuous batching over SDPA: one manager for all runs, a pool that fits the streams."""

    name = "hf batching"
    num_blocks: int | None = 64  # of 256 tokens; the default, None, takes 60 % of RAM
    most_requests = 64

    def _time(self, inputs: torch.Tensor, num_tokens: int) -> float:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        generation = GenerationConfig(max_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=0, **self.how)
        started_at = clock()
        output: Any = self.model.generate_batch(
            inputs=inputs.tolist(),
            generation_config=generation,
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=self.num_blocks, max_batch_tokens=8192, max_requests_per_batch=self.most_requests
            ),
            max_new_tokens=num_tokens,
            progress_bar=False,
            persistent_manager=True,
            warmup=False,
        )
        seconds = clock() - started_at
        assert all(len(one.generated_tokens) == num_tokens for one in output.values())
        return seconds

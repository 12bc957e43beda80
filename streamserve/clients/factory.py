"""Ready-made clients: `echo_client` without weights, `hf_client` for a model folder, `remote_client` for a server.

Lives above the engine; torch is imported while loading, on the engine thread, and never before.

`ScriptedRunner` and `ScriptedTokenizer` are the echo engine with answers that people can read:

    answers = {"price": "It costs 3 euros."}     a question that has the word "price" gets that answer
    answers = {}                                 any other question is the answer itself

An answer is given byte by byte and then ends; where the end is banned (`ignore_eos`), the words of the echo engine
follow. The runner keeps the tokens of each slot beside the echo engine's hashes, so that a sequence continues after a
park, a preemption or a cached prefix as in a real model. No torch, no clock, no randomness.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from streamserve.clients.base import EngineClient
from streamserve.clients.remote.config import RemoteConfig
from streamserve.clients.thread.acceptance import EngineFacts, LoadedEngine
from streamserve.clients.thread.client import ThreadClient
from streamserve.clients.thread.embedder import ThreadEmbedder
from streamserve.engine.capacity import ECHO_BYTES
from streamserve.engine.config import EmbedderConfig, EngineConfig, ModelConfig
from streamserve.engine.echo import ASSISTANT, END_OF_TURN, USER, EchoRunner, EchoTokenizer, is_allowed
from streamserve.engine.embedding import EchoEmbedder, Embedder
from streamserve.engine.model.openmp import limit_spin
from streamserve.engine.plan import Chunk, OnStep, Progress, RawLogprobs, Runner, SampleSpec, StepPlan
from streamserve.engine.text.tokenizer import Prompt
from streamserve.protocol.engine import TOO_LARGE
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.requests import GenerateRequest

logger = logging.getLogger(__name__)

# Long enough for a page of text, small enough that a test can fill it.
_ECHO_MODEL_LEN = 8192
_ECHO_NUM_BLOCKS = 1024


class Memory(Protocol):
    """What the engines of a machine share."""

    budget: int

    def reserve(self, num_bytes: int, progress: Progress) -> None:
        """Return once so many bytes are this engine's. Engine thread; raises EngineUnavailable."""


def make_client(
    model: ModelConfig,
    config: EngineConfig | None = None,
    *,
    step_delay_seconds: float = 0.0,
    on_step: OnStep | None = None,
    compiles: bool = False,
    memory: Memory | None = None,
) -> ThreadClient:
    """Return a client for a model, in this process; `path="echo"` needs no weights (and may be slowed down).

    `compiles`: native kernels may be compiled here. An engine's own process may; a web process takes what is there.
    `memory`: what the load has to fit into.
    """
    if model.path == "echo":
        return echo_client(
            model.alias,
            config,
            answers=model.answers,
            format_name=model.format,
            step_delay_seconds=step_delay_seconds,
            on_step=on_step,
            memory=memory,
            adapters=model.adapters,
        )
    return hf_client(model, config, on_step=on_step, compiles=compiles, memory=memory)


def make_embedder(
    config: EmbedderConfig,
    *,
    step_delay_seconds: float = 0.0,
    on_step: OnStep | None = None,
    memory: Memory | None = None,
) -> ThreadEmbedder:
    """Return a client for an embedding model, in this process; `path="echo"` needs no weights."""
    if config.path == "echo":
        load = partial(_load_echo_embedder, step_delay_seconds, memory)
        return ThreadEmbedder(config, load, on_step=on_step, loads_at_once=memory is None)
    return ThreadEmbedder(config, partial(_load_embedder, config, memory), on_step=on_step)


def echo_client(
    alias: str = "echo",
    config: EngineConfig | None = None,
    *,
    answers: Mapping[str, str] | None = None,
    format_name: str | None = None,
    step_delay_seconds: float = 0.0,
    on_plan: Callable[[StepPlan], None] | None = None,
    on_step: OnStep | None = None,
    memory: Memory | None = None,
    adapters: Iterable[str] = (),
) -> ThreadClient:
    """Return a client of the echo engine. It is loaded once it is started, so that no test's first question is refused;
    with a `memory` that it may have to wait for, it is loaded as a model is.

    `format_name`: the tags of that format in `answers` mark thoughts and tool calls, as a real model's do. A step gives
    one token of an answer, so that its delay is seen. `adapters` give other words to the same prompt.
    """
    config = replace(config or EngineConfig(), speculation="off")
    return ThreadClient(
        alias,
        partial(
            _load_echo,
            config,
            step_delay_seconds,
            answers=answers,
            format_name=format_name,
            memory=memory,
            adapters=frozenset(adapters),
        ),
        config,
        on_plan=on_plan,
        on_step=on_step,
        loads_at_once=memory is None,
    )


def remote_client(config: RemoteConfig) -> EngineClient:
    """Return a client of a model that a server elsewhere runs; made on the event loop that uses it."""
    from streamserve.clients.remote.client import RemoteClient  # its connections need httpx

    return RemoteClient(config)


def hf_client(
    model: ModelConfig,
    config: EngineConfig | None = None,
    *,
    on_step: OnStep | None = None,
    compiles: bool = False,
    memory: Memory | None = None,
) -> ThreadClient:
    """Return a client of a Hugging Face model folder."""
    config = config or EngineConfig()
    return ThreadClient(model.alias, partial(_load_hf, model, config, compiles, memory), config, on_step=on_step)


def _load_echo(
    config: EngineConfig,
    step_delay_seconds: float,
    progress: Progress,
    *,
    answers: Mapping[str, str] | None = None,
    format_name: str | None = None,
    memory: Memory | None = None,
    adapters: frozenset[str] = frozenset(),
) -> LoadedEngine:
    if memory is not None:
        memory.reserve(ECHO_BYTES, progress)
    progress("ready", 1.0)
    make = EchoRunner if answers is None else partial(ScriptedRunner, answering(answers))
    runner = make(
        num_blocks=config.num_blocks or _ECHO_NUM_BLOCKS,
        block_size=config.block_size,
        pause=partial(time.sleep, step_delay_seconds) if step_delay_seconds else None,
    )
    tokenizer = EchoTokenizer() if answers is None else ScriptedTokenizer()
    facts = EngineFacts(
        max_model_len=config.max_model_len or _ECHO_MODEL_LEN,
        eos_token_ids=tokenizer.eos_token_ids,
        dtype="int",
        device="cpu",
        revision="echo",
        adapters=adapters,
    )
    format_ = None
    if format_name is not None:
        from streamserve.engine.text.formats.markup import choose_format

        format_ = choose_format(tokenizer, format_name)
    return LoadedEngine(runner=runner, tokenizer=tokenizer, facts=facts, format=format_)


def _load_hf(
    model: ModelConfig, config: EngineConfig, compiles: bool, memory: Memory | None, progress: Progress
) -> LoadedEngine:
    limit_spin()  # read by torch's OpenMP runtime, which the next line may load
    from streamserve.engine.model.load.size import oversize, sized
    from streamserve.engine.model.load.source import ModelLoadError, memory_for, resolve, sampling_defaults

    try:
        progress("files", 0.0)
        folder = str(resolve(model.path, progress=progress))
        draft = str(resolve(model.draft, progress=progress)) if model.draft else ""
        if memory is not None:
            num_bytes, config = sized(replace(model, draft=draft), config, Path(folder), memory.budget)
            memory.reserve(num_bytes, progress)  # before PyTorch
        elif reason := oversize(replace(model, draft=draft), config, Path(folder), memory_for(model.device)):
            progress(TOO_LARGE, 0.0)
            raise EngineUnavailable(reason, code=TOO_LARGE)
        from streamserve.engine.model.load.loader import read_config
        from streamserve.engine.model.load.start import load_runner
        from streamserve.engine.text.formats.markup import choose_format
        from streamserve.engine.text.hf_tokenizer import HFTokenizer, require_same_tokens

        with _loading_alone(progress):
            read_config(Path(folder))  # refuses what is no model, before its tokenizer is missed
            tokenizer = HFTokenizer(folder, model.chat_template)
            if draft:
                require_same_tokens(tokenizer, model.path, draft)
            model = replace(model, path=folder, draft=draft, native=model.native and (compiles or _is_compiled(model)))
            runner: Any = load_runner(model, config, progress)
            format_ = choose_format(tokenizer, model.format)
    except ModelLoadError as error:  # its message is written for operators
        raise EngineUnavailable(str(error), code="load_failed") from error
    facts = EngineFacts(
        max_model_len=runner.max_model_len,
        eos_token_ids=frozenset(runner.eos_token_ids) | tokenizer.eos_token_ids,
        num_parameters=runner.num_parameters,
        dtype=runner.dtype,
        device=runner.device,
        linears=runner.linears,
        revision=runner.revision,
        sampling_defaults=sampling_defaults(Path(folder)),
        adapters=frozenset(model.adapters),
    )
    if compiles:  # the engine's own process
        _freeze_heap()
    return LoadedEngine(
        runner=cast(Runner, runner),
        tokenizer=tokenizer,
        facts=facts,
        format=format_,
        draft=runner.draft,
        step_tokens=config.max_num_batched_tokens,
    )


def _freeze_heap() -> None:
    """Exclude what a load has made from garbage collection: it lives as long as the process.

    A full collection would look at some 400,000 objects, and hold a step for 0.2 s.
    """
    gc.collect()
    gc.freeze()


def _load_echo_embedder(step_delay_seconds: float, memory: Memory | None, progress: Progress) -> Embedder:
    if memory is not None:
        memory.reserve(ECHO_BYTES, progress)
    return EchoEmbedder(partial(time.sleep, step_delay_seconds) if step_delay_seconds else None)


def _load_embedder(config: EmbedderConfig, memory: Memory | None, progress: Progress) -> Embedder:
    limit_spin()
    from streamserve.engine.model.load.size import EMBEDDER_FILES, embedder_bytes
    from streamserve.engine.model.load.source import ModelLoadError, resolve

    try:
        if memory is not None:  # before PyTorch
            memory.reserve(embedder_bytes(config, resolve(config.path, EMBEDDER_FILES, progress)), progress)
        from streamserve.engine.model.embedder import load_embedder

        with _loading_alone(progress):
            return load_embedder(config, progress)
    except ModelLoadError as error:  # its message is written for operators
        raise EngineUnavailable(str(error), code="load_failed") from error


def _is_compiled(model: ModelConfig) -> bool:
    """Return whether this machine's native library is there; if not, say that it is off."""
    from streamserve.native.build import find
    from streamserve.native.levels import best_level

    if find(best_level()) is not None:
        return True
    logger.warning(
        'Native kernels are off for %s: a web process does not compile them. Let an engine of its own serve ("CLIENT": '
        '"process"), or run python -m streamserve.native.build once.',
        model.alias,
    )
    return False


# While transformers loads a model it changes what the whole process has: torch's default dtype, whether weights are
# tied, and its own modules, which it imports when they are used. So a process loads its models one after another.
_LOADING = threading.Lock()
_REPORT_SECONDS = 0.2  # a report is a chance to give up


@contextmanager
def _loading_alone(progress: Progress) -> Iterator[None]:
    """Hold the lock around a load; the stage is "waiting" until it is free."""
    while not _LOADING.acquire(timeout=_REPORT_SECONDS):
        progress("waiting", 0.0)
    try:
        yield
    finally:
        _LOADING.release()


_NUM_BYTES = 256


class ScriptedTokenizer(EchoTokenizer):
    """Every prompt ends with the token after which the answer begins."""

    def encode(self, request: GenerateRequest) -> Prompt:
        prompt = super().encode(request)
        is_chat = request.messages is not None
        return prompt if is_chat else Prompt(token_ids=(*prompt.token_ids, ASSISTANT))


class ScriptedRunner(EchoRunner):
    """Answers with what `answer` returns for the last question of the prompt."""

    def __init__(self, answer: Callable[[str], str], **options: Any) -> None:
        super().__init__(**options)
        self._answer = answer
        self._ids = array("i", [0]) * (self.num_blocks * self.block_size)  # by slot

    def _write(self, chunk: Chunk) -> None:
        super()._write(chunk)
        table, size = chunk.block_table, self.block_size
        for position, token_id in enumerate(chunk.token_ids, chunk.start):
            self._ids[table[position // size] * size + position % size] = token_id

    def _draw(self, chunk: Chunk, spec: SampleSpec) -> tuple[int, RawLogprobs | None]:
        table, size, num_tokens = chunk.block_table, self.block_size, chunk.start + len(chunk.token_ids)
        ids = [self._ids[table[position // size] * size + position % size] for position in range(num_tokens)]
        begin = _last(ids, ASSISTANT) + 1
        question = ids[_last(ids[: begin - 1], USER) + 1 : begin - 1]
        text = bytes(one for one in question if one < _NUM_BYTES).decode(errors="replace")
        answer = self._answer(text).encode()
        num_given = num_tokens - begin
        token_id = answer[num_given] if num_given < len(answer) else END_OF_TURN
        is_over = num_given > len(answer)
        if is_over or token_id in spec.banned_token_ids or not is_allowed(token_id, spec):
            return super()._draw(chunk, spec)
        return token_id, None


def answering(answers: Mapping[str, str]) -> Callable[[str], str]:
    """Return the function from a question to its answer: of the first entry whose word it has, else the question."""

    def answer(question: str) -> str:
        found = (text for word, text in answers.items() if word.lower() in question.lower())
        return next(found, question)

    return answer


def _last(ids: list[int], token_id: int) -> int:
    """Return the last position of `token_id`; -1 for none, so that what follows it is everything."""
    return next((position for position in reversed(range(len(ids))) if ids[position] == token_id), -1)

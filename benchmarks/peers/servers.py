"""The contenders: our site and the peers' servers, each in a precision, with the same model, seats and cache."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.paths.site import free_port
from benchmarks.qoe_http.servers import MODEL, ROOT, Model, Server, peer, peer_environ, site, vllm
from benchmarks.support.machine import progress

OURS, LLAMA, VLLM, TRANSFORMERS = "ours", "llama", "vllm", "transformers"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
QUANTIZED = ("int8", "int4")
# What our precisions are compared with, like with like.
LIKE = {
    "fp32": ("fp32", "f32"),
    "bf16": ("bf16", "fp16", "f16"),
    "int8": ("q8_0",),
    "int4": ("q4_0", "q4_K_M"),
}
# Bits of a weight that a decode step reads. Groups of 32 have a scale, int4's a minimum too, in 16 bits.
BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "int8": 8.5, "int4": 5.0}
FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_K_M")  # of llama.cpp, as convert.py knows them
_CACHE_LEN = 16_384  # tokens: 32 streams of a round, or a long prompt beside 8
_MAX_LEN = 8192
_OPENAI_FIELDS = {"ignore_eos": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A server that answers /v1/completions.

    `fields`: what its requests have besides the common ones. `weight_bytes`: what a decode step reads of its weights.
    """

    kind: str
    precision: str
    server: Server
    weight_bytes: float
    variant: str = ""
    model: str = MODEL
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType(_OPENAI_FIELDS))

    @property
    def name(self) -> str:
        """What the report calls it."""
        return f"{self.kind} {self.precision}" + (f" {self.variant}" if self.variant else "")

    @property
    def sessions(self) -> dict[str, int]:
        """The sessions whose CPU is its own, by role: "engine", and "web" where that is apart."""
        server = self.server
        return {"engine": server.engine.pid} | ({"web": server.process.pid} if server.process != server.engine else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all contenders share: the model, where they write, and the Pythons of the installed peers.

    `num_weights`: what a decode step reads. The peers' models are kept in `cache`.
    """

    model: Model
    num_weights: int
    folder: Path
    cache: Path
    pythons: dict[str, Path] = field(default_factory=dict)

    @property
    def least_bytes(self) -> float:
        """Memory that a contender should find free: weights of 16 bits, and its cache."""
        return self.num_weights * 2 + self.model.cache_bytes / 2

    def ours(self, precision: str, environ: Mapping[str, str]) -> AbstractContextManager[Contender]:
        """Serve our site; `environ` makes a variant of it."""
        dtype, more = DTYPES.get(precision, "bfloat16"), {"QUANTIZE": precision} if precision in QUANTIZED else {}
        variant = " ".join(f"{name}={value}" for name, value in environ.items())
        folder = self.folder / f"ours-{precision}-{variant.replace('/', '_')}".rstrip("-")
        model = replace(self.model, dtype=dtype)
        serving = site(model, folder, is_fcfs=False, environ=environ, more=more)
        return self._contender(serving, OURS, precision, variant=variant)

    def vllm(self, precision: str) -> AbstractContextManager[Contender]:
        """Serve vLLM."""
        model = replace(self.model, dtype=DTYPES[precision])
        serving = vllm(model, self.folder / f"vllm-{precision}", self.pythons[VLLM])
        return self._contender(serving, VLLM, precision)

    def transformers(self, precision: str) -> AbstractContextManager[Contender]:
        """Serve `transformers serve` with continuous batching. It knows no `ignore_eos`."""
        port, block_len = free_port(), 256
        arguments = ["-m", "transformers.cli.transformers", "serve", str(self.model.folder), "--device", "cpu"]
        arguments += ["--dtype", DTYPES[precision], "--host", "127.0.0.1", "--port", str(port), "--continuous-batching"]
        arguments += ["--cb-block-size", str(block_len), "--cb-num-blocks", str(self.model.cache_len // block_len)]
        serving = self._peer(TRANSFORMERS, precision, arguments, port)
        generation = {"do_sample": True, "temperature": 0.8, "eos_token_id": -1, "pad_token_id": 0}
        fields = {"generation_config": json.dumps(generation)}
        return self._contender(serving, TRANSFORMERS, precision, fields=fields, model=str(self.model.folder))

    @contextlib.contextmanager
    def llama(self, precision: str) -> Iterator[Contender]:
        """Serve llama-server with the model as GGUF, made once."""
        python, path = self.pythons[LLAMA], self.cache / f"{self.model.folder.name}-{self._mark()}-{precision}.gguf"
        if not path.exists():
            progress(f"making {path.name}")
            command = [str(python), "-m", "benchmarks.peers.convert", str(self.model.folder), precision, str(path)]
            done = subprocess.run(command, cwd=ROOT, env=peer_environ(), capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(done.stderr)
        port, num_threads = free_port(), self.model.num_threads or len(os.sched_getaffinity(0))
        numbers = [str(number) for number in (port, self.model.seats, self.model.cache_len, num_threads)]
        serving = self._peer(LLAMA, precision, ["-m", "benchmarks.peers.llama", str(path), *numbers], port)
        with self._contender(serving, LLAMA, precision, weight_bytes=path.stat().st_size) as contender:
            yield contender

    def _mark(self) -> str:
        """Return a hash of this checkpoint's files: it differs from another checkpoint's of the same name."""
        stats = [file.stat() for file in sorted(self.model.folder.glob("*.safetensors"))]
        return f"{zlib.crc32(repr([(stat.st_size, stat.st_mtime_ns) for stat in stats]).encode()):08x}"

    @contextlib.contextmanager
    def _peer(self, kind: str, precision: str, arguments: list[str], port: int) -> Iterator[Server]:
        folder = self.folder / f"{kind}-{precision}"
        folder.mkdir()
        with peer(folder, [str(self.pythons[kind]), *arguments], peer_environ(), port) as server:
            yield server

    @contextlib.contextmanager
    def _contender(
        self, serving: AbstractContextManager[Server], kind: str, precision: str, **more: Any
    ) -> Iterator[Contender]:
        more = {"weight_bytes": self.num_weights * BITS.get(precision, 0.0) / 8} | more
        with serving as server:
            yield Contender(kind=kind, precision=precision, server=server, **more)


Start = Callable[[], AbstractContextManager[Contender]]


def make_bench(folder: Path, seats: int, parent: Path, cache: Path, num_threads: int | None) -> Bench:
    """Return what all contenders share, for the model in `folder` and so many sequences at once."""
    config = json.loads((folder / "config.json").read_text())
    head_len = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_len * 4
    model = Model(
        folder=folder,
        dtype="auto",
        seats=seats,
        num_threads=num_threads,
        max_len=min(config["max_position_embeddings"], _MAX_LEN),
        cache_len=_CACHE_LEN,
        cache_bytes=_CACHE_LEN * token_bytes,
    )
    num_weights = count_weights(folder, is_tied=config["tie_word_embeddings"])
    return Bench(model=model, num_weights=num_weights, folder=parent, cache=cache)


def count_weights(folder: Path, *, is_tied: bool) -> int:
    """Return how many weights a decode step reads: all but the input embedding, if the head is another matrix."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            sizes = {name: prod(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        total += sum(size for name, size in sizes.items() if is_tied or "embed_tokens" not in name)
    return total

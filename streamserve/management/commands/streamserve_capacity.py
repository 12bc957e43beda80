"""`manage.py streamserve_capacity MODEL`: the capacity of an engine, from config.json and file headers only."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from streamserve.conf import ECHO_PATH, ServedModel, get_settings
from streamserve.engine.capacity import (
    DTYPE_BYTES,
    LENGTHS,
    Capacity,
    UnknownShape,
    capacity,
    model_len,
    num_parameters,
    text_config,
)
from streamserve.engine.config import ModelConfig
from streamserve.engine.model.load.quantized.scheme import read_scheme
from streamserve.engine.model.load.source import ModelLoadError, read_config, read_headers, resolve, total_memory

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}
_WINDOWS = (
    "Some layers look back only a window, and what lies before it is freed; groups of layers, each with blocks of its"
    " own: {}. A load that falls back to transformers' own code keeps everything."
)
_WAYS_OUT = {
    "cpu": "QUANTIZE takes about 0.6 (int8) or 0.45 (int4) of bfloat16. Or take a smaller model, or serve it"
    " elsewhere.",
    "cuda": "Take a smaller model, or serve it elsewhere.",
}
_UNKNOWN_WEIGHTS = "The weights are not here, so what they take is not known, and not taken off."


def parse_bytes(text: str) -> int:
    """Parse "8GiB", "24 GB", "512m". Raises ArgumentTypeError."""
    found = re.fullmatch(r"([0-9.]+)\s*([A-Z]*)", text.strip().upper())
    unit = found and (found[2] + "IB" if found[2] in tuple("KMGT") else found[2])
    try:
        return int(float(found[1]) * _UNITS[unit])  # type: ignore[index]
    except (TypeError, KeyError, ValueError):
        raise ArgumentTypeError(f"{text!r} is no amount of memory; try 8GiB") from None


def format_bytes(number: float | None) -> str:
    """Return a number of bytes with a unit."""
    if number is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:,.0f} {unit}"
        number /= 1024
    return f"{number:,.1f} GiB"


class Command(BaseCommand):
    """Loads neither weights nor torch."""

    help = "Print the bytes of a token, the size of the KV pool, and the number of streams it holds."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("model", help="an alias of MODELS, a folder, or a hub id such as org/name")
        parser.add_argument(
            "--memory", type=parse_bytes, help="of the device, such as 8GiB; default: this machine's RAM"
        )
        parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the model's device, else cpu")
        parser.add_argument("--json", action="store_true", help="for programs")

    def handle(self, *args: Any, model: str, memory: int | None, device: str | None, **options: Any) -> None:
        settings = get_settings()
        entry = settings.models.get(model)
        if entry is not None and entry.adapter_of:
            raise CommandError(f"{model!r} is an adapter of the model {entry.adapter_of!r}: name that.")
        chosen = entry or ServedModel(model=ModelConfig(alias=model, path=model), engine=settings.engine)
        if model in settings.embedding_models:
            raise CommandError(f"The model {model!r} makes embeddings: it keeps no keys, and holds no streams.")
        if chosen.remote is not None:
            raise CommandError(f"The model {model!r} runs on a server elsewhere, at {chosen.remote.address}.")
        if chosen.model.path == ECHO_PATH:
            raise CommandError("The echo engine has no weights and keeps no keys. Name a model folder or a hub id.")
        device = device or ("cuda" if chosen.model.device == "cuda" else "cpu")
        if device == "cuda" and memory is None:
            raise CommandError("Give the memory of the GPU, such as --memory 24GiB.")
        try:
            report = _report(chosen, device, total_memory() if memory is None else memory)
        except (ModelLoadError, UnknownShape) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(json.dumps(report, indent=2) if options["json"] else "\n".join(_lines(report)))


def _read(path: str) -> tuple[Mapping[str, Any], int | None]:
    """Return a model's config.json and how many numbers its weights have; None: not known."""
    folder = resolve(path, patterns=("config.json",))
    config, headers = read_config(folder), read_headers(folder)
    quantization = text_config(config).get("quantization_config") or config.get("quantization_config")
    bits = read_scheme(quantization).bits if quantization else 32
    return config, sum(num_parameters(header, bits) for header in headers) if headers else None


def _report(chosen: ServedModel, device: str, memory_bytes: int) -> dict[str, Any]:
    config, parameters = _read(chosen.model.path)
    draft = None
    if chosen.model.draft:
        draft, of_draft = _read(chosen.model.draft)
        parameters = None if parameters is None or of_draft is None else parameters + of_draft
    longest = chosen.engine.max_model_len or model_len(config)
    found = [
        capacity(
            config,
            replace(chosen.engine, max_model_len=longest),
            dtype=dtype,
            memory_bytes=memory_bytes,
            on_gpu=device == "cuda",
            parameters=parameters,
            draft=draft,
        )
        for dtype in DTYPE_BYTES
    ]
    return {
        "model": chosen.model.alias,
        "model_type": config.get("model_type", "unknown"),
        "num_parameters": parameters,
        "max_model_len": longest,
        "device": device,
        "memory_bytes": memory_bytes,
        "block_size": chosen.engine.block_size,
        "max_num_seqs": chosen.engine.max_num_seqs,
        "max_admitted": chosen.engine.max_admitted,
        "capacities": [asdict(one) for one in found],
    }


def _lines(report: dict[str, Any]) -> Sequence[str]:
    """Return the report as a table with notes."""
    found = [_capacity(one) for one in report["capacities"]]
    table: list[tuple[str, list[str]]] = [
        ("", [one.dtype for one in found]),
        ("weights", [format_bytes(one.weight_bytes) for one in found]),
        ("KV of one token", [format_bytes(one.bytes_per_token) for one in found]),
        ("KV pool", [format_bytes(one.pool_bytes) for one in found]),
        (f"blocks of {report['block_size']} tokens", [f"{one.num_blocks:,}" for one in found]),
    ]
    table += _held("", found)
    if kept := [one.kept for one in found if one.kept]:
        table += _held("if all were kept, ", kept)
    head = (
        f"{report['model']} ({report['model_type']}), at most {report['max_model_len']:,} tokens, on {report['device']}"
        f" with {format_bytes(report['memory_bytes'])}"
    )
    width = max(26, *(len(name) + 1 for name, _ in table))
    rows = [f"{name:{width}}" + "".join(f"{cell:>14}" for cell in cells) for name, cells in table]
    return [head, "", *rows, "", *_notes(report, found)]


def _capacity(fields: dict[str, Any]) -> Capacity:
    return Capacity(**{**fields, "kept": fields["kept"] and Capacity(**fields["kept"])})


def _held(prefix: str, found: Sequence[Capacity]) -> Iterator[tuple[str, list[str]]]:
    yield f"{prefix}longest sequence", [f"{one.max_tokens:,}" for one in found]
    for length in LENGTHS:
        counts = [one.streams[length] for one in found]
        yield f"{prefix}streams of {length:,} tokens", ["too long" if n is None else f"{n:,}" for n in counts]


def _notes(report: dict[str, Any], found: Sequence[Capacity]) -> Sequence[str]:
    most = report["max_admitted"]
    notes = [
        f"A step computes at most max_num_seqs={report['max_num_seqs']} of them, those whose readers run out first;"
        f" {'memory bounds' if most is None else f'max_admitted={most} and memory bound'} how many are admitted."
    ]
    if any(found[0].windows):
        notes.append(_WINDOWS.format(len(found[0].windows)))
    large = [one.dtype for one in found if (one.weight_bytes or 0) > report["memory_bytes"]]
    short = [one.dtype for one in found if one.max_tokens < report["max_model_len"] and one.dtype not in large]
    if short:
        notes.append(
            f"In {' and '.join(short)}, the pool is too small for the model's longest sequence: what is longer than it"
            " holds is refused."
        )
    if report["num_parameters"] is None:
        notes.append(_UNKNOWN_WEIGHTS)
    if large:
        notes.append(
            f"In {' and '.join(large)}, the weights alone are more than there is: the engine refuses to load them."
            f" {_WAYS_OUT[report['device']]}"
        )
    needs = {one.dtype: (one.weight_bytes or 0) + one.pool_bytes for one in found if one.dtype not in large}
    crowded = [dtype for dtype, num_bytes in needs.items() if num_bytes > report["memory_bytes"]]
    if crowded:
        notes.append(f"In {' and '.join(crowded)}, weights and pool are more than there is. Lower memory_share.")
    return notes

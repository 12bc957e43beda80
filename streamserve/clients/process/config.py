"""`LaunchConfig`: everything an engine process needs to start, as one value that both sides can compare.

No I/O. The site makes it from its settings; a spawned engine gets it as JSON.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from streamserve import __version__
from streamserve.engine.config import EngineConfig, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """The settings common to all engine processes of a site.

    `runtime_dir` holds sockets and locks ("": a folder of ours among the temporary files). An engine that a worker has
    started ends `idle_seconds` after its last client. A draining engine finishes its answers for `drain_seconds`.
    After `hang_seconds` without a heartbeat it is killed and replaced. After `max_failures` failures within
    `failure_seconds` the model counts as failed, and is tried again after as long.
    """

    runtime_dir: str = ""
    idle_seconds: float = 60.0
    drain_seconds: float = 20.0
    hang_seconds: float = 10.0
    max_failures: int = 5
    failure_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("idle_seconds", "drain_seconds", "failure_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes 0 or more")
        if self.hang_seconds <= 0:
            raise ValueError(f"hang_seconds is {self.hang_seconds}; it takes more than 0")
        if self.max_failures < 1:
            raise ValueError(f"max_failures is {self.max_failures}; it takes 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig(ProcessConfig):
    """One engine process: its model, its site, its folders.

    `site` names the site (its BASE_DIR), so that two sites of one user stay apart. `state_dir` holds the engine's
    output file. `autostart`: the first worker that needs the engine starts it; otherwise it is started by
    `manage.py streamserve_engine`. `made_at` is `time.monotonic()` when the settings were read (None: when the config
    is first used): where two configs differ, the more recent one's engine replaces the other's.
    """

    model: ModelConfig
    engine: EngineConfig = field(default_factory=EngineConfig)
    site: str = ""
    state_dir: str = ""
    autostart: bool = True
    echo_step_seconds: float = 0.0
    made_at: float | None = None


def config_to_json(config: LaunchConfig) -> bytes:
    """Return the config as an engine process reads it."""
    return _to_json(config)


def config_from_json(data: bytes) -> LaunchConfig:
    """Return the config that JSON stands for; raises ValueError."""
    return msgspec.json.decode(data, type=LaunchConfig)


def dated(config: LaunchConfig) -> LaunchConfig:
    """Return the config with `made_at` filled in."""
    return config if config.made_at is not None else replace(config, made_at=time.monotonic())


def config_hash(config: LaunchConfig) -> str:
    """Return what two workers must agree on to share an engine: model, engine config, our version."""
    config = config_from_json(config_to_json(config))  # 12 seconds are 12.0 seconds
    return hashlib.sha256(_to_json((__version__, config.model, config.engine, config.echo_step_seconds))).hexdigest()


def _to_json(value: object) -> bytes:
    return msgspec.json.encode(value, order="deterministic", enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Return a mapping as a dict, the only one that msgspec encodes (CLASSES is a read-only mapping)."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"no JSON for {type(value).__name__}")

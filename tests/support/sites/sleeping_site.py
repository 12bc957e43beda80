"""Settings: the site of two_workers_site.py with three models, and memory for any two of them."""

from __future__ import annotations

from project.settings import HELPDESK
from streamserve.engine.capacity import ECHO_BYTES
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.model.load.size import sized
from tests.support.sites.workers.two_workers_site import *  # noqa: F403
from tests.support.sites.workers.two_workers_site import STREAMSERVE as TWO_WORKERS

_DESK = {"PATH": str(HELPDESK), "DTYPE": "float32", "NUM_THREADS": 1, "PARITY_PROBE": False}
_ENGINE = {"NUM_BLOCKS": 257, "BLOCK_SIZE": 16}
_SIZE, _ = sized(
    ModelConfig(alias="desk", path=str(HELPDESK), dtype="float32"),
    EngineConfig(num_blocks=257, block_size=16),
    HELPDESK,
    1 << 40,
)
BUDGET = _SIZE + ECHO_BYTES + ECHO_BYTES // 2
MODELS = ("desk", "left", "right")
STREAMSERVE = {
    **TWO_WORKERS,
    "MODELS": {
        "desk": {**_DESK, "ENGINE": _ENGINE},
        "left": {"PATH": "echo", "ANSWERS": None},
        "right": {"PATH": "echo", "ANSWERS": None},
    },
    "ENGINE_AUTOSTART": True,
    "ENGINE_PROCESS": {"MEMORY_BYTES": BUDGET, "MAX_FAILURES": 10**9},
}

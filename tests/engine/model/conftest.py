"""Tiny models, loaded once for the folder; one torch thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")
pytest.importorskip("transformers", reason="needs transformers: pip install streamserve[engine]")

from tests.support.models.tiny_models import save_model  # noqa: E402  (after the skips)


@pytest.fixture(scope="package", autouse=True)
def _quiet_and_small() -> None:
    """Turn off threads and progress bars: tiny tensors gain nothing from them."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function: model type -> folder with a tiny model, made once."""

    @cache
    def make(model_type: str) -> Path:
        return save_model(tmp_path_factory.mktemp(model_type), model_type)

    return make

"""Models that one process loads at the same time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")

from tests.proofs.scale import scaled
from tests.support.models.tagged import CHATML, tagged_tokenizer
from tests.support.models.tiny_models import save_model

# A fresh interpreter: transformers imports its modules when they are used for the first time.
LOADS = """
import asyncio, sys
from streamserve.clients.factory import hf_client
from streamserve.engine.config import EngineConfig, ModelConfig

async def main():
    clients = [
        hf_client(ModelConfig(alias=str(at), path=path, dtype=dtype, device="cpu"), EngineConfig(num_blocks=16))
        for at, (path, dtype) in enumerate(zip(sys.argv[1::2], sys.argv[2::2]))
    ]
    for client in clients:
        client.start()
    while any(client.describe().state == "loading" for client in clients):
        await asyncio.sleep(0.02)
    import torch
    for client in clients:
        print(client.describe().state, client.describe().dtype, client.describe().message)
    print(torch.get_default_dtype())
    for client in clients:
        await client.aclose()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of different kinds whose heads are their embeddings, with tokenizers."""
    made = []
    for model_type in ("llama", "qwen2"):
        folder = save_model(tmp_path_factory.mktemp(model_type), model_type, vocab_size=258, tie_word_embeddings=True)
        tagged_tokenizer(folder, template=CHATML)
        made.append(folder)
    return made


@pytest.mark.parametrize("num_runs", [1, pytest.param(scaled(40, least=3), marks=pytest.mark.proof)])
def test_two_models_load_at_once(folders: list[Path], num_runs: int) -> None:
    """Both are ready, each with its dtype, and the process has the default dtype that it had."""
    llama, qwen2 = map(str, folders)
    for _ in range(num_runs):
        command = [sys.executable, "-c", LOADS, llama, "float32", qwen2, "bfloat16"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.stdout.splitlines() == ["ready float32 ", "ready bfloat16 ", "torch.float32"], done.stderr[-3000:]

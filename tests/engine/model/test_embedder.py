"""Embedding models: the vectors are sentence-transformers' and transformers' own, whatever else is in a pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from streamserve.engine.config import EmbedderConfig  # noqa: E402
from streamserve.engine.model.embedder import TorchEmbedder, load_embedder  # noqa: E402
from streamserve.engine.model.load.source import ModelLoadError, UnsupportedModel  # noqa: E402
from streamserve.engine.plan import no_progress  # noqa: E402
from streamserve.protocol.embeddings import numbers_of  # noqa: E402
from streamserve.protocol.spelling import Spell  # noqa: E402
from tests.support.models.embedding_models import MAX_LEN, WIDTH, write_bert, write_decoder  # noqa: E402

TEXTS = ["the cat sat on the mat", "a big red dog", "what is a train and who is in the house of the small blue garden"]


def loaded(folder: Path, **options: Any) -> TorchEmbedder:
    return load_embedder(EmbedderConfig(alias="search", path=str(folder), device="cpu", **options), no_progress)


def embedded(model: TorchEmbedder, texts: Sequence[str], dimensions: int | None = None) -> Any:
    """Return the vectors (N, C)."""
    vectors = model.embed(model.encode(texts), [dimensions] * len(texts))
    return torch.tensor([numbers_of(vector) for vector in vectors if vector is not None])


@pytest.mark.parametrize(
    "options",
    [
        {"pooling": "mean"},
        {"pooling": "cls", "normalize": False},
        {"pooling": "max", "prompt": "where is the "},
    ],
    ids=["mean", "cls, not normalised", "max, with a prompt"],
)
def test_an_encoder_gives_sentence_transformers_vectors(tmp_path: Path, options: dict[str, Any]) -> None:
    """Pooling, normalising and the default prompt are the folder's."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    write_bert(tmp_path, **options)
    expected = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu").encode(
        TEXTS, convert_to_tensor=True
    )
    torch.testing.assert_close(embedded(loaded(tmp_path), TEXTS), expected, atol=1e-5, rtol=1e-4)


def test_a_decoder_gives_the_last_hidden_state_of_its_last_token(tmp_path: Path) -> None:
    """As transformers computes it, of length 1."""
    from transformers import AutoModel, AutoTokenizer

    write_decoder(tmp_path)
    tokenizer, body = AutoTokenizer.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)
    with torch.inference_mode():
        last = [body(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1] for text in TEXTS]
    expected = torch.nn.functional.normalize(torch.stack(last), dim=1)
    torch.testing.assert_close(embedded(loaded(tmp_path), TEXTS), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("write", [write_bert, write_decoder])
def test_a_vector_does_not_depend_on_what_else_is_in_its_pass(tmp_path: Path, write: Any) -> None:
    """In one pass with longer and shorter inputs it is what it is alone, up to rounding."""
    if write is write_bert:
        pytest.importorskip("sentence_transformers")
    model = loaded(write(tmp_path))
    alone = torch.cat([embedded(model, [text]) for text in TEXTS])
    torch.testing.assert_close(embedded(model, TEXTS), alone, atol=1e-5, rtol=1e-4)


def test_an_encoder_without_modules_gives_the_mean(tmp_path: Path) -> None:
    """It needs no sentence-transformers."""
    write_bert(tmp_path)
    (tmp_path / "modules.json").unlink()
    model = loaded(tmp_path)
    lengths = embedded(model, TEXTS).norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones(3))
    assert model.dimensions == WIDTH


def test_fewer_dimensions_are_the_first_of_length_1(tmp_path: Path) -> None:
    """A cut vector has length 1 again, and only a model that was trained so is cut."""
    write_decoder(tmp_path)
    model = loaded(tmp_path)
    whole, cut = embedded(model, TEXTS), embedded(model, TEXTS, 8)
    torch.testing.assert_close(cut, torch.nn.functional.normalize(whole[:, :8], dim=1))
    assert not model.allows_fewer
    assert loaded(tmp_path, matryoshka=True).allows_fewer
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [8, 16]}))
    assert loaded(tmp_path).allows_fewer
    assert not loaded(tmp_path, matryoshka=False).allows_fewer


def test_the_longest_input_is_the_models_or_the_sites(tmp_path: Path) -> None:
    """MAX_MODEL_LEN lowers it."""
    write_decoder(tmp_path)
    assert loaded(tmp_path).max_model_len == MAX_LEN
    assert loaded(tmp_path, max_model_len=16).max_model_len == 16


def test_a_vector_that_is_not_finite_is_none(tmp_path: Path) -> None:
    """The other inputs of its pass have theirs."""
    write_decoder(tmp_path)
    model = loaded(tmp_path)
    with torch.no_grad():
        model._model.body.embed_tokens.weight[5] = float("inf")  # "the"
    first, second = model.embed(model.encode(TEXTS[:2]), [None, None])
    assert first is None
    assert second is not None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"type": "custom.Transformer"}, "custom.Transformer"),
        ({"type": "sentence_transformers.models.CLIPModel"}, "CLIPModel"),
    ],
)
def test_modules_that_are_not_known_are_refused(tmp_path: Path, change: dict[str, str], what: str) -> None:
    """A folder runs no code of its own."""
    write_bert(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0] |= change
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModel, match=what):
        loaded(tmp_path)


def test_weights_in_other_formats_are_refused(tmp_path: Path) -> None:
    """Pickles are never read."""
    write_decoder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError):
        loaded(tmp_path)


def test_its_tokenizer_spells(tmp_path: Path) -> None:
    """Ids of a bare text, and the text of ids, with the names of special tokens."""
    model = loaded(write_decoder(tmp_path))
    (ids,) = model.encode(["the cat"])
    assert model.spell(Spell(text="the cat")).token_ids == tuple(ids[:-1])
    assert model.spell(Spell(token_ids=tuple(ids))).texts == ("the cat [SEP]",)
    assert model.spell(Spell(token_ids=tuple(ids), is_apart=True)).texts == ("the", "cat", "[SEP]")

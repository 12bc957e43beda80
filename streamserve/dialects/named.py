"""What a dialect shows of a stream and of a model, both of which live in layers above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from streamserve.protocol.events import Approval, Citation, Status
from streamserve.protocol.requests import GenerateRequest


class NamedStream(Protocol):
    """What names an answer, of a `Stream`."""

    id: str
    log_id: str
    created: int

    @property
    def model(self) -> str:
        """The model's or pipeline's name."""

    @property
    def request(self) -> GenerateRequest: ...

    @property
    def has_token_ids(self) -> bool:
        """Whether its tokens have ids."""

    @property
    def outline(self) -> Sequence[Citation | Status | Approval]:
        """The citations and steps of a run so far, and what it asks its user."""


class DescribedModel(Protocol):
    """What a list of models shows, of a `ModelDescription`."""

    @property
    def alias(self) -> str: ...
    @property
    def created(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def parent(self) -> str:
        """Of an adapter, the model that it changes."""

    @property
    def dimensions(self) -> int:
        """Of an embedding model's vectors."""

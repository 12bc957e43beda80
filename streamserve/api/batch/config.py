"""`BatchConfig`: where files are kept, how long, and how many rows run at once. conf.py makes it; knows no Django."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """`storage` is an alias of Django's STORAGES; "" is a private folder in STATE_DIR.

    `concurrency`: rows of one batch that run at once. `keep_days`: files, and batches after their end; 0: for ever.
    """

    storage: str = ""
    concurrency: int = 8
    keep_days: float = 30.0

    def __post_init__(self) -> None:
        if not self.concurrency:
            raise ValueError("concurrency is 0; it takes how many rows run at once")

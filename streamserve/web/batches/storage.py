"""The Django storage of files: an alias of STORAGES, or a private folder in STATE_DIR. Blocking; any thread."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from django.core.files.storage import FileSystemStorage, Storage, storages

from streamserve.conf import SiteConfig

_FOLDER = "files"


def storage_for(settings: SiteConfig) -> Storage:
    """Return the storage that BATCHES["STORAGE"] names; "" is the folder of STATE_DIR, which no web server serves."""
    if settings.batches.storage:
        return storages[settings.batches.storage]
    return _private(str(Path(settings.state_dir) / _FOLDER))


@lru_cache(maxsize=8)
def _private(folder: str) -> Storage:
    return FileSystemStorage(location=folder, file_permissions_mode=0o600, directory_permissions_mode=0o700)

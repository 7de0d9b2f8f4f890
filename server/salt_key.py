"""The secret under which cache salts are hashed, kept beside the fetched models.

Namespaces are written to storage; with the key, equal salts give equal ones across restarts, and without it nobody can
try salts against a cache directory.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

KEY_BYTES: Final = 32
FILE_NAME: Final = "salt-key"


def salt_key(cache: Path) -> bytes:
    """Read the key, or make one at first use. Raises OSError where the folder can't be used."""
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / FILE_NAME
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        key = path.read_bytes()
        if len(key) == KEY_BYTES:
            return key
        # Whoever made it died before it was written: nothing can have been stored under it.
        path.unlink()
        return salt_key(cache)
    with os.fdopen(descriptor, "wb") as file:
        key = secrets.token_bytes(KEY_BYTES)
        file.write(key)
    return key

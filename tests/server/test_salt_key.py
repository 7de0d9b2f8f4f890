"""The secret of the salts: made once, private, and the same for every later server."""

from __future__ import annotations

from pathlib import Path

from headrace.server.salt_key import KEY_BYTES, salt_key


def test_a_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    first = salt_key(tmp_path / "cache")
    assert len(first) == KEY_BYTES and salt_key(tmp_path / "cache") == first
    assert (tmp_path / "cache" / "salt-key").stat().st_mode & 0o777 == 0o600


def test_two_caches_have_two_keys(tmp_path: Path) -> None:
    assert salt_key(tmp_path / "a") != salt_key(tmp_path / "b")


def test_a_key_whose_maker_died_before_writing_it_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "salt-key").write_bytes(b"")
    assert len(salt_key(tmp_path)) == KEY_BYTES

"""The build backend: setuptools', with two things seen to that pyproject.toml has no words for.

A wheel is made from a fresh `build/lib`: setuptools copies into that folder and packs all of it, so that a module
deleted or renamed since the last build would come back in the next wheel. And the source archive takes its list of
extra files from beside this module, since the top level holds nothing but the packages.
"""

import shutil
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.egg_info import manifest_maker

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Config = dict[str, str | list[str] | None] | None


def build_wheel(wheel_directory: str, config_settings: Config = None, metadata_directory: str | None = None) -> str:
    """PEP 517, over no leftovers."""
    leftovers = Path("build/lib")
    if leftovers.exists():
        shutil.rmtree(leftovers)
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    return name


def build_sdist(sdist_directory: str, config_settings: Config = None) -> str:
    """PEP 517: with the tests, the scripts and this backend, without which the archive could not be built."""
    manifest_maker.template = "scripts/sdist.in"
    name: str = build_meta.build_sdist(sdist_directory, config_settings)
    return name

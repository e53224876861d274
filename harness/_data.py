"""Folders shipped with the package: `patches`, `corpora`."""

from __future__ import annotations

from pathlib import Path

from harness.errors import StorageError


def data_folder(name: str) -> Path:
    """The packaged folder of that name: inside the package in a wheel, beside it in a checkout.

    Raises StorageError if there is neither: the installation is broken.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise StorageError(f"the folder {name!r} that ships with logitgate is not in {package}; install logitgate again")

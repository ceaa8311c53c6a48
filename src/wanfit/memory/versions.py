"""Versions of installed packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str:
    """Empty where the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

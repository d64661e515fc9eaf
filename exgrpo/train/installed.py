"""Which versions of packages are installed, for what a run leaves to be read later."""

from importlib.metadata import PackageNotFoundError, version


def installed(*packages: str) -> str:
    """The packages that are installed, each with its version, in one line."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)

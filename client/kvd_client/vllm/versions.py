"""Which releases of vLLM the connector works with; vLLM is not imported here."""

from kvd_client.errors import UnsupportedVllm

TESTED = ("0.32",)
_NAMES = ", ".join(f"vLLM {name}" for name in TESTED)


def release(version: str) -> str:
    """Return major and minor number, which decide about interfaces and the KV's bytes."""
    return ".".join(version.split(".")[:2])


def untested(version: str) -> str:
    """Return a warning where kvd's tests were not run with this release, else ""."""
    if release(version) in TESTED:
        return ""
    return (
        f"kvd's connector was not tested with vLLM {version}, only with {_NAMES};"
        " compare answers with and without it before you rely on it, or install a tested release"
    )


def unsupported(version: str, lacks: str) -> UnsupportedVllm:
    """Return the error for a release that the connector cannot work with.

    Args:
        version: of the installed vLLM.
        lacks: what the connector needs and does not find there.
    """
    return UnsupportedVllm(
        f"kvd's connector cannot work with vLLM {version}: {lacks}; it was tested with"
        f" {_NAMES}: install that, or leave --kv-transfer-config out"
    )

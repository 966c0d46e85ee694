"""The version, as the installed distribution states it."""

from importlib.metadata import version

VERSION = version("kvd-offload")

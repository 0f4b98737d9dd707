"""The version, as the package's metadata has it."""

from importlib import metadata

try:
    __version__ = metadata.version("hetcoll")
except metadata.PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

"""streamserve: stream language-model answers from a Django site, with an engine of its own."""

from streamserve import _moved as _moved

__version__ = "0.1.0"

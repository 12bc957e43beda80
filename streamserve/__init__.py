"""streamserve: stream language-model answers from a Django site, with an engine of its own."""

__version__ = "0.1.0"

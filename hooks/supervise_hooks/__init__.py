"""In-process half of `supervise`."""

__version__ = "0.1.0"

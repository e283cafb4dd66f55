"""The one place that says which version this is; the build reads it without importing kvtier."""

__version__ = "0.1.0"

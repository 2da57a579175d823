"""The commands of ``python -m brevact``."""

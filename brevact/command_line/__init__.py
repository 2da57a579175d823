"""What ``python -m brevact`` does."""

"""The sources' questions asked of this package, each answered by training runs in pairs: `python -m recipes.study`."""

"""Programs that train models with brevact, each run from a checkout: `python -m recipes.efficientnetv2`."""

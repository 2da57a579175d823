"""The one exception of the recipes: something the user can put right."""


class RecipeError(Exception):
    """Says what is wrong and what to do; a recipe prints it without a traceback and exits with status 2."""

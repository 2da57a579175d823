"""The one exception of the recipes: something the user can put right."""


class RecipeError(Exception):
    """An error and its fix; a recipe prints it without a traceback and exits with status 2."""

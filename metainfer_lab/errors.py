"""The one exception that means: the person asked for something that cannot be."""


class InputError(Exception):
    """A mistake in what the person gave; its message names the thing and says what would do."""

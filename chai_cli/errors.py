"""What a user can be told in one sentence."""


class ChaiError(Exception):
    """A mistake in the input, the options or the surroundings. The message says what is wrong and what to do."""

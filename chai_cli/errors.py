"""What a user can be told in one sentence."""


class ChaiError(Exception):
    """A mistake in the input, the options or the surroundings. The message says what is wrong and what to do."""


def first_line(error: BaseException) -> str:
    """What an exception of a library says, in one line."""
    said = str(error).strip().splitlines()
    return said[0][:300] if said else type(error).__name__

"""The reason why no call can be read from an answer."""


class UnreadableError(ValueError):
    """The text has no call that can be read."""

"""Import stand-in; see ``_standin``."""

from _standin import stand_in  # type: ignore[import-not-found]  # the folder itself is on the path

stand_in(__name__, globals())

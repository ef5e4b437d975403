"""What can go wrong in the fabric, as callers see it."""


class FabricError(RuntimeError):
    """An operation of the fabric failed; the text says what and, where something can be done, what to do."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code
        """errno of the failure (positive), or 0."""


class FabricUnavailableError(FabricError):
    """The C extension was not built, or this machine's libfabric lacks the provider."""


class OutOfBoundsError(FabricError, ValueError):
    """A transfer was refused before anything was posted: its description does not fit the two regions."""


FabricUnavailable = FabricUnavailableError

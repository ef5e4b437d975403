"""What the engine raises when a model, a batch or a page does not fit."""


class EngineError(Exception):
    """Base of the engine's own errors."""


class ModelError(EngineError):
    """A model folder cannot be served: the message names the folder and what is wrong with it."""


class UnknownArchitecture(ModelError):  # noqa: N818 - the name says it
    """The folder's architecture is not in the registry."""

    def __init__(self, architecture: str, known: list[str]) -> None:
        super().__init__(f"architecture {architecture!r} is not known; known are {', '.join(sorted(known))}")
        self.architecture = architecture
        self.known = sorted(known)


class BatchError(EngineError, ValueError):
    """A batch contradicts itself or the pool: lengths, pages, positions or token ids."""


class PageError(EngineError):
    """A page was asked of, or given back to, the allocator against the rules; always a caller's bug."""


class OutOfPagesError(PageError):
    """Fewer pages are free than were asked for."""

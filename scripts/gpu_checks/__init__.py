"""The steps of check_gpu: each module's `run` returns what it found, and raises Skip, or anything else if it failed."""

DEVICE = "cuda:0"


class Skip(Exception):  # noqa: N818 - no error
    """A step can't be made here; the text says why."""


def must(condition: object, what: str) -> None:
    """Fail the step unless `condition` holds."""
    if not condition:
        raise AssertionError(what)

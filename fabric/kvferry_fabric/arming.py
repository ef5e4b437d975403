"""Which slots there are, and what is said when one can't be armed."""

import errno

from kvferry_proto.immediate import MAX_GENERATIONS, MAX_SLOTS

from kvferry_fabric.errors import FabricError


def is_slot(slot: int, generation: int = 0) -> bool:
    """Whether an immediate can name it."""
    return 0 <= slot < MAX_SLOTS and 0 <= generation < MAX_GENERATIONS


def check_slot(slot: int, generation: int, pages: int) -> None:
    """Raise FabricError if there is no such slot or generation, or if `pages` is negative."""
    if not is_slot(slot, generation) or pages < 0:
        text = (
            f"slot {slot}, generation {generation} cannot be armed for {pages} pages: slots are below {MAX_SLOTS}, "
            f"generations below {MAX_GENERATIONS}, and none is negative"
        )
        raise FabricError(text, errno.EINVAL)


def armed_already(slot: int, generation: int) -> FabricError:
    """The error of a slot that has not been disarmed."""
    text = f"slot {slot} cannot be armed for generation {generation}: it is armed already, and must be disarmed first"
    return FabricError(text, errno.EBUSY)

"""State machines: an enum of states and one table of the moves between them."""

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

S = TypeVar("S", bound=enum.Enum)


class IllegalMoveError(RuntimeError):
    """A move that the table does not have: a bug, never a user's mistake."""


class StateMachine(Generic[S]):
    """Holds a state and moves it along a table. States without an entry, or with an empty one, are final."""

    def __init__(self, start: S, moves: Mapping[S, frozenset[S]]) -> None:
        self.state = start
        self._moves = moves

    @property
    def final(self) -> bool:
        """Whether no move leads on."""
        return not self._moves.get(self.state)

    def move(self, to: S) -> None:
        """Enter `to`. Raises IllegalMoveError if the table has no such move."""
        if to not in self._moves.get(self.state, frozenset()):
            msg = f"no move from {self.state.name} to {to.name}"
            raise IllegalMoveError(msg)
        self.state = to

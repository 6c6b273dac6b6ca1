"""Calls of a model that are running, in all threads."""

from threading import RLock, get_ident

from torch import nn

from headwise.models.recognise.frames import is_outermost, runs

turn = RLock()  # held while a forward begins or ends


class Calls:
    """The calls of some modules that are running, by thread."""

    def __init__(self) -> None:
        self._running: dict[int, list[nn.Module]] = {}  # the outermost first

    def begin(self, module: nn.Module) -> bool:
        """In a hook before a call: whether it is not within another one in this thread."""
        mine = self._running.setdefault(get_ident(), [])
        if mine and mine[0] is module and is_outermost(module):
            mine.clear()  # a KeyboardInterrupt ended it, such as that of a notebook, and ran no hooks
        mine.append(module)
        return len(mine) == 1

    def end(self, module: nn.Module) -> bool:
        """In a hook after a call: whether it was not within another one in this thread."""
        mine = self._running.get(get_ident())
        if not mine or mine[-1] is not module:
            return False
        mine.pop()
        if mine:
            return False
        del self._running[get_ident()]
        return True

    def elsewhere(self) -> dict[int, nn.Module]:
        """The other threads in which calls are running, and the outermost. Those that ended without hooks are
        forgotten."""
        others = [one for one in list(self._running) if one != get_ident()]
        for one in others:
            mine = self._running.get(one)
            if mine and not runs(one, mine[0]):
                self._running.pop(one, None)
        return {one: mine[0] for one in others if (mine := self._running.get(one))}

    def clear(self) -> None:
        """Forget all."""
        self._running.clear()

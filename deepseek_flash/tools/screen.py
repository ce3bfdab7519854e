"""rich's console, but a reader that leaves (``| head``) is no failure."""

from __future__ import annotations

from rich.console import Console


class Screen(Console):
    """Console that raises BrokenPipeError, which the command line ends quietly, where rich exits with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

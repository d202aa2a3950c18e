"""``offload``: training state kept in files or in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes import BAD_VALUE, REPEATED
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.nearest import listed
from ....grammar.syntax import Word
from ...program.binding import OFFLOADED
from ..directive import Directive, Scope, argument, check_known


@dataclass(frozen=True)
class Offload(Directive):
    """Keeps parts of the training state outside the memory that computes (ZeRO-Offload, ZeRO-Infinity).

    `optimizer`: the optimizer's state. The update works on it in that place, one block after the other. `parameters`:
    the stored parameters, and the bfloat16 or float16 copies that a step makes of them; they are loaded before they are
    gathered or read. `activations`: the values that forward saves for backward. Stores and loads are lines of the
    programs, and a load begins one block before the block that reads it.

    A directory, relative to the plan's folder, holds memory-mapped files, in a folder for each rank. Their space is
    reserved before the first step. While a run uses these files they have no names, and they end with the run. `cpu` is
    the memory of the host, for programs that compute on GPUs; on CPUs it changes nothing.
    """

    USAGE = "offload STATES to FILE | STATES to cpu"
    LAYOUT = True
    TRAINING = (("optimizer", "is the state of an update"), ("activations", "are kept for a backward"))
    ONCE = False

    states: tuple[Word, ...] = argument(lambda line: line.words("states"))
    folder: str = argument(lambda line: line.text("to"))
    host: bool = argument(lambda line: "to cpu" in line)

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        if not self.host and not self.folder.strip():
            label = Label(self.arguments.span("to"))
            yield Diagnostic(BAD_VALUE, "the folder has no name", label, help='write as `to "offloaded"`, or `to cpu`')
        for word in self.states:
            yield from check_known(word, OFFLOADED, f"`{word.text}` cannot be offloaded", f"name {listed(OFFLOADED)}")
        first: dict[str, Word] = {}
        for word in (word for line in scope.all(Offload) for word in line.states):
            if word.text in first and word in self.states:
                related = (Label(first[word.text].span, "given here first"),)
                message = f"`{word.text}` has a place already"
                yield Diagnostic(REPEATED, message, Label(word.span), related, help="remove one of them")
            first.setdefault(word.text, word)

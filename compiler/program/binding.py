"""Bindings: the names of values outside their program, as ``parameter blocks.0.w`` or ``loss``, and the table of their
kinds.

A binding's text stands behind a parameter of a program, and as a key of what a program returns. It is read and written
here alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, cast

Kind = Literal[
    "parameter", "frozen", "buffer", "constant", "input", "rng", "key", "weight", "saved", "received", "sent", "count",
    "term", "load", "output", "scale", "unscale", "loss", "gradient", "grad_norm", "metric", "state", "value",
    "deferred",
]  # fmt: skip
Home = Literal["parameters", "buffers", "state", "batch", "stage", "neighbour", "step", "result", "program"]
"""The place of bound values while no program runs: a rank's ``parameters``, ``buffers`` or the ``state`` of its steps,
from one step to the next; the ``batch``, with each microbatch; a ``stage``, for a later action of the same microbatch;
the way to or from a ``neighbour``, per microbatch too; the ``step``, once or as a sum over microbatches; a step's
``result``; nowhere, for values that the ``program`` makes and reads itself."""


class KindRow(NamedTuple):
    """The facts about every binding of a kind: its home, and the form of its text."""

    home: Home
    text: Literal["kind name", "kind", "name", "kind [name]"] = "kind name"
    offloaded: str = ""
    """The word of an ``offload`` line that keeps such values away from memory while no program reads them."""


KINDS: Mapping[Kind, KindRow] = MappingProxyType(
    {
        "parameter": KindRow("parameters", offloaded="parameters"),
        "frozen": KindRow("parameters", offloaded="parameters"),  # a parameter that is not trained
        "buffer": KindRow("buffers"),
        "constant": KindRow("buffers"),
        "input": KindRow("batch"),
        "rng": KindRow("batch", "kind"),  # the numbers of the step and of the microbatch, which seed random streams
        "key": KindRow("program"),  # of a random stream
        # a parameter as a step computes with it: unsharded and cast from the stored one, once a step
        "weight": KindRow("step", offloaded="parameters"),
        "saved": KindRow("stage", offloaded="activations"),
        "deferred": KindRow("stage"),  # what the gradients of weights read of the backward before them
        "received": KindRow("neighbour"),
        "sent": KindRow("neighbour"),
        "count": KindRow("step", "kind [name]"),  # the number that divides a term of the loss
        "term": KindRow("step"),  # the number that multiplies a later term of the loss
        "load": KindRow("step"),  # the number of tokens of each expert of a layer
        "output": KindRow("result"),  # a tensor that the model returns
        "scale": KindRow("step", "kind"),
        "unscale": KindRow("step", "kind"),  # one over the loss scale
        "loss": KindRow("step", "kind"),
        "gradient": KindRow("step"),
        "grad_norm": KindRow("result", "kind"),
        "metric": KindRow("result"),  # a number that a run tells of each step
        "state": KindRow("state"),  # what steps, not the model, keep: such as the loss scale
        "value": KindRow("program", "name"),  # what a function gives to the one that calls it
    }
)
"""All kinds of bindings: a new kind is a row."""

PARAMETERS: tuple[Kind, ...] = tuple(kind for kind, row in KINDS.items() if row.home == "parameters")
BUFFERS: tuple[Kind, ...] = tuple(kind for kind, row in KINDS.items() if row.home == "buffers")
OFFLOADED = ("optimizer", *dict.fromkeys(row.offloaded for row in KINDS.values() if row.offloaded))
"""The words of ``offload`` lines. No program reads the state of the optimizer: the update works on it where it lies."""
STORED = PARAMETERS + BUFFERS
"""The kinds of the model's own tensors."""
OUTSIDE: tuple[Kind, ...] = (*STORED, *(kind for kind, row in KINDS.items() if row.home == "batch"))
"""The kinds that no program of a step makes."""


_OF_BACKWARD = ("B", "W")
"""The work that returns gradients of parameters."""


class Binding(NamedTuple):
    """The name by which a value is known outside its program: ``parameter blocks.0.w``, ``saved tanh``, ``loss``.

    >>> Binding.parse("parameter blocks.0.w")
    Binding(kind='parameter', name='blocks.0.w')
    >>> str(LOSS), LOSS.home
    ('loss', 'step')
    """

    kind: Kind
    name: str = ""

    @property
    def home(self) -> Home:
        """The place of the value while no program runs."""
        return KINDS[self.kind].home

    def __str__(self) -> str:
        text = KINDS[self.kind].text
        if text == "kind name" or (text == "kind [name]" and self.name):
            return f"{self.kind} {self.name}"
        return self.name if text == "name" else self.kind

    @property
    def words(self) -> str:
        """The binding in a sentence, as ``parameter `blocks.0.w` ``."""
        return f"{self.kind} `{self.name}`" if KINDS[self.kind].text == "kind name" else str(self)

    @classmethod
    def parse(cls, text: str) -> Binding:
        """The inverse of ``str``.

        Raises:
            ValueError: the text is of no kind.
        """
        word, _, name = text.partition(" ")
        binding = cls(cast(Kind, word), name)
        if word not in KINDS or str(binding) != text:
            raise ValueError(f"`{text}` is nothing that a value can be bound to")
        return binding

    def key_in(self, action: str) -> str:
        """Return the text under which an action's program returns it. Work returns gradients under their names
        alone."""
        return self.name if self.kind == "gradient" and action in _OF_BACKWARD else str(self)

    @classmethod
    def parse_key(cls, text: str, action: str) -> Binding:
        """The inverse of ``key_in``.

        Raises:
            ValueError: the text is of no kind.
        """
        plain = action in _OF_BACKWARD and not text.startswith(("sent ", "state "))
        return cls("gradient", text) if plain else cls.parse(text)


COUNT, SCALE, UNSCALE, LOSS, GRAD_NORM, RNG = (
    Binding("count"), Binding("scale"), Binding("unscale"), Binding("loss"), Binding("grad_norm"), Binding("rng"),
)  # fmt: skip

"""Windows of a text of tokens as samples: tokens and, where an input takes them, the token after each as targets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, final

import torch
from torch import Tensor

from .samples import DataError


class Text(Protocol):
    """A text of ``size`` tokens, and where its documents begin."""

    size: int

    def read(self, start: int, count: int) -> Tensor:
        """Return tokens, int64 [count]."""

    def begins(self, start: int, count: int) -> Tensor:
        """Return which of the tokens begin a document, bool [count]."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The marks of documents that are joined: ``ignore`` is the target that does not count, ``end`` the token that
    ends a document, where the text itself does not say where they begin."""

    ignore: int
    end: int | None = None


@dataclass(frozen=True, slots=True)
class WindowForm:
    """The form of a window: ``length`` tokens, under the names of the inputs for tokens and for targets; where no input
    takes targets, that is None. With ``packing`` the first token of a document is no target."""

    length: int
    tokens: str
    targets: str | None
    packing: Packing | None = None

    @property
    def reads(self) -> int:
        """The tokens of a text that a window reads: its own, and the one after it as the last target."""
        return self.length + (self.targets is not None)

    def sample(self, text: Tensor, begins: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Return the sample of as many tokens as it ``reads``. ``begins`` says which of all but the first begin a
        document."""
        if self.targets is None:
            return {self.tokens: text}
        tokens, targets = text[:-1], text[1:]
        if self.packing is not None:
            first = begins()
            if self.packing.end is not None:
                first = first | (tokens == self.packing.end)
            targets = targets.masked_fill(first, self.packing.ignore)
        return {self.tokens: tokens, self.targets: targets}

    def check(self, size: int, what: str) -> None:
        """Check that a text has a window.

        Raises:
            DataError: it is too short, or a window is empty.
        """
        if self.length < 1:
            raise DataError(f"a sample has at least one token, not {self.length}", "make samples longer")
        if size < self.reads:
            message = f"{what}: a sample of {self.length} tokens needs {self.reads}"
            raise DataError(message, "name more data, or make samples shorter")


@final
class Windows:
    """The windows of a text, one after the other; ``what`` says what the text is, for messages.

    Raises:
        DataError: the text is shorter than a window and the token after it.
    """

    def __init__(self, text: Text, form: WindowForm, what: str) -> None:
        form.check(text.size, what)
        self._text, self._form = text, form
        self.count = (text.size - form.reads) // form.length + 1

    def __call__(self, number: int) -> dict[str, Tensor]:
        """Return window ``number`` >= 0: tokens and, where an input takes them, targets, int64 [length]."""
        start = number * self._form.length
        text = self._text.read(start, self._form.reads)
        return self._form.sample(text, lambda: self._text.begins(start + 1, self._form.length))


@final
class JoinedDocuments:
    """Documents as one text; ``lengths`` are their numbers of tokens, and ``document`` returns the tokens of one."""

    def __init__(self, lengths: Sequence[int], document: Callable[[int], Tensor]) -> None:
        self._ends, self._document = list(accumulate(lengths)), document
        self.size = self._ends[-1] if self._ends else 0

    def _from(self, start: int) -> Iterator[Tensor]:
        """Yield documents, the first from token ``start`` on."""
        place = bisect_right(self._ends, start)
        yield self._document(place)[start - (self._ends[place - 1] if place else 0) :]
        for later in range(place + 1, len(self._ends)):
            yield self._document(later)

    def read(self, start: int, count: int) -> Tensor:
        """Return ``count`` tokens from token ``start`` on."""
        found: list[Tensor] = []
        for part in self._from(start):
            found.append(part[:count])
            count -= len(found[-1])
            if not count:
                break
        return torch.cat(found)

    def begins(self, start: int, count: int) -> Tensor:
        """Return which of ``count`` tokens from ``start`` on begin a document."""
        mask = torch.zeros(count, dtype=torch.bool)
        low, high = bisect_right(self._ends, start - 1), bisect_right(self._ends, start + count - 1)
        mask[torch.tensor(self._ends[low:high], dtype=torch.int64) - start] = True
        if start == 0:
            mask[0] = True
        return mask


def packed_documents(documents: Iterable[Tensor], form: WindowForm) -> Iterator[dict[str, Tensor]]:
    """Yield windows of documents as they come. What is left at the end is too short for one, and is dropped."""
    text, first = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
    for document in documents:
        begins = torch.zeros(len(document), dtype=torch.bool)
        begins[:1] = True
        text, first = torch.cat([text, document]), torch.cat([first, begins])
        while len(text) >= form.reads:
            window = first[1 : form.reads]
            yield form.sample(text[: form.reads], lambda window=window: window)  # type: ignore[misc]
            text, first = text[form.length :], first[form.length :]

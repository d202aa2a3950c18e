"""Datasets as sources of samples: map-style ones with ``dataset[i]`` and a length, and iterables."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from ...compiler.sizes.size_range import BATCH
from .samples import DataError, asked
from .token_files import JoinedDocuments, WindowForm, Windows, packed_documents

_FORM_HELP = (
    "give a dict of tensors, arrays or numbers by the names of inputs, or a tuple in the order of `input` lines"
)
Inputs = Sequence[Mapping[str, Any]]
"""The ``input`` lines, as a manifest has them."""
_END = object()


def sample_tensors(item: Any, inputs: Inputs, what: str) -> dict[str, Tensor]:
    """Return the tensors of a sample by the names of inputs. Arrays and numbers become tensors, numbers and lists of
    the input's type; entries of a dict that are no inputs are left out.

    Raises:
        DataError: it is not a sample of the inputs.
    """
    if isinstance(item, tuple | list) and len(item) == len(inputs):
        item = {line["name"]: value for line, value in zip(inputs, item, strict=True)}
    if not isinstance(item, Mapping):
        many = f" of {len(item)}, and the plan has {len(inputs)} inputs" if isinstance(item, tuple | list) else ""
        raise DataError(f"{what} is not a sample: it is {type(item).__name__}{many}", _FORM_HELP)
    tensors = {}
    for line in inputs:
        if line["name"] in item:
            value = item[line["name"]]
            try:
                tensors[line["name"]] = _tensor(value, getattr(torch, line["dtype"]))
            except (TypeError, ValueError, RuntimeError, OverflowError):
                kind = type(value).__name__
                raise DataError(f"{what} is not a sample: `{line['name']}` is {kind}", _FORM_HELP) from None
    if not tensors:
        names = ", ".join(f"`{name}`" for name in item) or "nothing"
        raise DataError(f"{what} holds {names}, and none is an input of the plan", "name entries as the inputs")
    return tensors


def _others(item: Any, inputs: Inputs) -> dict[str, Any]:
    """Return the entries of a sample that no input takes."""
    names = {line["name"] for line in inputs}
    return {name: value for name, value in item.items() if name not in names} if isinstance(item, Mapping) else {}


def _tensor(value: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    tensor = torch.tensor(value, dtype=dtype)
    if not dtype.is_floating_point and tensor.numel() and torch.tensor(value).is_floating_point():
        raise TypeError("fractions would be cut off")
    return tensor


def _code_of(dataset: Any, method: str) -> str:
    """Return where a dataset's own code is, "" if that is not Python."""
    code = getattr(getattr(type(dataset), method, None), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno} in {type(dataset).__name__}.{method}"


@final
class MapSource:
    """The entries of a map-style dataset, by their index.

    Raises:
        DataError: the dataset fails to say its length (chained).
    """

    def __init__(self, dataset: Any, inputs: Inputs, others: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._dataset, self._inputs, self._code = dataset, inputs, _code_of(dataset, "__getitem__")
        self.others: Mapping[str, Any] | None = others or None
        """The entries of the first sample that no input takes, once it was read."""
        self.count = asked(lambda: len(dataset), "the length of the dataset", "ask the dataset for it: `len(dataset)`")

    def entry(self, number: int) -> Any:
        """Return the dataset's entry at an index.

        Raises:
            DataError: it failed (chained).
        """
        help_ = f"ask the dataset for it: `dataset[{number}]`"
        return asked(lambda: self._dataset[number], f"entry {number} of the dataset", help_, self._code)

    def __call__(self, number: int) -> dict[str, Tensor]:
        """Return sample ``number``, from 0 to ``count - 1``.

        Raises:
            DataError: the dataset failed (chained), or its entry is no sample.
        """
        entry = self.entry(number)
        if self.others is None:
            self.others = _others(entry, self._inputs)
        return sample_tensors(entry, self._inputs, f"entry {number} of the dataset")


@final
class IterableSource:
    """Samples of an iterable, epoch after epoch, in its own order. Samples are numbered as they come: to go back, the
    iterable is started again, and samples are skipped.

    ``begin`` returns the iterator of an epoch, over samples or batches of them. An epoch has at least ``least``
    samples. ``code`` says where the iterable's own code is.
    """

    count: int | None = None

    def __init__(self, begin: Callable[[int], Iterator[Any]], inputs: Inputs, least: int, code: str = "") -> None:
        self._begin, self._inputs, self._least, self._code = begin, inputs, least, code
        self.others: Mapping[str, Any] | None = None
        """The entries of the first sample, or batch, that no input takes, once it was read."""
        self._restart()

    def _restart(self) -> None:
        self._epoch, self._number, self._in_epoch = -1, -1, self._least
        self._items: Iterator[Any] = iter(())
        self._waiting: deque[dict[str, Tensor]] = deque()
        self._sample: dict[str, Tensor] = {}

    def __call__(self, number: int) -> dict[str, Tensor]:
        """Return sample ``number`` >= 0.

        Raises:
            DataError: the iterable failed (chained), gave no sample, or fewer in an epoch than a step takes.
        """
        if number < self._number:
            self._restart()
        while self._number < number:
            self._sample = self._next()
            self._number += 1
        return self._sample

    def _next(self) -> dict[str, Tensor]:
        while not self._waiting:
            what = f"sample {self._number + 1} of the iterable"
            help_ = "iterate over it without parc, up to this sample"
            item = asked(lambda: next(self._items, _END), what, help_, self._code)
            if item is _END:
                self._end_epoch()
                continue
            if self.others is None:
                self.others = _others(item, self._inputs)
            self._waiting.extend(self._samples(sample_tensors(item, self._inputs, what)))
        self._in_epoch += 1
        return self._waiting.popleft()

    def _end_epoch(self) -> None:
        if self._in_epoch < self._least:
            have = f"{self._in_epoch} sample{'s' * (self._in_epoch != 1)}"
            message = f"the iterable ends after {have}, and a step takes {self._least}"
            raise DataError(message, f"give {self._least} or more, or make B smaller")
        epoch = self._epoch + 1
        help_ = "iterate over it without parc: `iter(iterable)`, after `set_epoch` if it has that method"
        self._items = asked(lambda: self._begin(epoch), f"beginning epoch {epoch} of the iterable", help_)
        self._epoch, self._in_epoch = epoch, 0

    def _samples(self, item: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield the samples of a batch, which has a dim more than a sample, or the one sample that this is."""
        dims = {line["name"]: line["dims"] for line in self._inputs if line["dims"][:1] == [BATCH]}
        batched = {name for name in dims.keys() & item.keys() if item[name].dim() == len(dims[name])}
        if not batched or batched != dims.keys() & item.keys():
            yield item
            return
        for row in range(min(len(item[name]) for name in batched)):
            yield {name: value[row] if name in batched else value for name, value in item.items()}


def _epochs_of(iterable: Any, again: Callable[[], Any]) -> Callable[[int], Iterator[Any]]:
    """Return the function that begins an epoch of an iterable. One that can be iterated only once, such as a generator,
    is replaced by that of ``again``. ``set_epoch`` is called with the epoch's number first, where the iterable has
    it."""
    once = hasattr(iterable, "__next__")
    unused = [iterable]

    def begin(epoch: int) -> Iterator[Any]:
        items = (unused.pop() if unused else again()) if once else iterable
        if hasattr(items, "set_epoch"):
            items.set_epoch(epoch)
        return iter(items)

    return begin


def dataset_source(
    dataset: Any, again: Callable[[], Any], inputs: Inputs, least: int, form: WindowForm | None
) -> MapSource | IterableSource | Windows:
    """Return the samples of a dataset or an iterable; with ``form`` its entries are documents, which are packed.
    ``again`` returns the iterable anew, where it can be iterated only once. An epoch has at least ``least`` samples.

    Raises:
        DataError: it is neither, or a document has no tokens.
    """
    mapped = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if mapped and not isinstance(dataset, torch.utils.data.IterableDataset):
        source = MapSource(dataset, inputs)
        if form is None:
            return source

        def document(number: int) -> Tensor:
            return document_tokens(source.entry(number), form, f"entry {number}")

        return packed_windows([len(document(number)) for number in range(source.count)], document, form)
    if not hasattr(dataset, "__iter__"):
        message = f"it returns {type(dataset).__name__}, which is no dataset"
        raise DataError(message, "return an object with `__getitem__` and `__len__`, or with `__iter__`")
    begin = _epochs_of(dataset, again)
    if form is None:
        return IterableSource(begin, inputs, least, _code_of(dataset, "__iter__"))

    def windows(epoch: int) -> Iterator[Any]:
        return packed_documents((document_tokens(item, form, "a document") for item in begin(epoch)), form)

    return IterableSource(windows, inputs, least, _code_of(dataset, "__iter__"))


def packed_windows(lengths: Sequence[int], document: Callable[[int], Tensor], form: WindowForm) -> Windows:
    """Return the windows of documents of these lengths, joined."""
    text = JoinedDocuments(lengths, document)
    return Windows(text, form, f"{len(lengths)} documents hold {text.size} tokens")


def document_tokens(item: Any, form: WindowForm, what: str) -> Tensor:
    """Return the tokens of a document, int64 [count]: it is a row of numbers, or a dict with one under the input's
    name."""
    if isinstance(item, Mapping):
        if form.tokens not in item:
            names = ", ".join(f"`{name}`" for name in item) or "nothing"
            help_ = f"name the document's tokens as the input: `{form.tokens}`"
            raise DataError(f"{what} holds {names}, and no `{form.tokens}`", help_)
        item = item[form.tokens]
    tokens = asked(lambda: torch.as_tensor(item), f"reading {what} as numbers", "give a row of tokens")
    if tokens.dim() != 1 or tokens.is_floating_point():
        kind = f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
        raise DataError(f"{what} is {kind}, and a document is one row of whole numbers", "give a row of tokens")
    return tokens.to(torch.int64)

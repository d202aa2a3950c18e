"""Texts of tokens, and their windows as samples. A text is several files: bytes of any files, numpy's ``.npy``, bare
numbers as nanoGPT writes them, Megatron's ``.bin`` with its ``.idx``; or the documents of a dataset. Files of tokens
are mapped into memory, and only the tokens that are asked for are read."""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor

from ...grammar.bounded import check_regular
from .samples import DataError

_NPY = b"\x93NUMPY"
_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = dict(enumerate(("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"), 1))
_BOTH = "one of the two is of another data set, or cut off: write both again"
_HEADER = 16 << 10  # the most bytes of a header; numpy itself reads 10,000
_PROBED = 4096  # numbers at the start of a file, which tell a wrong type


@dataclass
class TokenFile:
    """A file of ``count`` numbers of a type, from byte ``offset`` on, whose bytes are in ``order`` as numpy writes it.
    ``starts`` are the numbers that begin documents, in order, where the file's format says so."""

    path: str
    dtype: str
    count: int
    offset: int = 0
    starts: np.ndarray[Any, Any] | None = None
    mapped: bool = True
    order: Literal["=", "<", ">", "|"] = "="

    @property
    def _type(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder(self.order)

    @cached_property
    def _numbers(self) -> np.ndarray[Any, Any]:
        return np.memmap(self.path, self._type, "r", self.offset, (self.count,))

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if name != "_numbers"
        }  # a pickle of the map would hold all of them

    def read(self, start: int, count: int) -> np.ndarray[Any, Any]:
        """Return ``count`` numbers from number ``start`` on.

        Raises:
            DataError: the file became shorter.
        """
        if self.mapped:
            return self._numbers[start : start + count]
        numbers = np.fromfile(self.path, self._type, count, offset=self.offset + start * self._type.itemsize)
        if len(numbers) != count:
            raise DataError(f"{self.path} became shorter while it was read", "start again when no process writes to it")
        return numbers

    def check(self) -> None:
        """Check that the file's first numbers look like tokens.

        Raises:
            DataError: there are none, negative ones, or every second is zero, as if they were of a type of twice the
                size.
        """
        if not self.count:
            raise DataError(f"{self.path} holds no tokens", "name a file that holds some", self.path)
        first = self.read(0, min(self.count, _PROBED))
        if len(odd := first[first.astype(np.int64) < 0]):  # as a text of several files is read
            message = f"{self.path} holds {int(odd[0])}: read as {self.dtype} its numbers are not tokens"
            raise DataError(message, "name the type that it was written with, as `dtype uint16`", self.path)
        wider = {"uint8": "uint16", "uint16": "uint32", "int16": "int32", "uint32": "int64", "int32": "int64"}
        if len(first) >= 64 and self.dtype in wider and first[::2].any() and not first[1::2].any():
            message = f"every second number of {self.path} is 0, read as {self.dtype}"
            raise DataError(
                message, f"was it written as {wider[self.dtype]}? Then `dtype {wider[self.dtype]}`", self.path
            )


def byte_file(path: str) -> TokenFile:
    """Return a file's bytes as tokens. It is opened for each read and not mapped: a text may be thousands of files."""
    return TokenFile(path, "uint8", os.path.getsize(path), mapped=False)


def token_file(path: str, dtype: str | None) -> TokenFile:
    """Return a file of tokens, of which only the start is read. ``dtype`` is the type that the plan states, if any.

    Raises:
        DataError: its type is not known, not that of the plan, or not one of tokens; or the file is cut off.
    """
    start, index = _start_of(path), Path(path).with_suffix(".idx")
    if start.startswith(_NPY):
        opened = _npy_file(path, start)
    elif index.is_file() and _start_of(str(index)).startswith(_MEGATRON):
        opened = _megatron_file(path, index)
    elif dtype is None:
        message = f"{path} does not say which type its tokens have"
        raise DataError(message, "add it to the plan's line, as `dtype uint16` for nanoGPT's files", path)
    else:
        opened = _bare_file(path, dtype)
    _check_whole(path, np.dtype(opened.dtype))
    if dtype is not None and opened.dtype != dtype:
        message = f"{path} says that it holds {opened.dtype}, not {dtype}"
        raise DataError(message, f"remove `dtype {dtype}`, or name another file", path)
    opened.check()
    return opened


def _start_of(path: str) -> bytes:
    try:
        with open(check_regular(Path(path)), "rb") as file:
            return file.read(_HEADER)
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}"
        raise DataError(message, "name a file of tokens", path) from None


def _npy_file(path: str, start: bytes) -> TokenFile:
    """Return a file of numpy's by its header, which is in the ``start`` of the file."""
    help_, header = "save an array of whole numbers with `numpy.save`", BytesIO(start)
    try:
        version = np.lib.format.read_magic(header)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, dtype = read(header)
    except Exception as error:  # numpy evaluates a literal of Python there, with any of Python's errors
        raise DataError(f"{path} cannot be read: {error}", help_, path) from None
    if len(shape) != 1:
        message = f"{path} holds an array of {len(shape)} dims, and a text is one row of tokens"
        raise DataError(message, "save it flat: `numpy.save(path, array.reshape(-1))`", path)
    _check_whole(path, dtype)
    size, held = os.path.getsize(path), header.tell() + shape[0] * dtype.itemsize
    if shape[0] < 0 or size < held:
        raise DataError(f"{path} has {size} bytes, and its header counts {shape[0]} numbers of {dtype}", help_, path)
    return TokenFile(path, dtype.name, shape[0], header.tell(), order=dtype.byteorder)


def _check_whole(path: str, dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "iu" or dtype.shape:
        message = f"{path} holds {dtype}, and tokens are whole numbers"
        raise DataError(message, "write the numbers of tokens, as uint16 or int32", path)


def _bare_file(path: str, dtype: str) -> TokenFile:
    size, each = os.path.getsize(path), np.dtype(dtype).itemsize
    if size % each:
        message = f"{path} has {size} bytes, which are no whole number of {dtype}"
        raise DataError(message, "name the type that it was written with, or write the file again", path)
    return TokenFile(path, dtype, size // each)


def _megatron_file(path: str, index: Path) -> TokenFile:
    """Return a file of Megatron's by its index: the type, the lengths and places of sequences, and those that begin
    documents."""
    head, whole = struct.Struct("<QBQQ"), os.path.getsize(index)
    place = len(_MEGATRON) + head.size
    start = _start_of(str(index))[len(_MEGATRON) : place]
    if len(start) < head.size:
        raise DataError(f"{index} is cut off", "write it again with Megatron's tools", path)
    version, code, sequences, documents = head.unpack(start)
    if version != 1 or code not in _MEGATRON_TYPES:
        message = f"{index} has version {version} and type {code}, which parc does not know"
        raise DataError(message, "write it with Megatron's tools for version 1", path)
    held = place + 12 * sequences + 8 * documents
    if whole not in (held, held + sequences):  # a byte for each says of which kind it is, where there are several
        message = f"{index} has {whole} bytes, and those that it counts take {held}: it is cut off, or of another form"
        raise DataError(message, "write it again with Megatron's tools", path)
    dtype, size = np.dtype(_MEGATRON_TYPES[code]), os.path.getsize(path)
    if sequences > size:
        raise DataError(f"{index} counts {sequences} sequences, and {path} has {size} bytes", _BOTH, path)
    arrays = np.memmap(index, np.uint8, "r", place)
    lengths = arrays[: 4 * sequences].view("<i4")
    places = arrays[4 * sequences : 12 * sequences].view("<i8")
    firsts = arrays[12 * sequences : held - place].view("<i8")
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if ends[-1] * dtype.itemsize != size:
        message = f"{path} has {size} bytes, and {index.name} counts {ends[-1]} tokens of {dtype}"
        raise DataError(message, _BOTH, path)
    if (lengths < 0).any() or (places != ends[:-1] * dtype.itemsize).any():
        raise DataError(f"the sequences of {index} do not lie one after the other in {path}", _BOTH, path)
    if (np.diff(firsts, prepend=0, append=sequences) < 0).any():
        raise DataError(f"the documents of {index} do not come one after the other", _BOTH, path)
    return TokenFile(path, dtype.name, int(ends[-1]), starts=ends[firsts[firsts < sequences]])


@final
class JoinedFiles:
    """Files as one text, in their order; ``size`` is the number of tokens. A file begins a document."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.files = files
        self._ends = list(accumulate(file.count for file in files))
        self.size = self._ends[-1]

    def read(self, start: int, count: int) -> Tensor:
        """Return ``count`` tokens from token ``start`` on, int64.

        Raises:
            DataError: a file became shorter.
        """
        parts = [file.read(at, wanted) for file, at, wanted in self._pieces(start, count)]
        return torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False))

    def begins(self, start: int, count: int) -> Tensor:
        """Return a mask of ``count`` tokens from ``start`` on, true for those that begin a document."""
        masks = []
        for file, at, wanted in self._pieces(start, count):
            mask = np.zeros(wanted, dtype=bool)
            if file.starts is not None:
                low, high = np.searchsorted(file.starts, [at, at + wanted])
                mask[file.starts[low:high] - at] = True
            if at == 0:
                mask[0] = True
            masks.append(mask)
        return torch.from_numpy(np.concatenate(masks))

    def _pieces(self, start: int, count: int) -> list[tuple[TokenFile, int, int]]:
        """Return the files that hold ``count`` tokens from ``start`` on, with the first token in each and their
        number."""
        pieces, place = [], bisect_right(self._ends, start)
        while count:
            at = start - (self._ends[place - 1] if place else 0)
            wanted = min(count, self._ends[place] - start)
            if wanted:
                pieces.append((self.files[place], at, wanted))
            start, count, place = start + wanted, count - wanted, place + 1
        return pieces


# ---- windows of a text as samples


@dataclass(frozen=True, slots=True)
class Packing:
    """The packing of documents: ``ignore`` is the target that the loss ignores; ``end`` the token that ends a document,
    where the text itself does not say where they begin."""

    ignore: int
    end: int | None = None


@dataclass(frozen=True, slots=True)
class WindowForm:
    """The form of a window: ``length`` tokens, and the names of the inputs for tokens and for targets, None if no input
    takes targets. With ``packing`` the first token of a document is no target."""

    length: int
    tokens: str
    targets: str | None
    packing: Packing | None = None

    @property
    def reads(self) -> int:
        """The tokens of a text that a window reads: its own, and the next one as the last target."""
        return self.length + (self.targets is not None)

    def sample(self, text: Tensor, begins: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Return the sample of a text of ``reads`` tokens. ``begins`` returns a mask of all but its first token, true
        for those that begin a document."""
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
        """Check that a text of ``size`` tokens has a window.

        Raises:
            DataError: it is too short, or a window has no token.
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

    def __init__(self, text: JoinedFiles | JoinedDocuments, form: WindowForm, what: str) -> None:
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
        parts: list[Tensor] = []
        for document in self._from(start):
            parts.append(document[:count])
            count -= len(parts[-1])
            if not count:
                break
        return torch.cat(parts)

    def begins(self, start: int, count: int) -> Tensor:
        """Return a mask of ``count`` tokens from ``start`` on, true for those that begin a document."""
        mask = torch.zeros(count, dtype=torch.bool)
        low, high = bisect_right(self._ends, start - 1), bisect_right(self._ends, start + count - 1)
        mask[torch.tensor(self._ends[low:high], dtype=torch.int64) - start] = True
        if start == 0:
            mask[0] = True
        return mask


def packed_documents(documents: Iterable[Tensor], form: WindowForm) -> Iterator[dict[str, Tensor]]:
    """Yield windows of documents as they come. The rest at the end is too short for one, and is dropped."""
    text, first = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
    for document in documents:
        begins = torch.zeros(len(document), dtype=torch.bool)
        begins[:1] = True
        text, first = torch.cat([text, document]), torch.cat([first, begins])
        while len(text) >= form.reads:
            window = first[1 : form.reads]
            yield form.sample(text[: form.reads], lambda window=window: window)  # type: ignore[misc]
            text, first = text[form.length :], first[form.length :]

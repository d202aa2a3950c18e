"""Rows that other programs have saved: a folder of Hugging Face's ``datasets``, or a file of JSON with an object a
line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
from torch import Tensor

from ...grammar.bounded import check_regular, parse_json, read_json
from ...grammar.nearest import path_meant
from ...grammar.syntax import size_text
from .datasets import Inputs, MapSource, document_tokens, packed_windows
from .samples import DataError
from .token_files import WindowForm, Windows

_MOST_LINE = 16 << 20
_JSON_HELP = "write an object a line: the tensors of a sample, as lists, by inputs"
_FOLDER_HELP = "name a folder that `dataset.save_to_disk` wrote, or a file of JSON with an object a line"


@final
class JsonRows:
    """The rows of a file of JSON with an object a line. The file is scanned once for the ends of lines; a row is read
    when it is asked for.

    Raises:
        DataError: it cannot be read, or has a line that is too long.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._starts = self._scan()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}", _JSON_HELP) from None

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a row.

        Raises:
            DataError: it is no object.
        """
        start, end = map(int, self._starts[number : number + 2])
        with open(self._path, "rb") as file:
            file.seek(start)
            text = file.read(min(end - start, 2 * _MOST_LINE))  # a line may begin in one block and end in the next
        try:
            row = parse_json(text.decode("utf-8"))
        except ValueError as error:
            raise DataError(f"row {number} of {self._path} cannot be read: {error}", _JSON_HELP) from None
        if not isinstance(row, dict):
            raise DataError(f"row {number} of {self._path} is no object", _JSON_HELP)
        return row

    def _scan(self) -> np.ndarray[Any, Any]:
        """Return the start of each row, and the end of the last. Empty lines are part of the row before them."""
        rows, begun, end = list[Any](), 0, 0
        with open(check_regular(self._path), "rb") as file:
            while part := file.read(_MOST_LINE):
                ends = np.flatnonzero(np.frombuffer(part, np.uint8) == ord("\n")) + end + 1
                lines = np.concatenate([[begun], ends])
                rows.append(lines[:-1][np.diff(lines) > len("\r\n")])
                begun, end = int(lines[-1]), end + len(part)
                if end - begun > _MOST_LINE:
                    raise DataError(f"a line of {self._path} is longer than {size_text(_MOST_LINE)}", _JSON_HELP)
        starts = np.concatenate([*rows, [begun] * (end - begun > 1), [end]]).astype(np.int64, copy=False)
        starts[:-1][:1] = 0
        return starts


def folder_source(folder: Path, inputs: Inputs, form: WindowForm | None) -> MapSource | Windows:
    """Return the samples of a folder that ``datasets`` has saved, or of a JSON file with an object a line; with
    ``form`` its rows are documents.

    Raises:
        DataError: there is no such folder, it cannot be read, it holds several datasets, or ``datasets`` is not
            installed.
    """
    if not folder.exists():
        meant = path_meant(folder, lambda path: path.is_dir() or path.suffix.startswith(".json"), _FOLDER_HELP)
        raise DataError(f"there is no folder or file {folder}", meant)
    rows: Any = _saved_dataset(folder) if folder.is_dir() else JsonRows(folder)
    names = rows.column_names if folder.is_dir() else [*rows[0]] if len(rows) else []
    wanted = [form.tokens] if form is not None else [line["name"] for line in inputs]
    columns = [name for name in wanted if name in names]
    if not columns:
        have = ", ".join(f"`{name}`" for name in names)
        message = f"{folder} has columns {have}, and none is an input" if have else f"{folder} has no rows"
        raise DataError(message, "name its columns as the inputs: `dataset.rename_column`")
    others = [name for name in names if name not in columns] if len(rows) and form is None else []
    first = {name: rows[0][name] for name in others} if others else {}
    if folder.is_dir():
        _check_arrays(folder, rows.select_columns(columns))
        rows = rows.with_format("numpy", columns=columns)
    entries = MapSource(rows, inputs, first)
    if form is None:
        return entries

    def document(number: int) -> Tensor:
        return document_tokens(entries.entry(number), form, f"row {number}")

    return packed_windows([len(document(number)) for number in range(entries.count)], document, form)


def _saved_dataset(folder: Path) -> Any:
    """Return the dataset in a folder that ``datasets`` has saved. Its files are in the folder itself.

    Raises:
        DataError: it cannot be read, holds several datasets, or ``datasets`` is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise DataError("`folder` needs the package `datasets`", "install it: `pip install datasets`") from None
    try:
        for place in folder.glob("*.*"):
            if place.suffix == ".json":
                read_json(place)
            elif place.suffix == ".arrow":
                check_regular(place)
        state = folder / "state.json"
        for file in read_json(state)["_data_files"] if state.exists() else []:
            if Path(file["filename"]).name != file["filename"]:
                raise ValueError(f"state.json names `{file['filename']}`, which is no file of the folder")
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:  # of the library, about anything in the folder's files
        why, _, _ = str(error.__cause__ or error).partition("\n")
        raise DataError(f"{folder} cannot be read as a dataset: {why}", _FOLDER_HELP) from None
    if isinstance(dataset, Mapping):
        names = " or ".join(f'"{folder.name}/{name}"' for name in dataset)
        raise DataError(f"{folder} holds {len(dataset)} datasets", f"name one: {names}")
    return dataset


def _check_arrays(folder: Path, dataset: Any) -> None:
    """Check the places of rows in a dataset's arrays: its files are mapped into memory, and a wrong place is read
    outside of them.

    Raises:
        DataError: one is wrong.
    """
    try:
        dataset.data.validate(full=True)
    except ValueError as error:
        raise DataError(f"{folder} cannot be read as a dataset: {error}", _FOLDER_HELP) from None

"""The making of a model: in the plan's folder, from which its paths count, and without asking the Hugging Face Hub."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from ...grammar.nearest import did_you_mean

_OFFLINE = "HF_HUB_OFFLINE"


@contextmanager
def at_home(folder: Path) -> Iterator[None]:
    """Enter a block in which the current folder is the plan's. The Hugging Face library uses only what it has
    downloaded, unless the environment says otherwise (``HF_HUB_OFFLINE=0``): a misspelt path is not looked for on the
    network."""
    said = _OFFLINE in os.environ or "TRANSFORMERS_OFFLINE" in os.environ
    with chdir(folder) if folder.is_dir() else chdir("."):
        if not said:
            os.environ[_OFFLINE] = "1"
            _set_offline(True)
        try:
            yield
        finally:
            if not said:
                del os.environ[_OFFLINE]
                _set_offline(False)


def _set_offline(value: bool) -> None:
    """Set the library's own flag: it reads the environment only once, at its import."""
    constants: Any = sys.modules.get("huggingface_hub.constants")
    if constants is not None:
        constants.HF_HUB_OFFLINE = value


def not_found(error: BaseException, arguments: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    """Return a sentence and advice where a model's code looked for files that are neither in the plan's folder nor
    downloaded; two empty texts for any other error."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    texts = [str(found) for found in chain]
    types = [type(found) for found in chain]  # a value that a configuration does not take has an error of the Hub's too
    asked = any(t.__module__.startswith("huggingface_hub") and not t.__name__.startswith("Strict") for t in types)
    if not asked and not any("huggingface.co" in text for text in texts):
        return "", ""
    strings = [value for value in arguments.values() if isinstance(value, str) and not (folder / value).exists()]
    if not strings:
        why = "its code asks the Hugging Face Hub for a file that is not on this machine"
        return why, f"download it beforehand, by `hf download NAME`, or set {_OFFLINE}=0"
    name = min(strings, key=lambda value: not any(value in text for text in texts))  # the one that is spoken of
    beside = [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    meant = did_you_mean(Path(name).name, beside, "paths count from the plan's folder.")
    help_ = f"{meant} A model of the Hub is downloaded beforehand, by `hf download NAME`, or with {_OFFLINE}=0 set"
    return f"there is no folder `{name}` beside the plan, nor a model of that name among the Hub's downloads", help_

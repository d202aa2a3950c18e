"""Callables that plans name, ``"package.module:name"`` or ``"./file.py:name"``: looked up, imported and checked."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import chdir, contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from ...grammar.bounded import read_bounded, real_path
from ...grammar.nearest import did_you_mean, listed, nearest
from .python_code import OPEN, bound_names, parsed

MOST_PYTHON = 4 << 20
"""The most bytes of a file of Python code. Its syntax tree takes forty times as much memory."""


class CallableError(Exception):
    """The error of a callable that cannot be found, or cannot be called so; a failure inside the user's module is
    chained.

    ``help`` is a way out, where one is known; ``argument`` the name that the callable does not take.
    """

    def __init__(self, message: str, help: str = "", argument: str = "") -> None:
        super().__init__(message)
        self.help, self.argument = help, argument


class Ended(Exception):
    """The error of model code that ended the process, or raised what only a person's Ctrl-C should."""


@contextmanager
def ending_said() -> Iterator[None]:
    """Enter code that is not parc's, which may end the process.

    Raises:
        Ended: it calls ``sys.exit``, or raises ``KeyboardInterrupt`` though nobody pressed Ctrl-C.
    """
    pressed = []

    def press(number: int, frame: Any) -> None:
        pressed.append(number)
        signal.default_int_handler(number, frame)

    handler = signal.getsignal(signal.SIGINT)
    ignored = handler is signal.SIG_IGN  # as for a shell's background jobs, which nobody can press it for
    ours = threading.current_thread() is threading.main_thread() and handler is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, press)
    try:
        yield
    except SystemExit as error:
        raise Ended(f"it ends the process: SystemExit({error.code!r})").with_traceback(error.__traceback__) from error
    except KeyboardInterrupt as error:
        if pressed or not (ours or ignored):
            raise
        raise Ended("it raises KeyboardInterrupt").with_traceback(error.__traceback__) from error
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def load_callable(target: str, folder: Path) -> Callable[..., Any]:
    """The callable of a name, with ``folder`` importable.

    Raises:
        CallableError: no such file, module or name; or the module fails while it is imported (chained).
    """
    place, _, name = target.rpartition(":")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = _load_file(existing(folder, place)) if place.endswith(".py") else _import(place, folder)
    value = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise _missing(target, part, dir(value))
        value = getattr(value, part)
    if not callable(value):
        raise CallableError(f"`{target}` is not callable")
    return value  # type: ignore[no-any-return]


def look_up(target: str, folder: Path) -> None:
    """Check a ``./file.py:name`` against the file's text. Nothing is imported: names that only an import can show are
    accepted.

    Raises:
        CallableError: there is no such file, or it has no such name.
    """
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        return
    path, first = existing(folder, place), name.partition(".")[0]
    text = read_python(path)
    if (tree := parsed(text)) is not None and not OPEN.search(text):
        names = set(bound_names(tree))
        if first not in names:
            raise _missing(target, first, names)


def read_python(path: Path) -> bytes:
    """Return the text of a file of Python code.

    Raises:
        CallableError: it cannot be read, or is too long for code.
    """
    try:
        return read_bounded(path, MOST_PYTHON)
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"`{path.name}` cannot be read: {reason[:1].lower()}{reason[1:]}"
        raise CallableError(message, "name a file of Python code") from None


def source_place(target: str, folder: Path) -> Path | None:
    """Return the file of a callable, or the folder of the package that it is in, so far as that is known without an
    import; None for what has no file."""
    place = target.rpartition(":")[0]
    if place.endswith(".py"):
        return real_path(folder / place)
    try:
        spec = importlib.util.find_spec(place.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    file = real_path(Path(spec.origin))
    return file.parent if spec.submodule_search_locations else file


def _missing(target: str, part: str, names: Iterable[str]) -> CallableError:
    place, _, name = target.rpartition(":")
    meant = did_you_mean(part, (known for known in names if not known.startswith("_")))
    return CallableError(f"`{place}` has no `{name}`", meant)


_GIVE = (
    "give each as `name=value`; if it has to be something else than a number, a string, `true`, `false` or `none`, such"
    " as a configuration, write a function that makes it and returns the model"
)


def check_arguments(function: Callable[..., Any], target: str, named: Iterable[str], positional: int = 0) -> None:
    """Check that a callable's signature, if it has one, takes so many arguments and these names.

    Raises:
        CallableError: it takes others.
    """
    try:  # what a decorator wraps may take other arguments than the wrapper
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return
    kinds = {parameter.kind for parameter in parameters}
    in_order = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional > len(in_order) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        count = f"{len(in_order)} argument{'s' * (len(in_order) != 1)}"
        raise CallableError(f"`{target}` takes {count} by position, and is given {positional}")
    free = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            and p.name not in in_order[:positional]]  # fmt: skip
    named = list(named)
    for name in named:
        if name not in free and inspect.Parameter.VAR_KEYWORD not in kinds:
            takes = f"it takes {listed(free)}" if free else "it takes none by name"
            raise CallableError(f"`{target}` takes no `{name}`", did_you_mean(name, free, takes), name)
    filled = {*in_order[:positional], *named}
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in filled
               and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # fmt: skip
    if missing:
        raise CallableError(f"`{target}` needs {listed(missing)}", _GIVE)


def _import(place: str, folder: Path) -> Any:
    try:
        with ending_said():
            return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            help_ = _module_meant(error.name, folder) or to_install(error)
            raise CallableError(f"there is no module `{place}`", help_) from None
        raise CallableError(f"importing `{place}` failed", to_install(error)) from error
    except Exception as error:
        raise CallableError(f"importing `{place}` failed") from error


def to_install(error: BaseException) -> str:
    """Return advice to install the package whose absence is an error; "" for any other error."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return f"`pip install {name}` installs it, if its package has that name" if name and "." not in name else ""


def _module_meant(name: str, folder: Path) -> str:
    """Return the question "did you mean ...?" with modules of a similar name, "" if there are none: from the package,
    or else from the plan's folder, or else from all modules."""
    package, dot, last = name.rpartition(".")
    places = [getattr(sys.modules[package], "__path__", [])] if package in sys.modules else [[str(folder)], None]
    near = (nearest(last, (module.name for module in pkgutil.iter_modules(place))) for place in places)
    names = [f"{package}{dot}{other}" for other in next(filter(None, near), ())]
    return f"did you mean {listed(names, 'or')}?" if names else ""


def _load_file(path: Path) -> Any:
    """Load a file as a module of its own, once a process, so that its classes are the same everywhere."""
    read_python(path)  # a longer file, or a device, is not executed
    label = f"parc_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if label in sys.modules:
        return sys.modules[label]
    spec = importlib.util.spec_from_file_location(label, path, loader=SourceFileLoader(label, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module
    try:
        with ending_said():
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[label]
        raise CallableError(f"importing `{path.name}` failed", to_install(error)) from error
    return module


def existing(folder: Path, place: str) -> Path:
    """Return the absolute path of a file that is named from the plan's folder.

    Raises:
        CallableError: there is no such file.
    """
    path = real_path(folder / place)
    if not path.is_file():
        meant = did_you_mean(path.name, (other.name for other in path.parent.glob("*.py")))
        said = f"`{path}`" if Path(place).is_absolute() else f"`{path.name}` beside the plan"
        raise CallableError(f"there is no file {said}", meant)
    return path


# ---- the call of a model's constructor


_OFFLINE = "HF_HUB_OFFLINE"


@contextmanager
def at_home(folder: Path) -> Iterator[None]:
    """Enter a block in which the current folder is the plan's, and the Hugging Face library is offline unless the
    environment says otherwise (``HF_HUB_OFFLINE=0``): a misspelt path is not looked for on the network."""
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
    """Return a message and advice for a model's code that looks for files that are neither in the plan's folder nor
    downloaded; two empty texts for any other error."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    texts, types = [str(link) for link in chain], [type(link) for link in chain]
    # `Strict...` errors of the Hub's library are about values of a configuration
    asked = any(t.__module__.startswith("huggingface_hub") and not t.__name__.startswith("Strict") for t in types)
    if not asked and not any("huggingface.co" in text for text in texts):
        return "", ""
    strings = [value for value in arguments.values() if isinstance(value, str) and not (folder / value).exists()]
    if not strings:
        why = "its code asks the Hugging Face Hub for a file that is not on this machine"
        return why, f"download it beforehand, by `hf download NAME`, or set {_OFFLINE}=0"
    name = min(strings, key=lambda value: not any(value in text for text in texts))  # the one in the errors
    beside = [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    meant = did_you_mean(Path(name).name, beside, "paths count from the plan's folder.")
    help_ = f"{meant} A model of the Hub is downloaded beforehand, by `hf download NAME`, or with {_OFFLINE}=0 set"
    return f"there is no folder `{name}` beside the plan, nor a model of that name among the Hub's downloads", help_

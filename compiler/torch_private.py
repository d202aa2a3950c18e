"""The private entry points of torch that parc uses, in one place; tested on torch 2.11, 2.13 and 2.15.

Exporting and symbolic shapes are imported where they are asked for: a rank that runs programs needs neither, and they
take as long to import as all of torch.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, lru_cache
from traceback import FrameSummary, StackSummary
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.fx.proxy
import torch.utils.checkpoint
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import make_fx

if TYPE_CHECKING:
    import sympy
    from torch.export import ExportedProgram

CompiledGraph = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def direct(function: Any) -> Callable[..., Any]:
    """Return an operator's overload without the Python function that torch wraps it in, and any other function
    itself."""
    return function._op if isinstance(function, torch._ops.OpOverload) else function


def trace(
    function: Callable[..., Any],
    values: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    whole: bool = False,
) -> fx.Graph:
    """Return the ATen graph of a function on fake tensors, with its backward; with ``whole``, composite operators are
    not decomposed."""
    with mode, quiet(), without_code_and_layouts(), torch.backends.mkldnn.flags(enabled=False):
        return make_fx(function, decompositions, "real", True, pre_dispatch=whole)(*values).graph


def decomposed(exported: ExportedProgram) -> ExportedProgram:
    """Return ``exported.run_decompositions({})``, faster: torch would look up all composite operators once for each
    namespace, and register a dozen kernels for each of them, with types of annotations."""
    import torch._export.utils

    module: Any = torch._export.utils
    operators: Any = torch._ops.OperatorBase
    look, register_slowly = getattr(module, "_materialize_cpp_cia_ops", lambda: None), operators.py_impl

    def register(target: Any, key: Any) -> Any:
        if not isinstance(key, torch._C.DispatchKey) or key == torch._C.DispatchKey.Python or key in target.py_kernels:
            return register_slowly(target, key)

        def kept(kernel):  # type: ignore[no-untyped-def] # torch's own makes its annotations' types at each call
            target.py_kernels[key] = kernel
            target._dispatch_cache.clear()
            return kernel

        return kept

    look()
    try:
        module._materialize_cpp_cia_ops, operators.py_impl = lambda: None, register
        return exported.run_decompositions({})  # type: ignore[no-any-return]
    finally:
        module._materialize_cpp_cia_ops, operators.py_impl = look, register_slowly


def is_composite(target: Any) -> bool:
    """Return whether an operator has to be decomposed where torch sees its parts: called as one operator, it may return
    its operand or a view."""
    from torch._export.utils import _is_cia_op, _is_preservable_cia_op

    return isinstance(target, torch._ops.OpOverload) and _is_cia_op(target) and not _is_preservable_cia_op(target)


def onednn_linear() -> Callable[..., torch.Tensor] | None:
    """Return oneDNN's ``x @ weight.T + bias`` for matrices of any strides; None where torch has no oneDNN, or was told
    not to use it (``torch.backends.mkldnn.flags(enabled=False)``)."""
    usable = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if usable else None
    if linear is None:
        return None
    return lambda x, weight, bias=None: linear.default(x, weight, bias, "none", [], "")


def missing_compiler(device: torch.device) -> str:
    """Return the name of the compiler that Inductor needs for a device and does not find, "" if it is there."""
    with quiet():
        from torch._inductor import config
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler
        from torch.utils._triton import has_triton

    if device.type != "cpu":
        return "" if has_triton() else f"Triton, with support of `{device.type}`,"
    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        return f"a C++ compiler (`{config.cpp.cxx[1]}`)"
    return ""


def attention_choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> int:
    """Return the number of the ``SDPBackend`` that torch's own attention would take for these operands on a GPU."""
    return int(torch._fused_sdp_choice(q, k, v, None, 0.0, causal, enable_gqa=q.shape[1] != k.shape[1]))


def compiler_cache() -> str:
    """Return the folder where Inductor keeps its compiled code."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


class SymbolicSizes:
    """Fake tensors whose sizes are sympy expressions of whole numbers, each with its bounds: ``{name: (least, one,
    most)}``. If an operator asks for more than the bounds tell, the answer is that at ``one``."""

    def __init__(self, numbers: Mapping[str, tuple[int, int, int]]) -> None:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
        from torch.utils._sympy.value_ranges import ValueRanges

        self._env = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._env)
        self._mode.cache_enabled = False  # no other has these sizes
        self.symbols: dict[str, sympy.Symbol] = {}
        self._ones: dict[sympy.Symbol, int] = {}
        for name, (low, one, high) in numbers.items():
            symbol = self._env.create_unspecified_symbol(one, ConstantSource(name), DimDynamic.DYNAMIC)
            self._env.var_to_range[symbol] = ValueRanges(low, high)
            self.symbols[name], self._ones[symbol] = symbol, one

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Enter a block in which tensors are fake. Composite operators are decomposed in Python: torch's own code of
        some reads sizes as numbers, which would fix them."""
        from torch._dispatch.python import enable_python_dispatcher

        with enable_python_dispatcher(), self._mode:
            yield

    def size(self, expression: sympy.Expr) -> Any:
        """Return the symbolic number of an expression, as operators take it."""
        return self._env.create_symintnode(expression, hint=int(expression.subs(self._ones)))

    def expression(self, size: Any) -> sympy.Expr:
        """Return the expression of a symbolic number."""
        import sympy

        return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)

    def assumed(self) -> list[sympy.Basic]:
        """Return the guards: conditions beside the bounds that operators have assumed."""
        return [guard.expr for guard in self._env.guards]


def fake_mode() -> FakeTensorMode:
    """Return a mode whose tensors ``compile_graph`` takes. It has an environment of shapes, without which Inductor
    caches nothing."""
    return FakeTensorMode(shape_env=shape_environment(), static_shapes=True)


def shape_environment() -> Any:
    """Return an environment of symbolic shapes, without which a mode of fake tensors refuses some code."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv()


def compile_graph(function: Callable[..., Any], values: Sequence[torch.Tensor]) -> CompiledGraph | None:
    """Return Inductor's code for a function of tensors of one ``fake_mode()``; None where it has nothing to fuse, as
    with fewer than two operators that compute.

    The code takes a list, and lets go of each tensor in it after its last use.
    """
    with quiet():
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table

    mode: FakeTensorMode = values[0].fake_mode  # type: ignore[attr-defined]
    functional: Any = torch.func.functionalize(function)
    with torch.no_grad(), quiet(), config.patch({"cpp.threads": torch.get_num_threads()}):
        with mode:
            module = make_fx(functional, select_decomp_table(), _allow_non_fake_inputs=True)(*values)
        if sum(node.op == "call_function" and _computes(node.target) for node in module.graph.nodes) < 2:
            return None
        with torch._guards.tracing(torch._guards.TracingContext(mode)):
            return compile_fx_inner(module, list(values), is_inference=True)


def _computes(target: Any) -> bool:
    """Return whether a node of a graph computes, and is not a view."""
    return isinstance(target, torch._ops.OpOverload) and not any(item.alias_info for item in target._schema.returns)


def profiling() -> bool:
    """Return whether torch's profiler runs in this thread."""
    return bool(torch._C._autograd._profiler_enabled())


def without_dispatch() -> AbstractContextManager[None]:
    """Enter a block in which operators on tensors of parc's own classes run as on plain tensors, without the classes'
    ``__torch_dispatch__``."""
    disabled: AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return disabled


_TRACE = "torch.__trace"
"""torch's trace log, which goes to a file or nowhere. Its handler removes itself at the first message if nobody asked
for the log; until then torch would make the text of each graph for it."""


@lru_cache(maxsize=1)
def _loggers(known: int) -> tuple[logging.Logger, ...]:
    """Return torch's loggers, given how many are ``known``."""
    names = (name for name in logging.root.manager.loggerDict if name.startswith("torch.") and name != _TRACE)
    return tuple(map(logging.getLogger, ("torch", *names)))


@contextmanager
def quiet(exporting: bool = False) -> Iterator[None]:
    """Enter a block in which torch prints nothing of its own: no warnings, no log of a failure and, with ``exporting``,
    no half-made graph, which would stand before parc's message. The model's own prints still appear."""
    if exporting:
        import torch.export._trace  # noqa: F401
    silent = {logger: logger.disabled for logger in _loggers(len(logging.root.manager.loggerDict))}
    module = vars(sys.modules.get("torch.export._trace", SimpleNamespace()))
    try:
        module["print"] = lambda *_, **__: None  # found before the built-in one
        for logger in silent:
            logger.disabled = True  # a level would do as well, but each change of one empties all loggers' caches
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        module.pop("print", None)
        for logger, before in silent.items():
            logger.disabled = before


@contextmanager
def without_code_and_layouts() -> Iterator[None]:
    """Enter a block in which a graph module writes and compiles its Python code before its first call, if any, and not
    after each change; and a trace notes no layouts (``tensor_meta``) beside fake tensors, which have them too.
    ``torch.export`` changes a model's graph a dozen times, and walks it node by node."""
    write: Any = fx.GraphModule.recompile

    code: Any = cached_property(lambda module: write(module).src)
    code.__set_name__(fx.GraphModule, "_code")

    def forward(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        write(module)
        return type(module).forward(module, *args, **kwargs)

    def later(module: Any) -> None:
        if isinstance(module.graph._codegen, fx.graph._PyTreeCodeGen):
            info = module.graph._codegen.pytree_info
            module._in_spec, module._out_spec = info.in_spec, info.out_spec
        module.__dict__.pop("_code", None)
        type(module)._code, type(module).forward = code, forward

    noted = mock.patch.object(torch.fx.experimental.proxy_tensor, "_extract_tensor_metadata", lambda *_: None)
    with mock.patch.object(fx.GraphModule, "recompile", later), noted:
        yield


def with_unread_draws() -> AbstractContextManager[None]:
    """Enter a block in which torch keeps random draws that nobody reads: later draws depend on them."""
    from torch._inductor import config

    return config.patch(fallback_random=True)  # type: ignore[no-any-return]


@contextmanager
def one_frame(of_model: Callable[[str], bool]) -> Iterator[None]:
    """Enter a block in which a traced operator keeps only one frame of its stack: the innermost ``forward`` in a file
    ``of_model``. Torch would look up and keep those of all modules around it, for each operator."""

    class Frame:
        @classmethod
        def extract(cls) -> type[Frame]:
            return cls

        @staticmethod
        def summary() -> StackSummary:
            frames, frame = StackSummary(), sys._getframe(1)
            while (code := frame.f_code).co_name != "forward" or not of_model(code.co_filename):
                if frame.f_back is None:
                    return frames
                frame = frame.f_back
            frames.append(FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False, line=""))
            return frames

    module: Any = torch.fx.proxy
    kept = module.CapturedTraceback
    try:
        module.CapturedTraceback = Frame
        yield
    finally:
        module.CapturedTraceback = kept


@contextmanager
def loads_with_numbers() -> Iterator[None]:
    """Enter a block in which ``torch.load`` reads the numbers of tensors also in a mode of fake ones, whatever name it
    was imported by: into real storages, which an operator, ``set_``, then gives to tensors."""

    def with_numbers(read: Any) -> Any:
        def load(*args: Any, **options: Any) -> Any:
            no_mode: dict[str, Any] = dict.fromkeys(("active_fake_mode", "detect_fake_mode"), lambda *_: None)
            with mock.patch.multiple(torch._guards, **no_mode):
                return read(*args, **options)

        return load

    readers: dict[str, Any] = {
        name: with_numbers(getattr(torch.serialization, name)) for name in ("_load", "_legacy_load")
    }
    with mock.patch.multiple(torch.serialization, **readers):
        yield


@contextmanager
def without_checkpoints(refusal: Exception) -> Iterator[None]:
    """Enter a block in which ``torch.utils.checkpoint`` raises, whatever name it was imported by: a trace would lose
    it."""
    module: Any = torch.utils.checkpoint
    names = "CheckpointFunction", "_checkpoint_without_reentrant_generator"  # 2.15 calls `…_impl`, which begins so too
    kept = {name: value for name, value in vars(module).items() if name.startswith(names)}

    class Refusal:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise refusal

        apply = classmethod(lambda cls, *_, **__: cls())

    try:
        for name in kept:
            setattr(module, name, Refusal)
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


@contextmanager
def with_forwards_of_functions() -> Iterator[None]:
    """Enter a block in which a ``torch.no_grad()`` in the forward of an ``autograd.Function`` says nothing, as in
    plain torch, where that forward is without gradients anyway. A trace has its operators, and would detach them."""
    apply: Any = torch.autograd.Function.__dict__["apply"].__func__

    def traced(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with (
            mock.patch.object(torch.no_grad, "__enter__", lambda region: None),
            mock.patch.object(torch.no_grad, "__exit__", lambda region, *error: None),
        ):
            return apply(cls, *args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(traced)):
        yield


def without_validation() -> AbstractContextManager[Any]:
    """Enter a block in which ``torch.distributions`` do not check their values: a check depends on the values."""
    return mock.patch.object(Distribution, "_validate_args", False)

"""Recipes: every element has one value however it is asked for, torch's statistics, and nothing is allocated."""

import copy
import math
import pickle
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from parc.compiler.capture.attributes import attribute_tensors
from parc.compiler.capture.complex.form import real_form
from parc.compiler.initial.recipes import Recipe, RecipeError, initialize, record
from parc.compiler.ops.results import example
from tests.family_models import decoder, gpt2


class Zoo(nn.Module):
    """A module with many ways to make a parameter or a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(30, 40) * 0.02)
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(64, 32), std=0.02))
        self.narrow = nn.Parameter(nn.init.trunc_normal_(torch.empty(64, 32), std=1.0, a=0.5, b=1.0))
        self.by_hand = nn.Parameter(
            torch.empty(64, 32).uniform_(-0.9, 0.9).erfinv_().mul_(0.02).add_(0.1).clamp_(0.07, 1)
        )
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(32, 16)))
        self.kaiming = nn.Parameter(nn.init.kaiming_normal_(torch.empty(40, 50)))
        with torch.no_grad():
            self.kaiming.mul_(0.5)
            self.kaiming[3].zero_()
            self.kaiming[:, ::2].normal_(1.0, 0.1)
            self.kaiming.t()[5:7] = torch.rand(2, 40)
        self.pieces = nn.Parameter(torch.cat([torch.zeros(2, 3), torch.randn(2, 3)], 1))
        self.stacked = nn.Parameter(torch.stack([torch.rand(3), torch.full((3,), 7.0)], 1).t().contiguous())
        self.repeated = nn.Parameter(torch.randn(200).repeat(2, 4))
        self.triangle = nn.Parameter(torch.triu(torch.randn(9, 9), 1))
        self.coins = nn.Parameter(torch.empty(300).bernoulli_(0.3))
        self.waits = nn.Parameter(torch.empty(300).exponential_(2.0))
        self.digits = nn.Parameter(torch.randint(0, 10, (300,)), requires_grad=False)
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(20, 20), 0.5))
        self.transposed = nn.Parameter(torch.randn(8, 6).t())
        self.short = nn.Parameter(torch.empty(33, 7, dtype=torch.bfloat16).uniform_(-1, 1))
        self.curve = nn.Parameter(torch.sin(torch.randn(50, 60)) * torch.exp(torch.rand(50, 1)))
        self.register_buffer("ones", torch.ones(5))
        self.plain = torch.randn(4)


class Constants(nn.Module):
    """A module of values that torch's own run must give bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.array = nn.Parameter(torch.from_numpy(numpy.arange(6.0)))
        self.eye = nn.Parameter(torch.eye(4))
        self.eye_ = nn.Parameter(nn.init.eye_(torch.empty(4, 5)))
        self.dirac = nn.Parameter(nn.init.dirac_(torch.empty(4, 4, 3)))
        self.repeated = nn.Parameter(torch.arange(3.0).repeat(2, 2))
        self.register_buffer("doubled", torch.from_numpy(numpy.arange(6)).float() * 2)
        self.register_buffer("position_ids", torch.arange(10).expand(1, -1))
        self.register_buffer("mask", torch.tril(torch.ones(5, 5, dtype=torch.bool)))
        self.register_buffer("inv_freq", 1.0 / (10000.0 ** (torch.arange(0, 64, 2, dtype=torch.int64).float() / 64)))
        positions, rates = torch.arange(50.0).unsqueeze(1), torch.exp(torch.arange(0, 8, 2).float() * -0.3)
        waves = torch.zeros(50, 8)
        waves[:, 0::2] = torch.sin(positions * rates)
        waves[:, 1::2] = torch.cos(positions * rates)
        self.register_buffer("waves", waves)
        indexed = torch.zeros(10)
        indexed[torch.tensor([1, 2])] = 3.0
        self.register_buffer("indexed", indexed)
        turned = torch.arange(12.0).reshape(3, 1, 4)
        self.register_buffer("turned", turned.squeeze_(1).t_().mul_(2))
        self.register_buffer("chosen", torch.arange(6.0)[torch.arange(6) % 2 == 0])
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(70, 50),
    "embedding": lambda: nn.Embedding(90, 40, padding_idx=2),
    "norm": lambda: nn.LayerNorm(50),
    "conv": lambda: nn.Conv2d(8, 16, 3),
    "batch norm": lambda: nn.BatchNorm1d(9),
    "lstm": lambda: nn.LSTM(20, 30, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(32, 2),
    "copies": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32), 2),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(30, 40)),
    "bf16": lambda: nn.Linear(70, 50).to(torch.bfloat16),
}
ZOO = record(Zoo, seed=3)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by every name."""
    both = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in both}


@given(st.data())
def test_any_cut_of_a_recipe_is_the_same_bits(data: st.DataObject) -> None:
    recipe = ZOO.recipes[data.draw(st.sampled_from(sorted(ZOO.recipes)))]
    count = math.prod(recipe.shape)
    whole = recipe.whole()
    index = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=40)))
    assert same(recipe.elements(index), whole.reshape(-1)[index])
    starts = [data.draw(st.integers(0, size - 1)) for size in recipe.shape]
    sizes = [data.draw(st.integers(1, size - start)) for size, start in zip(recipe.shape, starts, strict=True)]
    block = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    assert same(recipe.elements(torch.arange(count).reshape(recipe.shape)[block]), whole[block])


def same(a: Tensor, b: Tensor) -> bool:
    """Check that two tensors are equal in dtype, shape and every bit."""
    return a.dtype == b.dtype and torch.equal(a, b)


def test_long_recipes_are_cut_without_a_trace() -> None:
    recipe = record(lambda: Holder(torch.exp(torch.randn(300, 1000)) * torch.rand(1000)), 0).recipes["w"]
    whole = recipe.whole()
    index = torch.arange(300_000).reshape(300, 1000)
    assert same(recipe.elements(index[7:297, 3:4]), whole[7:297, 3:4])
    assert same(recipe.elements(index[123:178]), whole[123:178])


class Holder(nn.Module):
    """A module of one parameter."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)


def test_constants_are_torch_s_bit_for_bit() -> None:
    expected = Constants()
    recorded = record(Constants, 0)
    for name, tensor in tensors(expected).items():
        assert same(recorded.recipes[name].whole(), tensor), name
    assert recorded.module.rates == expected.rates


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_torch_s_statistics(name: str) -> None:
    torch.manual_seed(0)
    expected = tensors(LAYERS[name]())
    for path, value in tensors(initialize(LAYERS[name], 1)).items():
        check_statistics(path, value, expected[path])


def test_zoo_has_torch_s_statistics() -> None:
    torch.manual_seed(0)
    plain = Zoo()
    attribute_tensors(plain)
    expected = tensors(plain)
    for name, value in tensors(initialize(Zoo, 1)).items():
        check_statistics(name, value, expected[name])


def check_statistics(name: str, value: Tensor, expected: Tensor) -> None:
    """Check for equal constants, or for samples that agree in mean, spread and range."""
    assert (value.shape, value.dtype, value.stride()) == (expected.shape, expected.dtype, expected.stride()), name
    ours, torchs = value.double(), expected.double()
    if value.numel() < 2 or float(torchs.std()) == 0.0:
        assert torch.equal(ours, torchs), name
        return
    if value.numel() < 100:
        return  # too few to say anything
    spread, count = float(torchs.std()), min(value.numel(), 2000)
    assert abs(float(ours.mean() - torchs.mean())) < 6 * spread / math.sqrt(count), name
    assert abs(float(ours.std()) / spread - 1) < 8 / math.sqrt(count), name
    reach = float(torchs.max() - torchs.min())
    assert abs(float(ours.max() - torchs.max())) < reach / 2 and abs(float(ours.min() - torchs.min())) < reach / 2, name


def test_what_is_elementwise_is_known() -> None:
    whole = {name for name, recipe in ZOO.recipes.items() if not recipe.elementwise}
    assert whole == {"orthogonal", "repeated", "sparse", "triangle"}


def test_uniform_numbers_stay_below_their_bound() -> None:
    half = record(lambda: Holder(torch.empty(1 << 16, dtype=torch.bfloat16).uniform_(0, 1)), 0).recipes["w"].whole()
    assert float(half.max()) < 1.0
    cut = record(lambda: Holder(nn.init.trunc_normal_(torch.empty(1 << 16), std=0.5, a=-1, b=1)), 0).recipes["w"]
    assert float(cut.whole().abs().max()) <= 1.0


class Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_share_one_recipe() -> None:
    recipes = record(Tied, 0).recipes
    assert recipes["head.weight"] is recipes["embed.weight"]
    assert recipes["head.weight"].name == "embed.weight"
    module = initialize(Tied, 0)
    assert module.get_parameter("head.weight") is module.get_parameter("embed.weight")


def test_parameters_are_independent_and_named_by_themselves() -> None:
    pair = record(lambda: nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)), 0).recipes
    a, b = pair["0.weight"].whole().flatten(), pair["1.weight"].whole().flatten()
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.05
    longer = record(lambda: nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100), nn.Linear(3, 4)), 0).recipes
    assert same(longer["1.weight"].whole(), pair["1.weight"].whole())
    assert not same(record(lambda: nn.Linear(100, 100), 1).recipes["weight"].whole(), a.reshape(100, 100))


def test_copied_layers_are_equal_as_torch_makes_them() -> None:
    recipes = record(LAYERS["copies"], 0).recipes
    assert same(recipes["layers.0.linear1.weight"].whole(), recipes["layers.1.linear1.weight"].whole())
    assert recipes["layers.0.linear1.weight"] is not recipes["layers.1.linear1.weight"]


def test_initialize_is_the_recipes_and_leaves_torch_s_random_state() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    module = initialize(Zoo, 3)
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in tensors(module).items():
        assert same(value.contiguous(), ZOO.recipes[name].whole()), name
    assert isinstance(module, Zoo)
    assert same(module.plain, ZOO.recipes["plain"].whole())


def test_a_large_model_is_recorded_without_allocating() -> None:
    def build() -> nn.Module:
        blocks = [nn.TransformerDecoderLayer(2048, 16, 8192, batch_first=True) for _ in range(12)]
        return nn.Sequential(nn.Embedding(100_000, 2048), *blocks)

    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    recorded = record(build, 0)
    assert sum(p.numel() for p in recorded.module.parameters()) > 1_000_000_000
    part = recorded.recipes["12.linear1.weight"].elements(torch.arange(4096 * 2048, 4112 * 2048))
    assert abs(float(part.std()) * math.sqrt(3 * 2048) - 1) < 0.05
    assert time.perf_counter() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


def test_the_fake_module_can_be_exported() -> None:
    recorded = record(lambda: nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)), 0)
    with recorded.mode:
        tokens = torch.zeros(4, 6, dtype=torch.int64)
    shapes = ({0: torch.export.Dim("b", min=2, max=64)},)
    program = torch.export.export(recorded.module, (tokens,), dynamic_shapes=shapes, strict=False)
    assert any("linear" in str(node.target) for node in program.graph.nodes)


def test_no_fake_tensor_outlives_a_recording() -> None:
    record(lambda: Holder(torch.empty(3, dtype=torch.float16).normal_()), 0)
    assert not isinstance(example(torch.float16, (1,)), FakeTensor)


def test_what_cannot_be_recorded_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"written as torch.float32 is read as torch.int32"):
        record(lambda: Holder(torch.randn(3).view(torch.int32) * 2.0), 0)


class Waves(nn.Module):
    """A module of complex tensors, made in the ways of real models."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Parameter(torch.randn(64, 300, dtype=torch.complex64) * 3)
        self.even = nn.Parameter(torch.rand(64, 300, dtype=torch.complex64))
        self.by_parts = nn.Parameter(torch.empty(300, 64, dtype=torch.complex64).t())
        nn.init.normal_(torch.view_as_real(self.by_parts.detach())[:, 7:], std=0.5)
        self.joined = nn.Parameter(torch.view_as_complex(torch.randn(5, 3, 2)) * 1j)
        self.register_buffer("turns", torch.polar(torch.ones(9, 4), torch.outer(torch.arange(9.0), torch.arange(4.0))))
        self.sizes = torch.view_as_real(self.get_buffer("turns"))[1:4, :, 0] * 2


def test_complex_tensors_are_recorded_as_pairs() -> None:
    recorded, module = record(Waves, 0), initialize(Waves, 0)
    for name, recipe in recorded.recipes.items():
        value = real_form(dict([*module.named_parameters(), *module.named_buffers()])[name].detach())
        assert recipe.shape == value.shape and same(recipe.whole(), value.contiguous()), name
        index = torch.randperm(value.numel())[:50]
        assert same(recipe.elements(index), value.reshape(-1)[index]), name
    for name, spread in (("drawn", 3 * math.sqrt(0.5)), ("even", math.sqrt(1 / 12))):
        parts = real_form(module.get_parameter(name).detach())
        assert parts.std((0, 1)).sub(spread).abs().max() < 0.02 * spread * 3
        assert abs(float(torch.corrcoef(parts.reshape(-1, 2).t())[0, 1])) < 0.03
    own = Waves()
    assert same(module.get_buffer("turns"), own.get_buffer("turns")) and same(module.get_buffer("sizes"), own.sizes)
    parts = torch.view_as_real(module.get_parameter("by_parts").detach())
    assert not parts[:, :7].any() and abs(float(parts[:, 7:].std()) - 0.5) < 0.02


def transformers_model(name: str) -> nn.Module:
    """Make a tiny model of the transformers package with random weights."""
    if name == "gpt2":
        return gpt2()
    llama = decoder("llama", tie_word_embeddings=name == "tied")
    return llama.to(torch.bfloat16) if name == "tied" else llama


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2"])
def test_transformers_models(name: str) -> None:
    def build() -> nn.Module:
        return transformers_model(name)

    expected = tensors(build())
    module = initialize(build, 0)
    recipes: dict[str, Recipe] = record(build, 0).recipes
    assert set(recipes) == set(expected)
    assert all(recipe.elementwise for recipe in recipes.values())
    for path, value in tensors(module).items():
        check_statistics(path, value, expected[path])
    if name != "llama":
        embed = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"
        assert recipes["lm_head.weight"] is recipes[embed]


def test_deep_copies_of_buffers_have_their_values_and_share_what_they_share() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("scale", torch.tensor(2.0))
            both = torch.arange(4.0)
            self.register_buffer("both", both)
            self.register_buffer("rest", both[2:])

    def build() -> nn.Module:
        first = Net()
        second = copy.deepcopy(first)
        second.get_buffer("both").add_(1)
        return nn.ModuleList([first, second])

    module, expected = initialize(build, 0), build()
    for name, value in expected.named_buffers():
        assert torch.equal(module.get_buffer(name), value), name
    assert module.get_buffer("1.rest").tolist() == [3, 4] and module.get_buffer("0.rest").tolist() == [2, 3]


class Loaded(nn.Module):
    """Layers whose weights are read from files."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)


def _load(module: Loaded, state: dict[str, Tensor]) -> None:
    module.load_state_dict(state)


def _assigned(module: Loaded) -> None:
    state = torch.load("w.pt", map_location="cpu", mmap=True)
    state["a.weight"][0].add_(torch.arange(4.0))
    module.load_state_dict(state, assign=True)
    state["a.bias"].copy_(torch.full((3,), 5.0))


def _by_parts(module: Loaded) -> None:
    with safe_open("w.safetensors", "pt") as file:
        module.a.weight.data.copy_(file.get_slice("a.weight")[:])
        module.a.bias = nn.Parameter(file.get_tensor("a.bias").to(torch.bfloat16))


def _of_bytes(module: Loaded) -> None:
    bytes_of = bytearray(torch.load("w.pt")["a.weight"].numpy().tobytes())
    module.a.weight.data = torch.frombuffer(bytes_of, dtype=torch.float32).view(3, 4)


def _outside(module: Loaded) -> None:
    OUTSIDE.copy_(torch.load("w.pt")["a.weight"])
    module.a.weight.data = OUTSIDE


OUTSIDE = torch.zeros(3, 4)
READ: dict[str, Callable[[Loaded], object]] = {
    "torch.load": lambda module: _load(module, torch.load("w.pt")),
    "an older file": lambda module: _load(module, torch.load("old.pt", weights_only=True)),
    "mapped into memory, then written": _assigned,
    "a module": lambda module: torch.load("module.pt", weights_only=False),
    "pickle": lambda module: _load(module, pickle.loads(Path("w.pkl").read_bytes())),
    "safetensors": lambda module: _load(module, load_file("w.safetensors")),
    "parts of safetensors": _by_parts,
    "numpy": lambda module: _load(module, {k: torch.from_numpy(v) for k, v in numpy.load("w.npz").items()}),
    "a buffer": _of_bytes,
    "a global tensor": _outside,
}


@pytest.mark.parametrize("name", READ)
def test_weights_that_the_building_code_reads_are_those_of_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = Loaded()
    state = saved.state_dict()
    torch.save(state, "w.pt")
    torch.save(state, "old.pt", _use_new_zipfile_serialization=False)
    torch.save(saved, "module.pt")
    Path("w.pkl").write_bytes(pickle.dumps(state))
    save_file(state, "w.safetensors")
    numpy.savez("w.npz", **{key: value.numpy() for key, value in state.items()})

    def build() -> nn.Module:
        module = Loaded()
        nn.init.constant_(module.a.bias, 7.0)
        nn.init.constant_(module.a.weight, 7.0)
        whole = READ[name](module)
        return whole if isinstance(whole, nn.Module) else module

    plain = tensors(build())
    OUTSIDE.zero_()
    recorded = record(build, 0)
    for path, value in plain.items():
        recipe = recorded.recipes[path]
        assert same(recipe.whole(), value.detach()), path
        assert same(recipe.elements(torch.arange(value.numel())[::2]), value.detach().flatten()[::2])
    torch.save({**state, "a.weight": state["a.weight"] + 1.0}, "w.pt")
    changed = name in ("torch.load", "mapped into memory, then written", "a buffer", "a global tensor")
    assert bool(recorded.files) == (name != "numpy") and (record(build, 0).files != recorded.files) == changed


def test_a_file_read_without_its_numbers_is_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "w.pt")
    with pytest.raises(RecipeError, match=r"has no numbers: give `torch\.load` `map_location"):
        record(lambda: Holder(torch.load(tmp_path / "w.pt", map_location="meta")), 0)


def test_deep_copies_stay_under_the_mode() -> None:
    recorded = record(lambda: copy.deepcopy(nn.Linear(3, 4)), 0)
    assert vars(recorded.module.get_parameter("weight"))["fake_mode"] is recorded.mode


def test_a_parameter_of_one_number_may_change_its_type() -> None:
    recipe = record(lambda: Holder(torch.tensor(1.5).mul_(2)).double(), 0).recipes["w"]
    assert same(recipe.whole(), torch.tensor(3.0, dtype=torch.float64))

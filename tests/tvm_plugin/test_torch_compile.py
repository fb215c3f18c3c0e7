"""`torch.compile(model, backend="eqtune")`: right in every call, whatever changes between calls."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from eqtune.frontends import OpenSize  # noqa: E402
from eqtune.torch_compile import any_size, captured, described  # noqa: E402
from eqtune.torch_compile.tuned import compared_s  # noqa: E402
from eqtune.tune.result import Limit  # noqa: E402


class Network(torch.nn.Module):
    """A convolution, a norm and a product: outputs are a tensor and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(16)
        for tensor in (self.norm.weight, self.norm.bias, self.norm.running_mean, self.norm.running_var):
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
        self.product = torch.nn.Linear(16, 10)

    def forward(self, image: Any) -> Any:
        features = torch.relu(self.norm(self.convolution(image)))
        return self.product(features.mean((2, 3))), features.transpose(1, 2) * 2


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def tunings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was tuned; PyTorch never is the faster one."""
    results: list[Any] = []
    tune_model = captured.tune_model

    def tune(*arguments: Any, **options: Any) -> Any:
        results.append(tune_model(*arguments, **options))
        return results[-1]

    monkeypatch.setattr(captured, "tune_model", tune)
    monkeypatch.setattr(described, "EAGER_IS_ENOUGH_S", 0.0)
    monkeypatch.setattr(captured, "compared_s", lambda *_: (1.0, 2.0))
    return results


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., Any]:
    def compile_with(model: Any, dynamic: bool | None = None, **options: Any) -> Any:
        given = {"trials": 1, "graph": "off", "progress": False, "threads": 1, "work_dir": tmp_path / "work", **options}
        return torch.compile(model, backend="eqtune", dynamic=dynamic, options=given)

    return compile_with


def assert_same(outputs: Any, expected: Any) -> None:
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5)


def test_a_model_is_tuned_once_and_computes_the_same(compiled: Any, tunings: list[Any]) -> None:
    model = Network().eval()
    fast = compiled(model, graph="saturate")
    with torch.inference_mode():
        for image in torch.randn(3, 1, 3, 12, 12):
            assert_same(fast(image), model(image))
    assert len(tunings) == 1


def test_inputs_may_lie_anywhere(compiled: Any, tunings: list[Any]) -> None:
    model = Network().eval()
    fast = compiled(model, dynamic=False)
    plain = torch.randn(1, 3, 12, 12)
    off = torch.empty(plain.numel() + 1)[1:].view(plain.shape).copy_(plain)
    mirrored = plain.to(memory_format=torch.channels_last)
    with torch.no_grad():
        for image in (plain, off, mirrored):
            assert_same(fast(image), model(image))


def test_weights_that_change_are_seen(compiled: Any, tunings: list[Any]) -> None:
    model = Network().eval()
    fast = compiled(model)
    image = torch.randn(1, 3, 12, 12)
    with torch.no_grad():
        fast(image)
        model.product.weight.mul_(2)
        assert_same(fast(image), model(image))
        model.load_state_dict(Network().state_dict())
        assert_same(fast(image), model(image))
        model.convolution.weight.data = torch.randn(16, 3, 3, 3)
        assert_same(fast(image), model(image))


def test_parameters_that_differ_from_call_to_call_become_inputs(compiled: Any, tunings: list[Any]) -> None:
    def product(weight: Any, x: Any) -> Any:
        return torch.relu(x @ weight) * 2

    fast, x = compiled(product), torch.randn(8, 8)
    with torch.no_grad():
        for _ in range(6):
            weight = torch.nn.Parameter(torch.randn(8, 8))
            assert_same((fast(weight, x),), (product(weight, x),))
    assert len(tunings) == 4  # once, with two other values, and as an input


def test_state_is_changed_as_pytorch_changes_it(compiled: Any, tunings: list[Any]) -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = torch.nn.Linear(8, 8)
            self.register_buffer("kept", torch.zeros(4, 8))

        def forward(self, x: Any, place: Any, total: Any) -> Any:
            self.kept.index_copy_(0, place, self.product(x))
            total += self.kept.sum(0)
            return self.kept @ x.T

    model, twin = Counter(), Counter()
    twin.load_state_dict(model.state_dict())
    fast, totals = compiled(model), (torch.zeros(8), torch.zeros(8))
    with torch.no_grad():
        for place in range(3):
            x = torch.randn(1, 8)
            ours = fast(x, torch.tensor([place]), totals[0])
            theirs = twin(x, torch.tensor([place]), totals[1])
            assert_same([ours, totals[0], model.kept], [theirs, totals[1], twin.kept])
    assert len(tunings) == 1


def test_norms_in_training_keep_statistics_as_pytorch_does(compiled: Any, tunings: list[Any]) -> None:
    model, twin = Network().train(), Network().train()
    twin.load_state_dict(model.state_dict())
    fast = compiled(model, graph="saturate")
    with torch.no_grad():
        for image in torch.randn(2, 2, 3, 12, 12):
            assert_same(fast(image), twin(image))
            assert_same(list(model.buffers()), list(twin.buffers()))
    assert tunings


def test_buffers_that_change_again_and_again_become_inputs(compiled: Any, tunings: list[Any]) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = torch.nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: Any) -> Any:
            return self.product(x) * self.scale

    model = Scaled()
    fast, x = compiled(model), torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(6):
            assert_same([fast(x)], [model(x)])
            model.scale.add_(1)
    assert [len(result.mod["main"].params) for result in tunings] == [1, 1, 1, 2]


def test_gradients_stay_with_pytorch(compiled: Any, tunings: list[Any]) -> None:
    model = Network().eval()
    with pytest.warns(UserWarning, match=r"needs gradients.*inference_mode"):
        output, _ = compiled(model)(torch.randn(1, 3, 12, 12))
    output.sum().backward()
    assert model.convolution.weight.grad is not None

    def with_gradients(x: Any) -> Any:
        with torch.enable_grad():
            return x @ model.product.weight

    with torch.no_grad(), pytest.warns(UserWarning, match="needs gradients"):
        assert compiled(with_gradients)(torch.randn(2, 10)).requires_grad
    assert not tunings


def test_tangents_stay_with_pytorch(compiled: Any, tunings: list[Any]) -> None:
    fast, x = compiled(torch.sin), torch.ones(4)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(4))
        tangent = torch.autograd.forward_ad.unpack_dual(fast(dual)).tangent
    assert_same([tangent], [x.cos()])


def test_what_asks_for_no_gradients_itself_is_tuned(compiled: Any, tunings: list[Any]) -> None:
    model = Network().eval()

    def without(image: Any) -> Any:
        with torch.no_grad():
            return model(image)

    image = torch.randn(1, 3, 12, 12)
    assert_same(compiled(without)(image), without(image))
    assert len(tunings) == 1


def test_a_second_size_compiles_for_all(compiled: Any, tunings: list[Any]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.Linear(40, 12)).eval()

    def both(x: Any) -> Any:
        y = model(x)
        return y, y.transpose(0, 1) * 2, None

    fast = compiled(both)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for size in (3, 5, 64, 100, 2):
            x = torch.randn(2, size, 24)
            *found, nothing = fast(x)
            assert nothing is None
            assert_same(found, both(x)[:2])
        model[2].weight.mul_(2)
        x = torch.randn(2, 7, 24)
        assert_same(fast(x)[:2], both(x)[:2])
    assert len(tunings) == 1, "the first size alone is tuned"


def test_each_size_is_tuned_where_none_is_dynamic(compiled: Any, tunings: list[Any]) -> None:
    model = Network().eval()
    fast = compiled(model, dynamic=False)
    with torch.no_grad():
        for size in (12, 16):
            image = torch.randn(1, 3, size, 12)
            assert_same(fast(image), model(image))
    assert len(tunings) == 2


def test_numbers_that_are_no_sizes_stay_with_pytorch(compiled: Any, tunings: list[Any]) -> None:
    def times(x: Any, number: int) -> Any:
        return torch.tanh(x @ x.T) * number

    x = torch.rand(8, 8)
    fast = compiled(times)
    with torch.no_grad():
        assert_same([fast(x, 2)], [times(x, 2)])
        with pytest.warns(UserWarning, match=r"numbers differ from call to call.*dynamic=False"):
            assert_same([fast(x, 3)], [times(x, 3)])


def test_floats_are_constants_until_they_change(compiled: Any, tunings: list[Any]) -> None:
    """Where all is dynamic, Dynamo passes what norms add to variances as an argument."""
    norm = torch.nn.LayerNorm(16).eval()

    def scaled(x: Any, factor: float) -> Any:
        return norm(x) * factor

    fast = compiled(scaled, dynamic=True)
    x = torch.rand(2, 16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for factor in (2.0, 2.0, 3.0, -0.5):
            assert_same([fast(x, factor)], [scaled(x, factor)])


def test_sizes_that_depend_on_each_other_are_compared_one_by_one(compiled: Any, tunings: list[Any]) -> None:
    """A larger image would not fit the product."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6 * 4, 5)).eval()
    fast = compiled(model, dynamic=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for shape in ((2, 6, 4), (3, 6, 4), (2, 3, 8)):
            x = torch.rand(shape)
            assert_same([fast(x)], [model(x)])


def test_a_model_of_few_sizes_is_compared_at_those(compiled: Any, tunings: list[Any]) -> None:
    """Twice the size is more than it has places for."""
    places = torch.nn.Embedding(10, 16)
    product = torch.nn.Linear(16, 16)

    def at_places(x: Any) -> Any:
        return torch.relu(product(x + places(torch.arange(x.shape[1]))))

    fast = compiled(at_places)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for size in (3, 6, 10):
            x = torch.randn(1, size, 16)
            assert_same([fast(x)], [at_places(x)])
    assert len(tunings) == 1


def test_sizes_of_another_graph_are_not_compared(compiled: Any, tunings: list[Any]) -> None:
    """Twice as many rows are cut, which Dynamo captures as another graph."""

    def first_rows(x: Any) -> Any:
        return torch.relu(x[:16]) * 2

    fast = compiled(first_rows, dynamic=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for size in (10, 3):
            x = torch.randn(size, 8)
            assert_same([fast(x)], [first_rows(x)])


def test_sizes_that_an_export_does_not_permit_stay_with_pytorch(
    compiled: Any, tunings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(any_size, "limits_of", lambda _: [Limit(0, 0, OpenSize("rows", least=2, most=8))])
    runs: list[int] = []
    run = any_size.AnySize.run_tensors

    def run_tensors(self: Any, x: Any) -> Any:
        runs.append(len(x))
        return run(self, x)

    monkeypatch.setattr(any_size.AnySize, "run_tensors", run_tensors)
    fast = compiled(torch.sin, dynamic=True)
    with torch.no_grad():
        for size in (3, 9, 8):
            x = torch.randn(size, 8)
            assert_same([fast(x)], [x.sin()])
    assert set(runs) == {3, 4, 6, 8}  # twice as many are compared, and nine not


def test_tensors_without_elements_beside_open_sizes_stay_with_pytorch(compiled: Any, tunings: list[Any]) -> None:
    fast, x = compiled(torch.relu, dynamic=True), torch.randn(2, 0, 24)
    with torch.no_grad(), pytest.warns(UserWarning, match="takes a tensor without elements"):
        assert_same([fast(x)], [x.relu()])


def test_what_fails_once_it_is_compiled_for_any_size_stays_with_pytorch(
    compiled: Any, tunings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a shape that TVM did not expect")

    monkeypatch.setattr(any_size.AnySize, "run_tensors", broken)
    fast, x = compiled(torch.relu, dynamic=True), torch.randn(3, 4)
    with torch.no_grad(), pytest.warns(UserWarning, match="compiled for any size, it fails: a shape"):
        assert_same([fast(x)], [x.relu()])


def test_what_cannot_be_tuned_stays_with_pytorch(compiled: Any, tunings: list[Any]) -> None:
    def inverse(x: Any) -> Any:
        return torch.linalg.inv(x @ x.T + torch.eye(8))

    def bits(x: Any) -> Any:
        return x.relu_().view(torch.int32)

    x = torch.rand(8, 8) + 0.5
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"stays with PyTorch: .*linalg_inv"):
            assert_same([compiled(inverse)(x)], [inverse(x)])
        with pytest.warns(UserWarning, match="returns a view"):
            assert compiled(bits)(x).data_ptr() == x.data_ptr()


def test_views_of_what_is_given_stay_views(compiled: Any, tunings: list[Any]) -> None:
    def changed_and_views(x: Any, y: Any) -> Any:
        x.mul_(2)
        return x, x[1:, ::2].T, (x @ y).relu(), y.view(-1)[3:]

    fast = compiled(changed_and_views)
    given, twins = (torch.randn(8, 8), torch.randn(8, 8)), None
    twins = tuple(tensor.clone() for tensor in given)
    with torch.inference_mode():
        for _ in range(2):
            outputs, expected = fast(*given), changed_and_views(*twins)
            assert_same(outputs, expected)
            assert_same(given, twins)
            assert [output.data_ptr() - given[0].data_ptr() for output in outputs[:2]] == [0, 32]
            assert outputs[3].data_ptr() == given[1].data_ptr() + 12
    assert len(tunings) == 1


def swapped(x: Any, y: Any) -> Any:
    before = x.clone()
    x.copy_(y)
    y.copy_(before)
    return before, x.sum()


def related(x: Any, y: Any) -> Any:
    z = x * 2
    return z[1], z, z.clone(), (x @ y).sum(1, keepdim=True).expand(4, 6)


@pytest.mark.parametrize("function", [swapped, related])
def test_results_own_their_memory_as_those_of_pytorch(function: Any, compiled: Any, tunings: list[Any]) -> None:
    fast = compiled(function)
    given = (torch.randn(4, 4), torch.randn(4, 4))
    twins = tuple(tensor.clone() for tensor in given)
    with torch.no_grad():
        for _ in range(2):
            outputs, expected = fast(*given), function(*twins)
            outputs[0].add_(1)
            expected[0].add_(1)
            assert_same(outputs, expected)
            assert_same(given, twins)
    assert len(tunings) == 1


def test_results_that_are_constant_cannot_be_overwritten(compiled: Any, tunings: list[Any]) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    fast, x = compiled(lambda x: (weight.exp(), x @ weight.exp())), torch.randn(4, 4)
    with torch.no_grad():
        expected = [output.clone() for output in fast(x)]
        fast(x)[0].zero_()
        assert_same(fast(x), expected)
    assert len(tunings) == 1


def test_arguments_that_overlap_are_changed_in_order(compiled: Any, tunings: list[Any]) -> None:
    def function(x: Any, y: Any) -> Any:
        x.mul_(2)
        return x + y

    fast, whole = compiled(function), torch.randn(8)
    twin = whole.clone()
    with torch.no_grad():
        fast(torch.randn(4), torch.randn(4))
        assert_same([fast(whole[:4], whole[2:6])], [function(twin[:4], twin[2:6])])
    assert_same([whole], [twin])
    assert len(tunings) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what PyTorch imports
def test_an_optimizer_takes_one_step(compiled: Any) -> None:
    model, twin = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    x = torch.randn(2, 4)
    for one in (model, twin):
        one(x).sum().backward()
    with pytest.warns(UserWarning, match="changes tensors that are not among its arguments"):
        compiled(optimizers[0].step)()
    optimizers[1].step()
    with torch.no_grad():
        assert_same(model.parameters(), twin.parameters())


def test_blocks_that_share_a_graph_keep_their_own_weights(compiled: Any, tunings: list[Any]) -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(5))
    fast, x = [compiled(layer) for layer in layers], torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(2):
            for layer, one in zip(layers, fast, strict=True):
                assert_same([one(x)], [layer(x)])
    assert [len(result.mod["main"].params) for result in tunings] == [1] * 5


def test_seeds_and_numbers_are_those_of_pytorch(compiled: Any, tunings: list[Any]) -> None:
    def noisy(x: Any) -> Any:
        return x + torch.randn(5)

    fast = compiled(noisy)
    with torch.no_grad():
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="random numbers"):
            found = [fast(torch.zeros(5))]
        found.append(fast(torch.zeros(5)))
        torch.manual_seed(0)
        assert_same(found, [noisy(torch.zeros(5)), noisy(torch.zeros(5))])


def test_what_breaks_while_it_is_tuned_stays_with_pytorch(
    compiled: Any, tunings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("an internal error\nof TVM")

    monkeypatch.setattr(captured, "tune_model", broken)
    with torch.no_grad(), pytest.warns(UserWarning, match="it cannot be tuned: an internal error"):
        assert compiled(lambda x: x * 2)(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_runs_the_graph_itself(compiled: Any, tunings: list[Any]) -> None:
    fast, x = compiled(torch.nn.Linear(4, 4)), torch.randn(1, 4)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads are running
        expected = fast(x)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.allclose(fast(x), expected, atol=1e-5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_pytorch_runs_faster_stays_with_pytorch(
    compiled: Any, tunings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "compared_s", lambda *_: (2e-3, 1e-3))
    model, image = Network().eval(), torch.randn(1, 3, 12, 12)
    fast = compiled(model)
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"tuned it takes 2 ms, with PyTorch 1 ms"):
            assert_same(fast(image), model(image))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same(fast(image), model(image))
    assert len(tunings) == 1


def test_weights_that_change_without_gradients_are_timed() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    nothing: Any = SimpleNamespace(compute=lambda _: None)

    def doubled(given: Any) -> Any:
        with torch.no_grad():
            return (given.mul_(2).sum(),)

    assert max(compared_s(nothing, doubled, [weight], [0])) < 1
    assert weight.tolist() == [1.0] * 4


def test_options_are_those_of_tune_model(compiled: Any) -> None:
    x = torch.randn(2, 3)
    with pytest.raises(Exception, match=r"no option 'budget'; its options are trials, time_budget_s"):
        compiled(torch.nn.Linear(3, 3), budget=3)(x)
    with pytest.raises(Exception, match="mode='max-autotune' belongs to PyTorch's own backend"):
        torch.compile(torch.nn.Linear(3, 3), backend="eqtune", mode="max-autotune")(x)


def test_torch_lists_the_backend() -> None:
    assert "eqtune" in torch._dynamo.list_backends()

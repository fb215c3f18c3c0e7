"""Buffers that a PyTorch model changes, and caches that it is given, are inputs and outputs."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils import _pytree as pytree  # noqa: E402

from eqtune.compile.untuned import untuned_executable  # noqa: E402
from eqtune.errors import InputError, UnsupportedModelError  # noqa: E402
from eqtune.frontends import load_model  # noqa: E402
from eqtune.machine import detect_target  # noqa: E402
from eqtune.runtime import ModelRunner  # noqa: E402

pytestmark = pytest.mark.unoptimised

F = torch.nn.functional
HEADS, PLACES, DEPTH = 2, 8, 4


def heads(x: Any) -> Any:
    return x.view(1, 1, HEADS, DEPTH).transpose(1, 2)


class Attention(torch.nn.Module):
    """The next word of a decoder that keeps keys and values itself."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * DEPTH
        self.query, self.key, self.value = (torch.nn.Linear(width, width) for _ in range(3))
        self.cache = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for module in self.cache:
            module.register_buffer("kept", torch.rand(1, HEADS, PLACES, DEPTH))
        self.register_buffer("scale", torch.full((width,), 2.0))

    def forward(self, x: Any, place: Any) -> Any:
        keys, values = (module.kept for module in self.cache)
        keys.index_copy_(2, place, heads(self.key(x)))
        values[:, :, place] = heads(self.value(x))
        seen = (torch.arange(PLACES) <= place)[None, None, None]
        result = F.scaled_dot_product_attention(heads(self.query(x)), keys, values, attn_mask=seen)
        return result.transpose(1, 2).reshape(x.shape) * self.scale


def run(imported: Any, *arrays: Any) -> Any:
    return ModelRunner(untuned_executable(imported.mod, detect_target(1)))(*arrays)


@pytest.mark.parametrize("exported", [False, True])
def test_changed_buffers_come_in_and_go_out(exported: bool) -> None:
    torch.manual_seed(0)
    module = Attention().eval()
    first, second = ((torch.randn(1, 1, HEADS * DEPTH), torch.tensor([place])) for place in (2, 3))
    before = [cache.kept.clone() for cache in module.cache]
    imported = load_model(torch.export.export(module, first)) if exported else load_model(module, example_inputs=first)
    assert [info.shape for info in imported.inputs] == [(1, 1, 8), (1,), *[(1, HEADS, PLACES, DEPTH)] * 2]
    assert [info.name for info in imported.inputs] == ["x", "place", "state_cache_0_kept", "state_cache_1_kept"]
    state = [kept.numpy().copy() for kept in before]
    for x, place in (first, second):  # what goes out comes in again
        arrays = (x.numpy(), place.numpy(), *state)
        result, *state = run(imported, *arrays)
        for actual, expected in zip((result, *state), imported.reference(*arrays), strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-6)
    for cache, kept in zip(module.cache, before, strict=True):
        assert torch.equal(cache.kept, kept)  # nothing of it changed the user's module
    with torch.no_grad():
        module(*first)
        expected = module(*second).numpy()
    np.testing.assert_allclose(result, expected, atol=1e-6)
    np.testing.assert_allclose(state[0], module.cache[0].kept.numpy(), atol=1e-6)


def test_inputs_that_a_model_changes_are_refused() -> None:
    class Changing(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.add_(1) * 2

    with pytest.raises(UnsupportedModelError, match="changes 'x' when it runs"):
        load_model(Changing(), example_inputs=(torch.zeros(3),))


def test_caches_of_hugging_face_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their library says how, where somebody exports."""

    class DynamicCache:
        def __init__(self, *tensors: Any) -> None:
            self.tensors = list(tensors)

    DynamicCache.__module__, DynamicCache.__qualname__ = "transformers.cache_utils", "DynamicCache"
    asked = []

    def register() -> None:
        if not asked:
            pytree.register_pytree_node(
                DynamicCache,
                lambda cache: (cache.tensors, None),
                lambda tensors, _: DynamicCache(*tensors),
                flatten_with_keys_fn=lambda cache: (
                    [(pytree.SequenceKey(i), tensor) for i, tensor in enumerate(cache.tensors)],
                    None,
                ),
            )
        asked.append(1)

    names = ("transformers", "transformers.integrations", "transformers.integrations.executorch")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[names[-1]], "register_dynamic_cache_export_support", register, raising=False)

    class Decoder(torch.nn.Module):
        def forward(self, x: Any, cache: Any) -> Any:
            cache.tensors[0] = torch.cat((cache.tensors[0], x))
            return cache.tensors[0].sum(0), cache

    cache = DynamicCache(torch.ones(2, 3))
    imported = load_model(Decoder(), example_inputs={"x": torch.ones(1, 3), "cache": cache})
    assert [info.shape for info in imported.inputs] == [(1, 3), (2, 3)]
    total, kept = run(imported, np.ones((1, 3), np.float32), np.full((2, 3), 2, np.float32))
    np.testing.assert_array_equal(total, [5, 5, 5])
    assert kept.shape == (3, 3)
    assert len(cache.tensors[0]) == 2  # the user's own is as it was


class Sub(torch.nn.Module):
    def __init__(self, name: str, value: float) -> None:
        super().__init__()
        self.register_buffer(name, torch.full((2, 3), value))


def test_names_that_look_alike_stay_apart() -> None:
    class Alike(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.a_b = Sub("b_c", 1.0), Sub("c", 10.0)

        def forward(self, x: Any, state: Any) -> Any:
            self.a.b_c.add_(x)
            self.a_b.c.mul_(2)
            return self.a.b_c * state + self.a_b.c

    imported = load_model(Alike(), example_inputs={"x": torch.ones(2, 3), "state": torch.ones(2, 3)})
    assert [info.name for info in imported.inputs[:2]] == ["x", "state"]
    one = np.ones((2, 3), np.float32)
    result, first, second = run(imported, one, 2 * one, 3 * one, 10 * one)
    np.testing.assert_array_equal(result, 28 * one)
    np.testing.assert_array_equal(first, 4 * one)
    np.testing.assert_array_equal(second, 20 * one)


def test_buffers_that_modules_share_are_one() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Sub("h", 1.0)
            self.b = self.a

        def forward(self, x: Any) -> Any:
            self.a.h.add_(x)
            return self.b.h * 2

    imported = load_model(Tied(), example_inputs=(torch.ones(2, 3),))
    assert len(imported.inputs) == 2
    result, kept = run(imported, np.ones((2, 3), np.float32), np.full((2, 3), 4, np.float32))
    np.testing.assert_array_equal(result, 2 * kept)
    assert (kept == 5).all()


def test_shapes_of_programs_with_state() -> None:
    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: Any) -> Any:
            self.total += x.sum(0)
            return x + self.total

    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Sum(), (torch.ones(4, 3),), dynamic_shapes=({0: batch},))
    imported = load_model(program, shapes={"x": (5, 3)})
    assert [info.shape for info in imported.inputs] == [(5, 3), (3,)]
    result, total = run(imported, np.ones((5, 3), np.float32), np.zeros(3, np.float32))
    np.testing.assert_array_equal(total, [5, 5, 5])
    np.testing.assert_array_equal(result, np.full((5, 3), 6))
    with pytest.raises(UnsupportedModelError, match="dimension"):
        load_model(program)


def test_caches_that_forget_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class DynamicCache:
        def __init__(self, seen: int) -> None:
            self.layers = [self]
            self.keys, self.seen = torch.zeros(1, 2, 4, 8), seen

        def get_seq_length(self) -> int:
            return self.seen

    DynamicCache.__module__, DynamicCache.__qualname__ = "transformers.cache_utils", "DynamicCache"
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with pytest.raises(InputError, match="a cache of 4 words of 7"):
        load_model(torch.nn.Identity(), example_inputs={"input": DynamicCache(7)})

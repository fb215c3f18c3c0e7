"""Mixtures of experts, as language models are exported."""

from __future__ import annotations

import numpy as np
import pytest

from eqtune.compile.untuned import untuned_executable
from eqtune.errors import InputError, UnsupportedModelError
from eqtune.frontends import load_model, verify_import
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.unoptimised

LIBRARY = torch.library.Library("transformers", "FRAGMENT")
"""The operator of this name, where the library is not installed that has it; it computes what that one's does."""

if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
    LIBRARY.define("grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor")

    @torch.library.impl(LIBRARY, "grouped_mm_fallback", "CPU")
    def grouped(x, weight, offs):
        result, begin = torch.zeros(x.shape[0], weight.shape[2]), 0
        for index, end in enumerate(offs.tolist()):
            result[begin:end] = x[begin:end] @ weight[index]
            begin = end
        return result

    @torch.library.register_fake("transformers::grouped_mm_fallback", lib=LIBRARY)
    def shape(x, weight, offs):
        return x.new_empty(x.shape[0], weight.shape[2])


class Experts(torch.nn.Module):
    """Each row goes to its two best experts; rows are sorted by expert, and put back."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate = torch.nn.Parameter(torch.randn(8, experts, generator=generator))
        self.weight = torch.nn.Parameter(torch.randn(experts, 8, 12, generator=generator))

    def forward(self, x):
        scores, experts = (x @ self.gate).softmax(-1).topk(2)
        experts = experts.reshape(-1)
        order = experts.argsort(stable=True)
        count = len(self.weight)
        ends = torch.histc(experts.float(), bins=count, min=0, max=count - 1).cumsum(0, dtype=torch.int32)
        rows = x[order // 2]
        result = torch.ops.transformers.grouped_mm_fallback(rows, self.weight, ends)
        return (result[order.argsort()] * scores.reshape(-1, 1)).reshape(len(x), 2, -1).sum(1)


@pytest.mark.parametrize(("tokens", "experts"), [(10, 3), (1, 4), (2, 4)])
def test_experts_multiply_their_rows(tokens, experts):
    imported = load_model(Experts(experts), example_inputs=(torch.randn(tokens, 8),))
    for seed in range(3):
        assert verify_import(imported, seed=seed) < 1e-5


class Grouped(torch.nn.Module):
    def forward(self, x, weight):
        return torch.ops.transformers.grouped_mm_fallback(x, weight, torch.tensor([2, 2]))


def test_rows_of_no_expert_are_zero():
    x, weight = torch.randn(5, 3), torch.randn(2, 3, 4)
    imported = load_model(Grouped(), example_inputs=(x, weight))
    assert verify_import(imported) < 1e-6
    (result,) = imported.reference(x.numpy(), weight.numpy())
    np.testing.assert_array_equal(result[2:], 0)


class Histogram(torch.nn.Module):
    def __init__(self, *arguments):
        super().__init__()
        self.arguments = arguments

    def forward(self, x):
        return torch.histc(x, *self.arguments)


@pytest.mark.parametrize("arguments", [(4, 0, 1), (3,), (5, -1, 2)])
@pytest.mark.parametrize("values", [[-1.0, -0.3, 0.0, 0.25, 0.5, 0.5, 0.99, 1.0, 1.5], [0.5, 0.5]])
def test_histograms(arguments, values):
    imported = load_model(Histogram(*arguments), example_inputs=(torch.tensor(values),))
    run = ModelRunner(untuned_executable(imported.mod, detect_target()))
    np.testing.assert_array_equal(*(function(np.float32(values))[0] for function in (run, imported.reference)))


class Chosen(torch.nn.Module):
    def forward(self, x):
        return x[x > 0.5].new_zeros(3) + x.sum()


def test_shapes_that_values_decide_are_refused():
    with pytest.raises((InputError, UnsupportedModelError)):
        load_model(Chosen(), example_inputs=(torch.randn(4),))

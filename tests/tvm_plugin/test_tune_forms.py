"""Which equal forms of a model are worth measuring, and how long looking for them may take."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune import GraphConfig, optimize_graph
from eqtune.machine import detect_target
from eqtune.search.graph.terms import TermGraph
from eqtune.tasks import Task, lower_to_kernels
from eqtune.tune.forms import FIRST_LOOK, Form, Forms, graph_config, model_forms

GIVEN, NEW, SHARED = "given", "new", "shared"


def task(workload: str) -> Task:
    return Task(name=workload, mod=None, workload_hash=workload, calls=1, flops=1.0, bytes_moved=1.0)


FORMS = Forms(
    [
        Form("rewritten", None, [task(NEW), task(SHARED)], rewritten=True),
        Form("as given, channels last", None, [task(GIVEN), task(SHARED)]),
        Form("as given", None, [task("slow"), task(SHARED)]),
    ]
)


def shortlist(
    prices: Mapping[str, float], kernels: float, measured: Collection[str] = (), winner: str = ""
) -> list[str]:
    chosen = FORMS.shortlist(
        lambda t: prices[t.workload_hash],
        lambda tasks, candidates: len(tasks) * candidates <= kernels * FIRST_LOOK,
        lambda t: t.workload_hash in measured,
        winner,
    )
    return [form.name for form in chosen.forms]


FASTER = {GIVEN: 2.0, NEW: 1.0, SHARED: 1.0, "slow": 9.0}
EVEN = {**FASTER, NEW: 1.95}


def test_under_a_short_budget_a_new_graph_needs_clearly_better_prices_and_measured_ones_to_lead() -> None:
    differing = [NEW, GIVEN]  # what both have needs no price
    assert shortlist(FASTER, kernels=2, measured=differing) == ["rewritten"]
    assert shortlist(FASTER, kernels=2, measured=[GIVEN, SHARED]) == ["as given, channels last", "rewritten"]
    assert shortlist(EVEN, kernels=2, measured=differing) == ["as given, channels last"]
    assert shortlist(FASTER, kernels=0.1, measured=differing) == ["as given, channels last", "rewritten"]


def test_the_winner_of_an_earlier_run_comes_first_whatever_prices_say() -> None:
    assert shortlist(FASTER, kernels=2, measured=[NEW, GIVEN], winner=FORMS.forms[2].digest) == ["as given"]
    another = Form("rewritten", None, [task("of another graph"), task(SHARED)]).digest
    assert shortlist(FASTER, kernels=2, winner=another) == ["as given, channels last", "rewritten"]


def test_all_forms_compete_where_the_budget_reaches() -> None:
    assert shortlist(EVEN, kernels=3) == ["as given, channels last", "rewritten"]
    assert shortlist(EVEN, kernels=9) == ["as given, channels last", "rewritten", "as given"]


def test_channels_last_go_first_unless_channels_first_cost_clearly_less() -> None:
    last, first = FORMS.forms[1], replace(FORMS.forms[2], channels_first=True)

    def leader(slow: float) -> str:
        prices = {**EVEN, "slow": slow}
        return Forms([first, last]).shortlist(lambda t: prices[t.workload_hash], lambda *_: False).forms[0].name

    assert leader(1.9) == "as given, channels last"  # 2.9 s beside 3
    assert leader(1.5) == "as given"


def test_what_untuned_kernels_take_is_known_from_the_model() -> None:
    assert FORMS.untuned_s_per_operation(6.0) == 3.0  # two kernels of one operation each


def test_a_form_with_fast_math_never_competes_alone() -> None:
    lossy = Form("rewritten with fast math", None, [task(NEW), task(SHARED)], rewritten=True, lossy=True)
    forms = Forms([lossy, *FORMS.forms[1:]])
    chosen = forms.shortlist(lambda t: FASTER[t.workload_hash], lambda tasks, _: len(tasks) <= 2, lambda t: True)
    assert [form.name for form in chosen.forms] == [lossy.name, "as given, channels last"]
    assert forms.exact(FASTER).name == "as given, channels last"


def convolutions() -> tvm.IRModule:
    """Two 3x3 convolutions with enough channels for Winograd."""
    rng = np.random.default_rng(0)
    x = relax.Var("x", relax.TensorType((1, 64, 28, 28), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y: Any = x
            for _ in range(2):
                kernel = relax.const(rng.standard_normal((64, 64, 3, 3)).astype("float32") / 24)
                y = builder.emit(relax.op.nn.relu(relax.op.nn.conv2d(y, kernel, padding=1)))
            y = builder.emit_output(relax.op.nn.softmax(y))
        builder.emit_func_output(y)
    return builder.get()


def test_fast_math_adds_forms_that_are_marked() -> None:
    mod, target = convolutions(), detect_target(1)
    forms, result = model_forms(mod, target, graph_config("saturate", fast_math=True))
    assert result is not None
    assert any(name.startswith("winograd") for new in result.replacements for name in new.rules)
    assert {form.lossy for form in forms.forms} == {True, False}
    assert not any(form.lossy for form in model_forms(mod, target, "saturate")[0].forms)


def test_fast_math_may_be_asked_for_by_either() -> None:
    assert graph_config("off") is None
    config = GraphConfig(min_gain=0.5)
    assert graph_config(config) == config
    assert graph_config(config, fast_math=True) == GraphConfig(min_gain=0.5, fast_math=True)
    assert graph_config(GraphConfig(fast_math=True)) == GraphConfig(fast_math=True)


def two_products() -> tvm.IRModule:
    rng = np.random.default_rng(0)
    a, b = (relax.const(rng.standard_normal((64, 64)).astype("float32")) for _ in range(2))
    x = relax.Var("x", relax.TensorType((8, 64), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            left, right = builder.emit(relax.op.matmul(x, a)), builder.emit(relax.op.matmul(x, b))
            result = builder.emit_output(relax.op.multiply(relax.op.tanh(left), right))
        builder.emit_func_output(result)
    return builder.get()


@dataclass
class SlowPrices:
    """Prices that take a while to learn, and always promise more."""

    graphs: int = 0
    modules: list[Any] = field(default_factory=list)

    @property
    def cost(self) -> Any:
        from eqtune.search.graph.cost import AnalyticCost

        return AnalyticCost()

    def learn(self, graphs: list[TermGraph]) -> bool:
        time.sleep(0.3)
        self.graphs += 1
        return True

    def modules_s(self, mods: Sequence[Any], seconds: float = math.inf) -> list[float]:
        self.modules += mods
        return [1.0 / (index + 1) for index in range(len(mods))]


def test_the_graph_search_ends_in_time_and_prices_what_it_has_found() -> None:
    slow = SlowPrices()
    result = optimize_graph(two_products(), GraphConfig(verify=False, seconds=0.3), prices=slow)
    assert slow.graphs <= 1
    assert len(slow.modules) == 2
    assert result.changed
    patient = SlowPrices()
    optimize_graph(two_products(), GraphConfig(verify=False), prices=patient)
    assert patient.graphs > 1


def test_of_graphs_that_become_the_same_kernels_the_given_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = optimize_graph(two_products(), GraphConfig(verify=False))
    same = replace(found, mod=two_products(), changed=True, alternatives=[], exact=None)
    monkeypatch.setattr("eqtune.graph_search.optimize_graph", lambda mod, config, prices=None: same)
    for config in (GraphConfig(), GraphConfig(fast_math=True)):
        forms, _ = model_forms(two_products(), tvm.target.Target({"kind": "llvm"}), config)  # without matrix tiles
        assert [form.name for form in forms.forms] == ["as given"]
        assert forms.given.name == "as given"


def convolutions_in_a_row(count: int) -> tvm.IRModule:
    """So many in a row, each with other channels."""
    x: Any = relax.Var("x", relax.TensorType((1, 8, 8, 8), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            for layer in range(count):
                weight = relax.const(np.ones((9 + layer, 8 + layer, 1, 1), "float32"))
                x = builder.emit(relax.op.nn.conv2d(x, weight))
            result = builder.emit_output(x)
        builder.emit_func_output(result)
    return builder.get()


@pytest.mark.parametrize(("count", "layouts"), [(1, 2), (10, 1)])
def test_in_little_time_both_layouts_compete_only_where_there_are_few_kernels(count: int, layouts: int) -> None:
    forms, _ = model_forms(convolutions_in_a_row(count), detect_target(1), "off", seconds=3.0)
    assert [form.name for form in forms.forms] == ["as given, channels last", "as given"][:layouts]
    assert len(model_forms(convolutions_in_a_row(count), detect_target(1), "off")[0].forms) == 2


def test_without_time_there_is_no_graph_search() -> None:
    forms, result = model_forms(two_products(), detect_target(1), "saturate", seconds=0.0)
    assert [form.rewritten for form in forms.forms] == [False]
    assert result.stop_reason == "seconds"
    assert forms.given.name == "as given"


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_the_limit_of_seconds_is_checked(seconds: float) -> None:
    from eqtune import InputError

    with pytest.raises(InputError, match="seconds"):
        GraphConfig(seconds=seconds)


def test_a_graph_that_takes_longer_to_lower_than_the_search_has_is_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An LSTM of 300 steps: each graph that is found would take as long, whatever the limit says."""

    class Slow:
        lowerings = 0

        def lowered(self, mod: Any) -> Any:
            if not self.lowerings:
                clock[0] += 5.0
            self.lowerings += 1
            return lower_to_kernels(mod, detect_target(1))

    clock = [0.0]
    monkeypatch.setattr("eqtune.tune.forms.time.monotonic", lambda: clock[0])
    asked = []

    def search(mod: Any, config: GraphConfig, prices: Any) -> Any:
        asked.append(config.seconds)
        return optimize_graph(mod, GraphConfig(verify=False, seconds=0.0))

    monkeypatch.setattr("eqtune.graph_search.optimize_graph", search)
    for seconds in (4.0, 6.0):
        clock[0] = 0.0
        forms, result = model_forms(two_products(), detect_target(1), "saturate", Slow(), seconds=seconds)  # type: ignore[arg-type]
        assert result is not None
        assert ("lowering" in result.kept_because) == (seconds == 4.0)
        assert forms.given.name == "as given"
    assert asked == [0.0, 6.0]

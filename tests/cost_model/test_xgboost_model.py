"""The learnt model ranks, is quick to say what is wrong with its input, and keeps itself safely."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from eqtune.cost_model.metrics import spearman
from eqtune.cost_model.xgboost_model import XGBoostConfig, XGBoostModel, relative_throughput
from eqtune.errors import InputError, RecordError
from eqtune.search.space.toy import ToySpace
from eqtune.search.strategies.moves import Moves

Rows = tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.int64]]


def rows(tasks: int = 1, count: int = 200, seed: int = 0) -> Rows:
    """Measured candidates of the same toy kernel at several sizes: latencies of different scale, one pattern."""
    space = ToySpace(seed=1)
    features, latencies_s, owners = [], [], []
    for task in range(tasks):
        points = Moves(space).sample(np.random.default_rng(seed + task), count)
        features.append(space.features(points))
        latencies_s.append(space.measured_s(points) * 10.0**task)
        owners.append(np.full(len(points), task))
    return np.concatenate(features), np.concatenate(latencies_s), np.concatenate(owners)


@pytest.fixture(scope="module")
def trained() -> XGBoostModel:
    model = XGBoostModel(seed=1)
    model.fit(*rows())
    return model


def test_ranks_unseen_candidates(trained: XGBoostModel) -> None:
    features, latencies_s, _ = rows(seed=99)
    assert spearman(trained.predict(features), latencies_s) > 0.6


def test_learns_from_other_kernels_whatever_their_scale() -> None:
    """Rows of slow kernels, interleaved with a few of a fast one, teach the fast one."""
    features, latencies_s, tasks = rows(tasks=3, count=100)
    keep = (tasks > 0) | (np.arange(len(tasks)) < 10)
    order = np.random.default_rng(0).permutation(np.flatnonzero(keep))
    model = XGBoostModel()
    model.fit(features[order], latencies_s[order], tasks[order])
    unseen, unseen_s, _ = rows(seed=99)
    assert spearman(model.predict(unseen), unseen_s) > 0.55


def test_labels_are_relative_to_the_best_of_the_task() -> None:
    latencies_s = np.array([2.0, 1.0, np.inf, 30.0, 60.0, np.inf])
    tasks = np.array([7, 7, 7, 3, 3, 5])
    assert relative_throughput(latencies_s, tasks).tolist() == [0.5, 1.0, 0.0, 1.0, 0.5, 0.0]


def test_failures_rank_last() -> None:
    features = np.repeat(np.eye(2, dtype=np.float32), 20, axis=0)
    latencies_s = np.where(np.arange(40) < 20, 1.0, np.inf)
    model = XGBoostModel()
    model.fit(features, latencies_s, np.zeros(40, dtype=np.int64))
    works, fails = model.predict(np.eye(2, dtype=np.float32))
    assert works > fails


def test_is_not_trained_by_too_little() -> None:
    model = XGBoostModel()
    assert not model.trained
    with pytest.raises(InputError, match="before it was trained"):
        model.predict(np.zeros((1, 3), dtype=np.float32))
    features, latencies_s, tasks = rows(count=64)
    few = slice(0, XGBoostConfig().min_rows - 1)
    model.fit(features[few], latencies_s[few], tasks[few])
    assert not model.trained
    model.fit(features, np.full(len(features), 1e-3), tasks)
    assert not model.trained
    model.fit(features, latencies_s, tasks)
    assert model.trained


def test_missing_features_are_allowed() -> None:
    features, latencies_s, tasks = rows()
    features = np.column_stack([features, np.full(len(features), np.nan, dtype=np.float32)])
    model = XGBoostModel()
    model.fit(features, latencies_s, tasks)
    assert np.isfinite(model.predict(features)).all()


def test_same_seed_same_scores() -> None:
    features, latencies_s, tasks = rows(tasks=2)
    first, second = XGBoostModel(seed=3), XGBoostModel(seed=3)
    first.fit(features, latencies_s, tasks)
    second.fit(features, latencies_s, tasks)
    assert np.array_equal(first.predict(features), second.predict(features))


def test_says_what_does_not_fit(trained: XGBoostModel) -> None:
    features, latencies_s, tasks = rows()
    with pytest.raises(InputError, match="200 rows of features, 199 latencies and 200 tasks"):
        trained.fit(features, latencies_s[:-1], tasks)
    with pytest.raises(InputError, match="trained on 11 features and was given shape \\(200, 10\\)"):
        trained.predict(features[:, :-1])
    assert trained.predict(features[:0]).shape == (0,)
    with pytest.raises(InputError, match="8 threads; it takes 1 or 2"):
        XGBoostModel(threads=8)


def test_saved_model_gives_the_same_scores(trained: XGBoostModel, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    trained.save(path)
    features, _, _ = rows(seed=5)
    loaded = XGBoostModel.load(path)
    assert np.array_equal(loaded.predict(features), trained.predict(features))
    assert [file.name for file in tmp_path.iterdir()] == ["model.json"]
    loaded.save(path)
    assert np.array_equal(XGBoostModel.load(path).predict(features), trained.predict(features))


def test_save_says_why_it_cannot(trained: XGBoostModel, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="untrained"):
        XGBoostModel().save(tmp_path / "model.json")
    with pytest.raises(RecordError, match="cannot write cost model"):
        trained.save(tmp_path / "missing" / "model.json")


def _tree(document: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = document["booster"]["learner"]["gradient_booster"]["model"]["trees"][0]
    return tree


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe\x00", b'{"learner": {}}', b"[" * 100_000])
def test_foreign_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"model\.json"):
        XGBoostModel.load(path)
    with pytest.raises(InputError, match="cannot read"):
        XGBoostModel.load(tmp_path / "nothing.json")


def test_truncated_and_changed_files_are_refused(trained: XGBoostModel, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    trained.save(path)
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(InputError, match="cut short"):
        XGBoostModel.load(path)
    document = json.loads(text)
    _tree(document)["split_conditions"][0] += 1.0
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="was changed"):
        XGBoostModel.load(path)
    document = json.loads(text) | {"version": 99}
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="version 99"):
        XGBoostModel.load(path)


@pytest.mark.parametrize(
    ("array", "value"),
    [
        ("left_children", 10_000),
        ("right_children", 0),
        ("left_children", -7),
        ("split_indices", 500),
        ("left_children", 2**70),
        ("parents", -1),
        ("split_type", 1),
    ],
)
def test_trees_that_would_crash_are_refused(
    trained: XGBoostModel, array: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever forges a file can forge its digest: the trees themselves are checked."""
    document = _saved(trained, tmp_path)
    _tree(document)[array][0] = value
    _check_refused(document, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("gradient_booster.model.trees.1.id", 0),
        ("gradient_booster.model.trees.1.tree_param.size_leaf_vector", "1000"),
        ("gradient_booster.model.trees.1.tree_param.num_nodes", 1e999),
        ("gradient_booster.model.iteration_indptr.1", 1000),
        ("learner_model_param.num_class", "3"),
        ("learner_model_param.num_target", "2"),
    ],
)
def test_a_forest_that_would_crash_is_refused(
    trained: XGBoostModel, where: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = _saved(trained, tmp_path)
    *outer, last = [int(part) if part.isdigit() else part for part in where.split(".")]
    inner = document["booster"]["learner"]
    for part in outer:
        inner = inner[part]
    assert inner[last] != value
    inner[last] = value
    _check_refused(document, tmp_path, monkeypatch)


def _saved(model: XGBoostModel, folder: Path) -> dict[str, Any]:
    model.save(folder / "model.json")
    document: dict[str, Any] = json.loads((folder / "model.json").read_text())
    return document


def _check_refused(document: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model.json"
    path.write_text(json.dumps(document))
    monkeypatch.setattr("eqtune.cost_model.model_file._digest", lambda booster: document["sha256"])
    with pytest.raises(InputError, match="no valid trees"):
        XGBoostModel.load(path)

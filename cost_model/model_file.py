"""The file that a cost model is kept in: a JSON header around XGBoost's own JSON.

A model may come from another machine or person, and XGBoost follows the indices of a tree without checking them. So
they are checked here: a file that passes can be wrong, but cannot crash the process or keep it busy for ever.
"""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from eqtune.errors import InputError, RecordError

__all__ = ["read_booster", "write_booster"]

_FORMAT = "eqtune-cost-model"
_VERSION = 1
_NO_PARENT = 2**31 - 1
_TREE_ARRAYS = (
    "left_children",
    "right_children",
    "parents",
    "split_indices",
    "split_conditions",
    "split_type",
    "default_left",
    "base_weights",
    "loss_changes",
    "sum_hessian",
)


def write_booster(path: Path, booster: dict[str, Any], header: dict[str, Any]) -> None:
    """Write a model, first to a file beside it. Raises RecordError when that fails."""
    document = {"format": _FORMAT, "version": _VERSION, **header, "sha256": _digest(booster), "booster": booster}
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(document), encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RecordError(f"cannot write cost model {str(path)!r}: {error.strerror or error}") from error


def read_booster(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """XGBoost's part and the header of a file that `write_booster` wrote; InputError when it is anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read cost model {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"cost model {str(path)!r} is cut short or is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise InputError(f"{str(path)!r} is not a cost model of eqtune; train one, or give a file that `save` wrote")
    if document.get("version") != _VERSION:
        raise InputError(
            f"cost model {str(path)!r} has version {document.get('version')!r}; this eqtune reads version {_VERSION}"
        )
    booster: Any = document.get("booster")
    features = document.get("features")
    if not isinstance(features, int) or not isinstance(document.get("config"), dict):
        raise InputError(f"cost model {str(path)!r} has no valid header; train it again")
    if document.get("sha256") != _digest(booster):
        raise InputError(f"cost model {str(path)!r} was changed after it was written; train it again")
    try:
        _check_trees(booster, features)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"cost model {str(path)!r} holds no valid trees ({error}); train it again") from error
    return booster, document


def _digest(booster: Any) -> str:
    return sha256(json.dumps(booster, sort_keys=True).encode()).hexdigest()


def _check_trees(booster: Any, features: int) -> None:
    """Raise ValueError, KeyError, TypeError or OverflowError unless each tree is one over `features` numbers."""
    learner = booster["learner"]
    shape = learner["learner_model_param"]
    if int(shape["num_feature"]) != features:
        raise ValueError("the number of features differs from the header's")
    if (shape["num_class"], shape["num_target"]) != ("0", "1"):
        raise ValueError("more than one score for a candidate")
    if learner["gradient_booster"]["name"] != "gbtree":
        raise ValueError("not a gbtree model")
    model = learner["gradient_booster"]["model"]
    trees = model["trees"]
    if int(model["gbtree_model_param"]["num_trees"]) != len(trees) or model["tree_info"] != [0] * len(trees):
        raise ValueError("the trees are not those announced")
    # XGBoost puts each tree in the place that its id names, and runs from one entry of iteration_indptr to the next.
    if [tree["id"] for tree in trees] != list(range(len(trees))):
        raise ValueError("trees out of order")
    if model["iteration_indptr"] != list(range(len(trees) + 1)):
        raise ValueError("not one tree in each round")
    for tree in trees:
        _check_tree(tree, features)


def _check_tree(tree: Any, features: int) -> None:
    shape = tree["tree_param"]
    nodes = int(shape["num_nodes"])
    if int(shape["num_feature"]) != features or tree["categories_nodes"] or any(tree["split_type"]):
        raise ValueError("a tree over other features")
    if shape["size_leaf_vector"] != "1":
        raise ValueError("a tree with several values in a leaf")
    if nodes < 1 or any(len(tree[name]) != nodes for name in _TREE_ARRAYS):
        raise ValueError("a tree with missing nodes")
    left, right = (np.asarray(tree[name], dtype=np.int64) for name in ("left_children", "right_children"))
    splits = np.asarray(tree["split_indices"], dtype=np.int64)
    if ((left == -1) != (right == -1)).any() or splits.min() < 0 or splits.max() >= features:
        raise ValueError("a node that splits nothing")
    children = np.concatenate([left[left != -1], right[right != -1]])
    # One parent for each node but the root: whatever can be reached from the root is a tree.
    if len(children) and (children.min() < 1 or children.max() >= nodes):
        raise ValueError("a child outside its tree")
    if len(np.unique(children)) != len(children):
        raise ValueError("a node with two parents")
    parents = np.full(nodes, _NO_PARENT)
    for child in (left, right):
        parents[child[child != -1]] = np.flatnonzero(child != -1)
    if tree["parents"] != parents.tolist():
        raise ValueError("a node with another parent")

"""Trees are mapped as torch maps them."""

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch.utils import _pytree as torchs

from coterie.core.pytree import Outer, is_outer, tree_leaves, tree_map


class Pair(NamedTuple):
    a: object
    b: object


TREES = [
    {"x": (1, [2, None]), "y": Pair(3, {"z": ()})},
    OrderedDict(b=1, a=(2, 3)),
    [Outer(torch.ones(1), torch.zeros(1)), {}],
    torch.Size([2, 3]),
    "text",
]


@pytest.mark.parametrize("tree", TREES)
def test_maps_and_leaves_are_those_of_torch(tree):
    for is_leaf in (None, is_outer):
        ours, theirs = (f(lambda x: (x,), tree, is_leaf=is_leaf) for f in (tree_map, torchs.tree_map))
        assert type(ours) is type(theirs) and str(ours) == str(theirs)
        assert str(tree_leaves(tree, is_leaf)) == str(torchs.tree_leaves(tree, is_leaf))


def test_several_trees_go_together_and_must_be_of_one_form():
    assert tree_map(lambda a, b: a + b, {"x": (1, 2)}, {"x": (3, 4)}) == {"x": (4, 6)}
    for other in ({"y": (3, 4)}, {"x": (3,)}):
        with pytest.raises(ValueError):
            tree_map(lambda a, b: a + b, {"x": (1, 2)}, other)

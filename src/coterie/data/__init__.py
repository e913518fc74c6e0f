"""Federations to try things on: generators with known groups, public data sets, and ways to make clients differ."""

from coterie.data.digits import digits, permuted_digits, rotated_digits
from coterie.data.heterogeneity import dirichlet, mixture, permute_labels, quantity_skew, rotate, swap_labels
from coterie.data.mapped import mapped
from coterie.data.mnist import mnist, rotated_mnist
from coterie.data.source import CHANGES, DATASETS, deal
from coterie.data.synthetic import linear_mixture

__all__ = [
    "CHANGES", "DATASETS", "deal", "digits", "dirichlet", "linear_mixture", "mapped", "mixture", "mnist",
    "permute_labels", "permuted_digits", "quantity_skew", "rotate", "rotated_digits", "rotated_mnist", "swap_labels",
]  # fmt: skip

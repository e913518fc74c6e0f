"""Data for experiments: generators with known groups, public data sets, and functions that make clients differ."""

from coterie.data.cifar import cifar10, rotated_cifar10
from coterie.data.digits import digits, permuted_digits, rotated_digits
from coterie.data.disturbance import noisy_labels, offset_targets, outliers, shift_features
from coterie.data.femnist import femnist
from coterie.data.heterogeneity import (
    dirichlet,
    keep_labels,
    mixed_groups,
    mixture,
    permute_labels,
    quantity_skew,
    random_background,
    rotate,
    swap_labels,
)
from coterie.data.leaf import leaf
from coterie.data.mapped import mapped
from coterie.data.mnist import mnist, mnist_by_writer, mnist_digits, mnist_rotations, rotated_mnist
from coterie.data.news import ag_news, newsgroups
from coterie.data.panels import panel
from coterie.data.points import gaussian_clusters, subspace_clusters
from coterie.data.regression import mixed_regression, regression_truth
from coterie.data.representation import rotnet_features
from coterie.data.source import CHANGES, DATASETS, deal
from coterie.data.stores import stores
from coterie.data.synthetic import linear_mixture, varying_counts, varying_regression

__all__ = [
    "CHANGES", "DATASETS", "ag_news", "cifar10", "deal", "digits", "dirichlet", "femnist", "gaussian_clusters",
    "keep_labels", "leaf", "linear_mixture", "mapped", "mixed_groups", "mixed_regression", "mixture", "mnist",
    "mnist_by_writer", "mnist_digits", "mnist_rotations", "newsgroups", "noisy_labels", "offset_targets", "outliers",
    "panel", "permute_labels", "permuted_digits", "quantity_skew", "random_background", "regression_truth", "rotate",
    "rotated_cifar10", "rotated_digits", "rotated_mnist", "rotnet_features", "shift_features", "stores",
    "subspace_clusters", "swap_labels", "varying_counts", "varying_regression",
]  # fmt: skip

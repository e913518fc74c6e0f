"""Federations from the partitions of Flower Datasets, and rows that are held out of every client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core.key import Key
from coterie.storage.packed import Packed, Pair

_TEST = 0  # stream under a client's key


class Partitions(NamedTuple):
    """The rows of a partitioner's clients, and their names if it has any."""

    rows: list[Pair]
    ids: tuple[str, ...] | None


def read_partitions(partitioner: Any, x: str, y: str) -> Partitions:
    """Read the partitions of a `flwr_datasets` Partitioner, each a dataset of Hugging Face.

    Args:
        partitioner: Has `num_partitions` and `load_partition(i)`.
        x: The column of the features.
        y: The column of the labels.

    Raises:
        ValueError: A partition cannot be used; names the client.
    """
    if not hasattr(partitioner, "load_partition"):
        raise ValueError(
            "Federation.from_partitioner: takes a Partitioner of flwr_datasets, with num_partitions and "
            f"load_partition, got a {type(partitioner).__name__}"
        )
    if hasattr(partitioner, "is_dataset_assigned") and not partitioner.is_dataset_assigned():
        raise ValueError(
            "Federation.from_partitioner: the partitioner has no dataset yet; set its dataset, or take it from "
            "FederatedDataset.partitioners"
        )
    rows = []
    for i in range(partitioner.num_partitions):
        partition = partitioner.load_partition(i)
        for name in (x, y):
            if name not in partition.column_names:
                columns = ", ".join(partition.column_names)
                raise ValueError(f"client {i}: its partition has no column '{name}'; its columns are {columns}")
        if not len(partition):
            raise ValueError(
                f"client {i}: has no train rows, needs at least 1; some partitioners have min_partition_size"
            )
        arrays, kind = partition.with_format("numpy"), partition.features[x]
        features, labels = (_column(arrays[name], f"client {i}: column '{name}'") for name in (x, y))
        rows.append((_features(features, kind), torch.from_numpy(labels)))
    natural = getattr(partitioner, "partition_id_to_natural_id", None)  # of clients that data are grouped by
    return Partitions(rows, tuple(str(natural[i]) for i in range(len(rows))) if natural else None)


def _column(values: Iterable[Any], which: str) -> np.ndarray:
    """Return the values of a column as one array."""
    own = [np.asarray(value) for value in values]
    shapes = list(dict.fromkeys(value.shape for value in own))
    if len(shapes) > 1:
        raise ValueError(f"{which} has values of shape {shapes[0]} and of {shapes[1]}; make them of one shape")
    column = np.stack(own)
    if column.dtype.kind not in "iubf":
        raise ValueError(f"{which} must hold numbers, got {next(iter(column.flat), 'nothing')!r}")
    return column


def _features(values: np.ndarray, kind: Any) -> Tensor:
    """Return features; bytes become numbers from 0 to 1, as all pixels do, and the channels of an image come first.

    Args:
        values: Of a column.
        kind: What Hugging Face's datasets say about the column. Of arrays only this tells that they were bytes.
    """
    image = type(kind).__name__ == "Image"
    while (inner := getattr(kind, "feature", None)) is not None:  # of a list
        kind = inner
    dtype = np.dtype(np.uint8) if getattr(kind, "dtype", None) == "uint8" else values.dtype
    if dtype == np.uint8 or (image and dtype.kind == "u"):
        values = values.astype(np.float32) / np.iinfo(dtype).max
    x = torch.from_numpy(values.astype(np.float32) if image else values)
    if not image:
        return x
    return x[:, None] if x.dim() == 3 else x.movedim(-1, 1)


def held_out(rows: Packed, share: float, numbers: Tensor, seed: int) -> tuple[Packed, Packed]:
    """Return the training rows and the test rows of all clients, in random order.

    Of each client's rows a share are test rows, at least one and not all; of one with a single row none.

    Args:
        rows: Of all clients.
        share: Above 0 and below 1.
        numbers: The integers that the clients' keys are folded with (m,).
        seed: Of the draw.
    """
    train, test = [], []
    for i, number in enumerate(numbers.tolist()):
        x, y = rows.client(i)
        order = torch.randperm(len(x), generator=Key.of(seed).fold(_TEST, number).generator())
        held = min(max(1, round(share * len(x))), len(x) - 1)
        train.append((x[order[held:]], y[order[held:]]))
        test.append((x[order[:held]], y[order[:held]]))
    return Packed.of(train), Packed.of(test)

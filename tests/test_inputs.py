import json
import random
from collections import UserDict

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from coterie.core.federation import Federation, Packed
from coterie.storage.clients import BATCH
from coterie.storage.inputs import Inputs

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10) % 3
IDS = torch.arange(30).reshape(10, 3) * 1000
MASK = IDS % 7 > 2


class Items(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def pairs(n=10):
    return [(X[i], int(Y[i])) for i in range(n)]


def tokens(n=10):
    return [{"input_ids": IDS[i], "attention_mask": MASK[i], "labels": Y[i]} for i in range(n)]


def one(given, **more):
    return Federation.from_clients([given], **more)


def rows(given):
    return one(given).train


# --- several inputs side by side -------------------------------------------------------------------------------------


def test_inputs_come_back_with_their_shapes_and_types():
    tree = (torch.rand(4, 2, 3, dtype=torch.float64), np.arange(4, dtype=np.int16), [True, False, True, True])
    inputs = Inputs.of(tree)
    packed = inputs.pack(tree)
    assert packed.shape == (4, 8) and packed.dtype == torch.float32
    (a, b, c), named = inputs.unpack(packed)
    assert not named and torch.equal(a, tree[0].float())
    assert b.dtype == torch.long and b.tolist() == [0, 1, 2, 3]
    assert c.dtype == torch.bool and c.tolist() == tree[2]


def test_keywords_come_back_by_name_in_whatever_order_they_are_given():
    inputs = Inputs.of({"ids": IDS, "mask": MASK})
    positional, named = inputs.unpack(inputs.pack({"mask": MASK, "ids": IDS}))
    assert positional == () and torch.equal(named["ids"], IDS) and torch.equal(named["mask"], MASK)


def test_rows_are_taken_apart_under_vmap():
    inputs = Inputs.of((X, IDS))
    stacked = inputs.pack((X, IDS)).reshape(2, 5, -1)
    x, ids = torch.func.vmap(lambda x: inputs.unpack(x)[0])(stacked)
    assert torch.equal(x.flatten(0, 1), X) and torch.equal(ids.flatten(0, 1), IDS) and ids.dtype == torch.long


def test_a_layout_is_read_back_from_json():
    inputs = Inputs.of({"ids": IDS, "mask": MASK, "age": torch.rand(10)})
    assert Inputs.from_plain(json.loads(json.dumps(inputs.plain()))) == inputs
    assert Inputs.of((IDS,)).plain() == [{"shape": [3], "dtype": "int64"}]  # TOML has no null


@pytest.mark.parametrize("high", [2**24, -(2**24)])
def test_whole_numbers_are_kept_exactly_or_refused(high):
    inputs = Inputs.of((torch.tensor([high]),))
    assert inputs.unpack(inputs.pack((torch.tensor([high]),)))[0][0].item() == high
    beyond = high + (1 if high > 0 else -1)
    with pytest.raises(ValueError, match=f"input 0 holds {beyond}: whole numbers beyond ±16777216 are not exact"):
        inputs.pack((torch.tensor([0, beyond]),))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "at least one input"),
        ({3: X}, "the name of an input must be a string, got 3"),
        ({"a": X.half()}, "input 'a' is torch.float16; give float32"),
        ((X, X.bfloat16()), "input 1 is torch.bfloat16; give float32"),
        ({"a": 3.0}, "input 'a' must be an array with one entry per row"),
        ({"a": ["x", "y"]}, "input 'a' cannot be read as an array of numbers"),
    ],
)
def test_inputs_that_cannot_be_kept_are_refused_by_name(tree, message):
    with pytest.raises(ValueError) as error:
        Inputs.of(tree)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": X}, "the inputs are 'a', expected 'a', 'b'"),
        ((X, IDS), "the inputs are 0, 1, expected 'a', 'b'"),
        ({"a": X, "b": IDS[:, :2]}, "input 'b' has rows of shape (2,), expected (3,)"),
        ({"a": X, "b": IDS.float()}, "input 'b' is torch.float32, expected torch.int64"),
        ({"a": X, "b": IDS[:4]}, "the inputs 'a', 'b' must have equally many rows, got 10, 4"),
    ],
)
def test_inputs_that_do_not_fit_the_layout_are_refused_by_name(tree, message):
    with pytest.raises(ValueError) as error:
        Inputs.of({"a": X, "b": IDS}).pack(tree)
    assert message in str(error.value)


# --- clients as users have them --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        Items(pairs()),
        Items([(x.tolist(), y) for x, y in pairs()]),
        Items([[x.double().numpy(), np.int32(y)] for x, y in pairs()]),
        TensorDataset(X, Y.int()),
        Subset(Items([*pairs(), (X[0], 7)]), range(10)),
        Stream(pairs()),
        DataLoader(Items(pairs()), batch_size=4),
        DataLoader(Items(pairs()), batch_size=4, shuffle=True, drop_last=True),
        DataLoader(Items(pairs()), batch_size=3, sampler=SubsetRandomSampler(torch.randperm(10).tolist())),
        DataLoader(Items(pairs()), batch_sampler=BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)),
        DataLoader(Items([(X[i : i + 5], Y[i : i + 5]) for i in (0, 5)]), batch_size=None, shuffle=True),
        DataLoader(Stream(pairs()), batch_size=4),
        DataLoader(Items(range(10)), 4, collate_fn=lambda items: (X[items], Y[items].tolist())),
        ((X,), Y),
    ],
)
def test_plain_rows_are_read_in_the_order_of_the_dataset(given):
    fed = one(given, test=[given])
    assert fed.inputs is None
    for part in (fed.train, fed.test):
        assert torch.equal(part.x, X) and part.x.dtype == torch.float32
        assert torch.equal(part.y, Y) and part.y.dtype == torch.long


@pytest.mark.parametrize(
    "given",
    [
        {"input_ids": IDS, "attention_mask": MASK, "labels": Y},
        UserDict({"input_ids": IDS.numpy(), "attention_mask": MASK.tolist(), "targets": Y}),
        ({"input_ids": IDS, "attention_mask": MASK}, Y),
        Items(tokens()),
        Items([{k: v.tolist() for k, v in item.items()} for item in tokens()]),
        Items([({"input_ids": t["input_ids"], "attention_mask": t["attention_mask"]}, t["labels"]) for t in tokens()]),
        DataLoader(Items(tokens()), batch_size=4, shuffle=True),
        DataLoader(Items([{k: v.tolist() for k, v in item.items()} for item in tokens()]), batch_size=4),
    ],
)
def test_dicts_become_keyword_inputs(given):
    fed = one(given)
    positional, named = fed.inputs.unpack(fed.train.x)
    assert not positional and list(named) == ["input_ids", "attention_mask"]
    assert torch.equal(named["input_ids"], IDS) and torch.equal(named["attention_mask"], MASK)
    assert torch.equal(fed.train.y, Y)


@pytest.mark.parametrize(
    "given",
    [
        ((X, IDS.numpy()), Y),
        TensorDataset(X, IDS, Y),
        Items([((X[i], IDS[i].tolist()), Y[i]) for i in range(10)]),
        DataLoader(TensorDataset(X, IDS, Y), batch_size=4, shuffle=True),
        DataLoader(Items([((X[i], IDS[i]), Y[i]) for i in range(10)]), batch_size=4),
    ],
)
def test_tuples_become_positional_inputs(given):
    fed = one(given)
    (x, ids), named = fed.inputs.unpack(fed.train.x)
    assert not named and torch.equal(x, X) and torch.equal(ids, IDS) and torch.equal(fed.train.y, Y)


def test_a_dict_with_one_input_stays_named_and_the_first_target_counts():
    fed = one({"x": X, "y": Y, "labels": Y + 1})
    assert list(fed.inputs.unpack(fed.train.x)[1]) == ["x", "y"] and torch.equal(fed.train.y, Y + 1)
    assert [part.name for part in one({"x": X, "y": Y}).inputs.parts] == ["x"]


def test_targets_may_be_real_or_several_per_row():
    assert rows(Items([(x, float(y)) for x, y in pairs()])).y.dtype == torch.float32
    several = rows(DataLoader(Items([(x, [0.5, float(y)]) for x, y in pairs()]), batch_size=4)).y
    assert several.shape == (10, 2) and several[:, 1].tolist() == Y.tolist()


def test_bytes_stay_bytes():
    assert rows(TensorDataset(X.byte(), Y)).x.dtype == torch.uint8


def test_a_dataset_that_gives_many_items_at_once_is_one(n=2 * BATCH + 5):
    class HuggingFace:
        def __len__(self):
            return n

        def __getitems__(self, indices):
            return [{"x": [float(i)], "label": i} for i in indices]

        def __getitem__(self, i):
            raise AssertionError("items are fetched one by one")

    assert rows(HuggingFace()).y.tolist() == list(range(n))


# --- random numbers ------------------------------------------------------------------------------------------------


class Noisy(Items):
    def __getitem__(self, i):
        return [float(torch.rand(())), np.random.rand(), random.random()], i


def loaders(generator=None):
    data = Noisy(range(10))
    yield data
    yield DataLoader(data, batch_size=3, shuffle=True, generator=generator)
    yield DataLoader(data, sampler=WeightedRandomSampler([1.0] * 10, 8, generator=generator), generator=generator)
    yield DataLoader(data, sampler=RandomSampler(data, replacement=True, num_samples=6, generator=generator))
    batches = BatchSampler(RandomSampler(data, generator=generator), 3, drop_last=True)
    yield DataLoader(data, batch_sampler=batches)


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("own", [False, True])
def test_rows_do_not_depend_on_random_state_and_leave_it_as_it_was(which, own):
    def states():
        return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]

    generator = torch.Generator().manual_seed(5) if own else None
    loader = list(loaders(generator))[which]
    first = rows(loader)
    torch.rand(7), np.random.rand(7), random.random()
    before = states()
    again = rows(loader)
    assert torch.equal(first.x, again.x) and torch.equal(first.y, again.y)
    assert states() == before
    assert generator is None or torch.equal(generator.get_state(), torch.Generator().manual_seed(5).get_state())


def test_random_state_is_put_back_after_a_fault():
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="client 0: its x has rows of shape"):
        rows(Items([(X[0], 0), (X[0, :1], 0)]))
    with pytest.raises(ZeroDivisionError):  # the dataset's own error
        rows(DataLoader(Items(range(3)), collate_fn=lambda items: 1 / 0))
    assert torch.equal(torch.get_rng_state(), before)


# --- faults ----------------------------------------------------------------------------------------------------------

BATCHES = {"input_ids": IDS, "attention_mask": MASK, "labels": Y}


class Endless(Dataset):
    def __getitem__(self, i):
        return X[0], 0


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([TensorDataset(X, Y), Items([])], "client 1: has no train rows, needs at least 1"),
        ([Items([])], "client 0: has no train rows, needs at least 1"),
        (
            [{"ids": IDS, "mask": MASK}],
            "client 0: has no targets: none of its keys ('ids', 'mask') is one of 'labels', 'l",
        ),
        ([Items([{"ids": 1}])], "client 0: has no targets: none of its keys ('ids') is one of"),
        ([{"labels": Y}], "client 0: there must be at least one input, got none"),
        ([{**BATCHES, "text": ["a"] * 10}], "client 0: input 'text' cannot be read as an array of numbers"),
        ([Items([{"text": "a", "label": 0}])], "client 0: input 'text' cannot be read as an array of numbers"),
        ([{**BATCHES, "input_ids": IDS + 2**24}], "client 0: input 'input_ids' holds 16806216: whole numbers beyond"),
        ([BATCHES, {**BATCHES, "age": Y}], "client 1: the inputs are 'input_ids', 'attention_mask', 'age', expected"),
        ([BATCHES, {**BATCHES, "input_ids": X}], "client 1: input 'input_ids' has rows of shape (2,), expected (3,)"),
        ([BATCHES, {**BATCHES, "labels": Y.float()}], "client 1: its targets are torch.float32 of shape () per row"),
        ([BATCHES, {**BATCHES, "labels": Y[:4]}], "client 1: has 10 rows of x but 4 of y"),
        ([BATCHES, (X, Y)], "client 1: a row is one tensor, of client 0 it is several inputs"),
        ([(X, Y), BATCHES], "client 1: a row is several inputs, of client 0 it is one tensor"),
        ([Packed.one(X, Y), BATCHES], "client 1: a row is several inputs, of client 0 it is one tensor"),
        ([TensorDataset(X, Y), TensorDataset(IDS, Y)], "client 1: its rows have shape (3,), the rows of client 0 (2,)"),
        ([TensorDataset(X)], "client 0: an item of its data must be (x, y), (x1, x2, …, y) or a dict with a target"),
        ([DataLoader(X)], "client 0: an item of its data must be (x, y), (x1, x2, …, y) or a dict with a target"),
        (
            [Items([([1, 2], 0), ([1], 0)])],
            "client 0: its x has rows of shape (2,) and of (1,); pad them to one length",
        ),
        ([Items([{"a": 1, "y": 0}, {"b": 1, "y": 0}])], "client 0: its items differ in their inputs: 'a' and 'b'"),
        (
            [DataLoader(Items([2, 3]), batch_size=None, collate_fn=lambda n: (torch.zeros(4, n), torch.zeros(4)))],
            "client 0: its rows have shape (2,) in one batch and (3,) in another",
        ),
        ([Endless()], "client 0: its Endless must tell its length by __len__"),
        (DataLoader(TensorDataset(X, Y)), "train must be a list with one entry per client, got a DataLoader"),
        (TensorDataset(X, Y), "train must be a list with one entry per client, got a TensorDataset"),
        ([3], "client 0: its rows must be a pair (x, y), a dict of arrays, a Dataset or a DataLoader, got a int"),
    ],
)
def test_faults_name_the_client(train, message, tmp_path):
    with pytest.raises(ValueError) as error:
        Federation.from_clients(train)
    assert message in str(error.value)
    with pytest.raises(ValueError) as error:
        Federation.create(tmp_path / "fed", train)
    assert message in str(error.value) and not list(tmp_path.iterdir())


def test_faults_of_test_rows_name_the_client():
    with pytest.raises(ValueError, match=r"client 'b': input 'attention_mask' is torch.float32, expected torch.bool"):
        Federation.from_clients([BATCHES] * 2, [BATCHES, {**BATCHES, "attention_mask": MASK.float()}], ids="ab")
    with pytest.raises(ValueError, match="Federation: test must be a list with one entry per client, got a DataLoader"):
        one((X, Y), test=DataLoader(TensorDataset(X, Y)))


# --- federations with several inputs ---------------------------------------------------------------------------------


def test_inputs_stay_with_the_federation(tmp_path):
    clients = [DataLoader(Items(tokens(n)), batch_size=3, shuffle=True) for n in (4, 10)]
    fed = Federation.from_clients(clients, [BATCHES, Items([])])
    written = Federation.create(tmp_path / "fed", iter(clients), iter([BATCHES, Items([])]))
    assert written.inputs == fed.inputs == Inputs.of({"input_ids": IDS, "attention_mask": MASK})
    assert torch.equal(written.train.x, fed.train.x) and torch.equal(written.test.y, fed.test.y)
    assert fed.train.sizes.tolist() == [4, 10] and fed.test.sizes.tolist() == [10, 0]
    assert fed.select([1]).inputs == fed.map(lambda i, x, y: (x, 1 - y)).inputs == fed.inputs
    with pytest.raises(ValueError, match=r"rows have shape \(5,\), but inputs take 6 numbers apart"):
        fed.map(lambda i, x, y: (x[:, :5], y))


def test_a_folder_without_inputs_is_read_as_before(tmp_path):
    header = tmp_path / "fed" / "federation.json"
    assert Federation.create(tmp_path / "fed", [(X, Y)]).inputs is None
    table = json.loads(header.read_text())
    del table["inputs"]
    header.write_text(json.dumps(table))
    assert Federation.open(tmp_path / "fed").inputs is None
    header.write_text(json.dumps({**table, "inputs": [{"shape": [2], "dtype": "complex64"}]}))
    with pytest.raises(ValueError, match="does not describe a federation"):
        Federation.open(tmp_path / "fed")

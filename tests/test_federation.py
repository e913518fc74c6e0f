import numpy as np
import pytest
import torch

from coterie.federation import Federation


def client(n=3, d=2, value=0.0):
    return np.full((n, d), value), np.zeros(n)


def test_clients_are_read_back_as_they_were_given():
    fed = Federation.from_clients([client(3, value=1), client(5, value=2)], groups=[0, 1], ids=["a", "b"])
    assert len(fed) == 2 and fed.train.sizes.tolist() == [3, 5]
    assert torch.equal(fed.train.client(1)[0], torch.full((5, 2), 2.0))
    assert fed.split("test") is fed.train  # tested on its training rows where there are no others


def test_renumbering_clients_without_names_keeps_their_numbers():
    fed = Federation.from_clients([client() for _ in range(4)])
    assert fed.select([3, 1]).numbers.tolist() == [3, 1] == fed.numbers[[3, 1]].tolist()


def test_select_keeps_names_and_with_them_the_random_numbers():
    fed = Federation.from_clients([client() for _ in range(4)])
    back = fed.select([3, 1])
    assert back.ids == ("3", "1") and len(back) == 2
    named = Federation.from_clients([client(), client()], ids=["x", "y"])
    assert torch.equal(named.numbers.flip(0), named.select([1, 0]).numbers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": []}, "at least one client, got 0"),
        ({"train": [client(), client(0)]}, "client 1: has no train rows"),
        ({"train": [client(), client(d=3)]}, "client 1: its rows have shape (3,), the rows of client 0 (2,)"),
        ({"train": [client(), (np.zeros((3, 2)), np.zeros(2))]}, "client 1: has 3 rows of x but 2 of y"),
        (
            {"train": [client(), client(4, value=np.nan)]},
            "client 1: 4 of its 4 train rows have a value of x that is NaN",
        ),
        ({"train": [client(), client(value=np.inf)], "ids": ["a", "b"]}, "client 'b': 3 of its 3 train rows"),
        ({"train": [client()], "test": [client(value=np.nan)]}, "client 0: 3 of its 3 test rows"),
        (
            {"train": [client()], "test": [client(d=3)]},
            "client 0: its test rows have shape (3,), the rows of client 0 (2,)",
        ),
        ({"train": [(np.zeros((2, 1)), ["a", "b"])]}, "client 0: its rows cannot be read as an array of numbers"),
        (
            {"train": [client(), (np.zeros((3, 2)), np.zeros((3, 2)))]},
            "client 1: its targets are torch.float32 of shape (2,)",
        ),
        ({"train": [(3.0, np.zeros(1))]}, "client 0: its rows must be an array with one entry per row"),
        ({"train": [client()], "groups": [0, 1]}, "groups is given for 2 clients, but there are 1"),
        ({"train": [client(), client()], "ids": ["a", "a"]}, "two clients are called 'a'"),
    ],
)
def test_bad_input_names_the_client(arguments, message):
    with pytest.raises(ValueError) as error:
        Federation.from_clients(**arguments)
    assert message in str(error.value)

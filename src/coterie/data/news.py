"""News texts by topic, for language models: AG News and 20 Newsgroups."""

from __future__ import annotations

import csv
import html
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from coterie.core.federation import Federation, Packed
from coterie.core.key import Key
from coterie.data.source import NO_DATA, dataset, folder

Document = list[str]  # its words
Topics = list[list[Document]]  # the documents of every topic

_TOPICS = 4
_UNKNOWN, _END = 0, 1  # the indices of an unknown word, and of the end of a document
_COARSE = {"comp": 0, "rec": 1, "sci": 2, "talk": 3, "alt": 3, "soc": 3}  # misc.forsale is left out
_NUMBER, _RUN, _WORD = r"\d+(?:[.,]\d+)*", r"([^\w\s]|_)\1+", r"[^\W_]+(?:'[^\W_]+)*|[^\w\s]|_"
_ENTITY, _TAG = r" ?&?(#\d+|amp|gt|lt|quot);", r"<[^<>]*>"  # AG News has " #39;" for an apostrophe


@dataset
def ag_news(clients: int, seed: int = 0, words: int = 5000, length: int = 20, pool: bool = False) -> Federation:
    """AG News, for predicting the next word; one topic per client. Groups: world, sports, business, technology.

    Args:
        clients: Number of clients m, a multiple of 4.
        seed: Seed of the distribution of documents to clients.
        words: Size of the vocabulary, including the words for unknown words and for the end of a document.
        length: Words per row: x (n, length) holds words, y (n, length) the word that follows each of them.
        pool: Whether to distribute the documents of the test file as well, and to test on every tenth document of a
            client; for an incomplete train.csv.
    """
    train, test = (_ag_documents(f"ag_news_csv/{part}.csv") for part in ("train", "test"))
    if not pool:
        return _federation(_dealt(train, clients, seed, 0), _dealt(test, clients, seed, 1), words, length)
    whole = _dealt([a + b for a, b in zip(train, test, strict=True)], clients, seed, 0)
    rest = [[document for i, document in enumerate(own) if i % 10 != 9] for own in whole]
    return _federation(rest, [own[9::10] for own in whole], words, length)


@dataset
def newsgroups(clients: int, seed: int = 0, words: int = 5000, length: int = 20) -> Federation:
    """20 Newsgroups by date, for predicting the next word; one topic per client. Groups: comp, rec, sci, talk.

    Headers and quoted lines are removed from messages. alt.atheism and soc.religion.christian belong to the group of
    talk.*, and misc.forsale is left out.

    Args:
        clients: Number of clients m, a multiple of 4.
        seed: Seed of the distribution of messages to clients.
        words: Size of the vocabulary, including the words for unknown words and for the end of a message.
        length: Words per row: x (n, length) holds words, y (n, length) the word that follows each of them.
    """
    train, test = (_messages(f"20news-bydate/20news-bydate-{part}") for part in ("train", "test"))
    return _federation(_dealt(train, clients, seed, 0), _dealt(test, clients, seed, 1), words, length)


def split_words(text: str) -> Document:
    """Split a text into lower-case words and punctuation marks.

    Every number becomes the word 0, and a repeated mark becomes a single one.

    Args:
        text: The text.

    Example:
        >>> split_words("It's up 1,204.5 points -- B52s don't care...")
        ["it's", 'up', '0', 'points', '-', 'b0s', "don't", 'care', '.']
    """
    return re.findall(_WORD, re.sub(_RUN, r"\1", re.sub(_NUMBER, "0", text.lower())))


def _federation(train: list[list[Document]], test: list[list[Document]], words: int, length: int) -> Federation:
    """Make a federation from the documents of every client, where clients are in the order of their topics."""
    if words < 3 or length < 1:
        raise ValueError(f"words must be at least 3 and length at least 1, got {words} and {length}")
    counts = Counter(chain.from_iterable(chain.from_iterable(train)))
    common = sorted(counts, key=lambda word: (-counts[word], word))[: words - 2]
    numbers = {word: 2 + i for i, word in enumerate(common)}
    own, tests = ([_windows(documents, numbers, length) for documents in part] for part in (train, test))
    return Federation(Packed.of(own), Packed.of(tests), torch.arange(len(own)) * _TOPICS // len(own))


def _windows(documents: list[Document], numbers: dict[str, int], length: int) -> tuple[Tensor, Tensor]:
    """Join the documents and split them into rows of `length` words: (x, y), where y is one word ahead of x."""
    stream = torch.tensor([i for words in documents for i in (*(numbers.get(w, _UNKNOWN) for w in words), _END)])
    used = max(0, len(stream) - 1) // length * length
    return stream[:used].reshape(-1, length).long(), stream[1 : used + 1].reshape(-1, length).long()


def _dealt(topics: Topics, clients: int, seed: int, stream: int) -> list[list[Document]]:
    """Return the documents of every client: each topic's are shuffled and given to its clients in turn."""
    if clients < 1 or clients % _TOPICS:
        raise ValueError(f"clients must be a positive multiple of {_TOPICS}, got {clients}")
    dealt: list[list[Document]] = []
    for t, documents in enumerate(topics):
        order = torch.randperm(len(documents), generator=Key.of(seed).fold(stream, t).generator()).tolist()
        dealt += [[documents[i] for i in order[c :: clients // _TOPICS]] for c in range(clients // _TOPICS)]
    return dealt


def _ag_documents(name: str) -> Topics:
    """Read the documents of a CSV file whose rows are a class from 1 to 4, a title and a description."""
    path = _found(name, "AG News", "https://s3.amazonaws.com/fast-ai-nlp/ag_news_csv.tgz", "")
    topics: Topics = [[] for _ in range(_TOPICS)]
    with path.open(encoding="utf-8", newline="") as file:
        for i, row in enumerate(csv.reader(file), 1):
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                raise ValueError(f"{path}: row {i} is not a class from 1 to 4, a title and a description")
            topics[int(row[0]) - 1].append(split_words(_unescaped(f"{row[1]} {row[2]}")))
    return topics


def _unescaped(text: str) -> str:
    return re.sub(_TAG, " ", html.unescape(re.sub(_ENTITY, r"&\1;", text.replace("\\", " "))))


def _messages(name: str) -> Topics:
    """Read the messages of a folder that has a folder per newsgroup with a file per message."""
    home = "http://qwone.com/~jason/20Newsgroups/20news-bydate.tar.gz"
    path = _found(name, "20 Newsgroups", home, "/20news-bydate")
    topics: Topics = [[] for _ in range(_TOPICS)]
    for group, text in _texts(path):
        if (topic := _COARSE.get(group.partition(".")[0])) is not None and (words := split_words(_body(text))):
            topics[topic].append(words)
    return topics


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (newsgroup, message), sorted by name so that the order is the same on every machine."""
    for group in sorted(path.iterdir()):
        for message in sorted(group.iterdir()):
            yield group.name, message.read_text(encoding="latin-1")


def _body(message: str) -> str:
    """Remove the header, which names the newsgroup, and the lines that are quoted from other messages."""
    lines = message.partition("\n\n")[2].splitlines()
    return "\n".join(line for line in lines if not line.startswith(">"))


def _found(name: str, what: str, home: str, under: str) -> Path:
    if not (path := folder() / name).exists():
        raise ValueError(
            f"{name} is not in {folder()}, and {what} is not downloaded by itself: unpack {home} in {folder()}{under}, "
            f"{NO_DATA}"
        )
    return path

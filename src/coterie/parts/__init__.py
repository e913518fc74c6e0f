"""Parts that several methods are built from."""

from coterie.parts.choosing import Choosing
from coterie.parts.kmeans import kmeans
from coterie.parts.local_training import LocalTraining
from coterie.parts.restarts import Restarts
from coterie.parts.revival import Revival
from coterie.parts.starts import Start, find_start

__all__ = ["Choosing", "LocalTraining", "Restarts", "Revival", "Start", "find_start", "kmeans"]

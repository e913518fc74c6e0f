"""What this node has. Replace it by your own: read this node's rows and return its clients."""

from flwr.app import Context

from coterie.data import rotated_digits
from coterie.federation import Federation

CLIENTS, NODES = 12, 3  # of the whole federation, of which a node has a share


def federation(context: Context) -> Federation:
    """The clients of this node: four of twelve, each with digits turned by its group's angle."""
    part = int(context.node_config["partition-id"])
    each = CLIENTS // NODES
    return rotated_digits(clients=CLIENTS, seed=0).select(range(part * each, (part + 1) * each))

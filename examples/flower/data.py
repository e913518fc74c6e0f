"""The data of this node. Replace it by your own: read this node's rows and return its clients."""

from flwr.app import Context

from coterie.core.federation import Federation
from coterie.data import rotated_digits

CLIENTS = 12  # of the whole federation; each node has a part of them


def federation(context: Context) -> Federation:
    """Return the clients of this node, each with digits that are rotated by its group's angle.

    Args:
        context: Flower's context, whose `node_config` holds the number of this node.
    """
    part, parts = int(context.node_config["partition-id"]), int(context.node_config.get("num-partitions", 3))
    own = range(part * CLIENTS // parts, (part + 1) * CLIENTS // parts)
    return rotated_digits(clients=CLIENTS, seed=0).select(own)

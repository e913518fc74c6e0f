"""What this node has. Replace it by your own: read this node's rows and return its clients."""

from flwr.app import Context

from coterie.data import rotated_digits
from coterie.core.federation import Federation

CLIENTS = 12  # of the whole federation, of which a node has a share


def federation(context: Context) -> Federation:
    """The clients of this node, each with digits turned by its group's angle."""
    part, parts = int(context.node_config["partition-id"]), int(context.node_config.get("num-partitions", 3))
    own = range(part * CLIENTS // parts, (part + 1) * CLIENTS // parts)
    return rotated_digits(clients=CLIENTS, seed=0).select(own)

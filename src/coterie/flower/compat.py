"""All that is used of Flower besides its public names (`flwr.app`, `flwr.clientapp`, `flwr.serverapp`).

Such names move from release to release. They are the same in 1.41 and 1.42, which `tests/test_flower_versions.py` runs;
where a later one has them elsewhere, this is the place to say so.
"""

from __future__ import annotations

from flwr.app import RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

__all__ = [
    "NO_ANSWER",
    "act_as_run",
    "from_bytes",
    "get_all_nested_objects",
    "inflate_object_from_contents",
    "to_bytes",
]

# With these the SuperLink tells that it has waited for a node in vain.
NO_ANSWER = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
}


def to_bytes(content: RecordDict) -> bytes:
    """What a message says, as bytes.

    Example:
        >>> from flwr.app import ConfigRecord
        >>> from_bytes(to_bytes(RecordDict({"step": ConfigRecord({"slots": 3})})))["step"]["slots"]
        3
    """
    return recorddict_to_proto(content).SerializeToString()


def from_bytes(content: bytes) -> RecordDict:
    """What `to_bytes` wrote."""
    return recorddict_from_proto(ProtoRecordDict.FromString(content))


def act_as_run(run: int) -> None:
    """Have messages be made in this process as in one that Flower has started for a run."""
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = run

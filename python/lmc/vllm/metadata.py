"""What the scheduler's connector sends to the workers' with each step."""

from dataclasses import dataclass, field

from lmc.ops import LoadStoreOp
from lmc.vllm.events import StoredBlocks


@dataclass(slots=True)
class Step:
    """Copies to begin, and requests whose stores matter now.

    vLLM takes it for a `KVConnectorMetadata`: the connector registers it as one.
    """

    loads: list[LoadStoreOp] = field(default_factory=list)
    stores: list[LoadStoreOp] = field(default_factory=list)
    # Stores of blocks that steps before have written.
    tails: list[LoadStoreOp] = field(default_factory=list)
    # Requests whose chunks another engine asks for as soon as the step has their answer.
    handed_over: list[str] = field(default_factory=list)
    # Finished requests whose blocks vLLM keeps until `get_finished` names them.
    finished: set[str] = field(default_factory=set)
    # Requests that lost their blocks; their stores must have ended before the step runs.
    preempted: list[str] = field(default_factory=list)
    # Requests that run on without blocks which a window has left, and the first token with a block:
    # stores that begin before it must have ended before the step runs.
    freed: dict[str, int] = field(default_factory=dict)
    # Blocks of stores with a number, for KV events.
    blocks: dict[int, StoredBlocks] = field(default_factory=dict)

"""The message that the scheduler's connector sends to the workers' connectors with each step."""

from dataclasses import dataclass, field

from lmc.ops import LoadStoreOp
from lmc.vllm.events import StoredBlocks


@dataclass(slots=True)
class Step:
    """Copies to begin, and requests whose stores need attention in this step.

    The connector registers this class as a `KVConnectorMetadata` of vLLM.
    """

    loads: list[LoadStoreOp] = field(default_factory=list)
    stores: list[LoadStoreOp] = field(default_factory=list)
    # Stores of blocks that earlier steps have written.
    tails: list[LoadStoreOp] = field(default_factory=list)
    # Requests whose chunks another engine asks for as soon as this step has their answer.
    handed_over: list[str] = field(default_factory=list)
    # Finished requests whose blocks vLLM keeps until `get_finished` names them.
    finished: set[str] = field(default_factory=set)
    # Requests that lost their blocks; their stores must have ended before the step runs.
    preempted: list[str] = field(default_factory=list)
    # Running requests that lost blocks which a window has left, and the first token that still has a
    # block. Stores that begin before this token must have ended before the step runs.
    freed: dict[str, int] = field(default_factory=dict)
    # Blocks of stores with a number, for KV events.
    blocks: dict[int, StoredBlocks] = field(default_factory=dict)

"""Plans of a configuration, where only what differs is named."""

from typing import Any

from kvd.plan.figures import Plan, PlanInputs, make_plan
from kvd.plan.model import read_model

GIB = 1024**3


def planned(config: dict[str, Any], **changes: Any) -> Plan:
    """The plan with one rank, 16-token blocks and 64 GiB, but for the changes."""
    inputs: dict[str, Any] = {
        "tensor_parallel": 1,
        "block_size": 16,
        "dtype": "auto",
        "cpu_bytes": 64 * GIB,
        "blocks_per_chunk": 1,
    }
    return make_plan(read_model(config), PlanInputs(**(inputs | changes)))

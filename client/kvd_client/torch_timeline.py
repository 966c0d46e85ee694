"""The engine's own work on CUDA streams, as a number of the worker's timeline."""

from typing import Any

import torch

from kvd_client.worker import Worker
from kvd_proto.messages import HOST


def work_so_far(worker: Worker, stream: Any = None) -> int | None:
    """Return the timeline's number for all work that the engine has put on a stream until now.

    None for host memory, where it has finished. On CUDA a store must read after the kernels that
    write its blocks, a load write after those that read them.

    Args:
        worker: whose memory it is.
        stream: a torch stream; None: the current one.
    """
    if worker.device in {None, HOST}:
        return None
    used = torch.cuda.current_stream() if stream is None else stream
    return worker.timeline.signal_on(used.cuda_stream)

"""The two ways between an engine's memory and the pool: export and staging.

- **export**: the daemon maps the engine's memory, and a lane of its device copies once.
- **staging**: the worker copies between the engine's memory and host memory that the daemon maps,
  and the host lane copies between that and the pool. For memory that no other process can map.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from kvd_client.errors import (
    CudaError,
    UnsupportedMemory,
    UsageError,
    cause,
    check_collection,
    check_int,
    get_logger,
    shown,
)
from kvd_client.memory import Descriptors, DeviceMemory, Memory
from kvd_client.registration import check_layout
from kvd_client.staging_layout import DEFAULT_STAGING_BYTES, staging_layout
from kvd_client.staging_memory import BlockCopier, KvTensors, StagingMemory
from kvd_client.timeline import ControlPage
from kvd_proto.layout import RankLayout
from kvd_proto.messages import Register
from kvd_proto.text import format_size

Transfer: TypeAlias = Literal["auto", "export", "staging"]
"""Which way to take; auto: export if that is possible, else staging."""
EXPORT: Transfer = "export"
STAGING: Transfer = "staging"
AUTO: Transfer = "auto"
MIN_STAGING_BYTES = 2**20

MessageOf: TypeAlias = Callable[[Sequence[Memory], RankLayout], tuple[Register, Descriptors]]

log = get_logger()


@dataclass(frozen=True, slots=True)
class Route:
    """A way that is prepared, with what to register for it.

    Attributes:
        transfer: EXPORT or STAGING.
        reason: why staging was chosen in place of export; empty: it was not.
        message, descriptors: of the registration.
        ordinal: of the CUDA device whose exported memory this is; None: other memory.
        staging: the pages; None with export.
        copier: between them and the engine's blocks; None with export.
        fallback: returns the route to take if the daemon refuses this one, from its reason; None:
            there is no other.
    """

    transfer: Transfer
    reason: str
    message: Register
    descriptors: Descriptors
    ordinal: int | None = None
    staging: StagingMemory | None = None
    copier: BlockCopier | None = None
    fallback: "Callable[[str], Route] | None" = None

    def close(self) -> None:
        """Free what was prepared, if no job has gone this way."""
        if self.copier is not None:
            self.copier.close()


def choose_route(
    memory: Sequence[Memory] | KvTensors,
    layout: RankLayout,
    message_of: MessageOf,
    page: ControlPage,
    *,
    transfer: Transfer = AUTO,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
) -> Route:
    """Return the way for this memory, prepared.

    Args:
        memory: see `Worker.register`.
        layout: of this memory.
        message_of: makes the registration.
        page: the worker's control page.
        transfer: see `Worker.register`.
        staging_bytes: see `Worker.register`.

    Raises:
        UsageError, UnsupportedMemory, CudaError: see `Worker.register`.
    """
    if not isinstance(transfer, str) or transfer not in get_args(Transfer):
        raise UsageError(f"transfer={shown(transfer)}: auto, export or staging is needed")
    check_int("staging_bytes", staging_bytes, MIN_STAGING_BYTES)
    if not isinstance(memory, KvTensors):
        if transfer == STAGING:
            raise UsageError(
                "transfer=staging: tensors are needed, as describe_torch returns them, and not"
                " memory to export"
            )
        return _export(check_collection("memory", memory, "memories"), layout, message_of)
    check_layout(layout)
    tensors: KvTensors = memory

    def stage(reason: str) -> Route:
        staging, message, descriptors = _stage(tensors, layout, message_of, staging_bytes)
        copier = tensors.open_copier(layout, staging, page)
        log.log(
            logging.WARNING if reason else logging.INFO,
            "%sthe KV cache is staged: this process copies each byte to or from %s of host memory,"
            " and the daemon copies it again",
            f"{reason}; " if reason else "",
            format_size(len(staging.window)),
        )
        return Route(STAGING, reason, message, descriptors, staging=staging, copier=copier)

    if transfer == STAGING:
        return stage("")
    try:
        shared = memory.share()
    except (UnsupportedMemory, CudaError) as error:
        if transfer == EXPORT:
            raise
        return stage(cause(error))
    try:
        # The daemon maps host memory of either way alike: there is nothing to fall back to.
        may_stage = transfer == AUTO and not memory.is_host
        return _export(shared, layout, message_of, stage if may_stage else None)
    finally:
        for storage in shared:
            storage.close()


def _export(
    memory: Sequence[Memory],
    layout: RankLayout,
    message_of: MessageOf,
    fallback: Callable[[str], Route] | None = None,
) -> Route:
    message, descriptors = message_of(memory, layout)
    ordinal = memory[0].ordinal if isinstance(memory[0], DeviceMemory) else None
    return Route(EXPORT, "", message, descriptors, ordinal=ordinal, fallback=fallback)


def _stage(
    tensors: KvTensors, layout: RankLayout, message_of: MessageOf, staging_bytes: int
) -> tuple[StagingMemory, Register, Descriptors]:
    """Return staging memory for these tensors, and its registration."""
    if layout.storages != tensors.storages:
        raise UsageError(
            f"the layout's storages have {list(layout.storages)} bytes, the tensors'"
            f" {list(tensors.storages)}; give those of the tensors"
        )
    pages = staging_layout(layout, staging_bytes)
    staging = StagingMemory(pages)
    try:
        message, descriptors = message_of([staging.memory], pages.layout)
    finally:
        staging.memory.close()
    return staging, message, descriptors

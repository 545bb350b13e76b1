"""The `aio` section: how a handle cuts and queues transfers."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator
from typing_extensions import Self

from offload.config.base import ConfigSection, Integer

if TYPE_CHECKING:
    from offload.io import AsyncIOHandle


class AioConfig(ConfigSection):
    """Settings of an I/O handle, under the names DeepSpeed gives them."""

    section: ClassVar[str] = "aio"
    old_names: ClassVar[dict[str, str]] = {
        "thread_count": "intra_op_parallelism",
        "num_threads": "intra_op_parallelism",
    }

    block_size: Integer = Field(1 << 20, ge=1, le=1 << 30)
    """Bytes per request; the handle rounds it up to whole device blocks and says so."""

    queue_depth: Integer = Field(64, ge=1, le=(1 << 31) - 1)
    """Requests one handle keeps in flight; the handle lowers it to what the kernel allows and says so."""

    intra_op_parallelism: Integer = Field(1, ge=1, le=1024)
    """Threads that share one transfer."""

    single_submit: bool = False
    """Hand requests to the kernel one by one instead of in batches."""

    overlap_events: bool = True
    """Submit new requests while earlier ones are still in flight."""

    use_gds: bool = False
    """Move bytes straight between drive and GPU (GPUDirect Storage); this version takes only `false`."""

    @model_validator(mode="after")
    def _refuse_gds(self) -> Self:
        if self.use_gds:
            raise ValueError(
                "aio.use_gds is true, but GPUDirect Storage is not in this version; set it to false"
            )
        return self

    def build_handle(self, backend: str = "auto", checksums: bool = False) -> "AsyncIOHandle":
        """A new handle with these settings; the caller owns and closes it."""
        from offload.io import AsyncIOHandle  # brings torch, which reading a config does not need

        return AsyncIOHandle(
            block_size=self.block_size,
            queue_depth=self.queue_depth,
            single_submit=self.single_submit,
            overlap_events=self.overlap_events,
            intra_op_parallelism=self.intra_op_parallelism,
            backend=backend,
            checksums=checksums,
        )

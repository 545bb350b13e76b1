"""The unit of the streamed step."""

from dataclasses import dataclass

from offload.swap.sub_group import SubGroup


@dataclass(frozen=True)
class Chunk:
    """Elements `start` to `start + numel` of a sub-group; a position of the pipeline."""

    group: SubGroup
    start: int
    numel: int

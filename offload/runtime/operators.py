"""DeepSpeed's compiled operators, served from our extension so that nothing is compiled at run time."""

from collections.abc import Callable
from typing import Any

from offload.io.drop_in import async_io_op, pin_memory_op
from offload.runtime.cpu_adam import cpu_adam_operator
from offload.runtime.cpu_single_state import cpu_adagrad_operator, cpu_lion_operator
from offload.runtime.seams import Seam

_BUILDERS = "deepspeed.ops.op_builder"


def seams() -> list[Seam]:
    """Every builder that would compile an operator in a training run."""
    return [
        *_served(f"{_BUILDERS}.async_io", "AsyncIOBuilder", async_io_op),
        *_served(f"{_BUILDERS}.cpu.async_io", "AsyncIOBuilder", async_io_op),
        *_served(f"{_BUILDERS}.pin_memory", "PinMemoryBuilder", pin_memory_op),
        *_served(f"{_BUILDERS}.cpu.pin_memory", "PinMemoryBuilder", pin_memory_op),
        *_served(f"{_BUILDERS}.cpu.cpu_adam", "CPUAdamBuilder", cpu_adam_operator),
        *_served(f"{_BUILDERS}.cpu.cpu_lion", "CPULionBuilder", cpu_lion_operator),
        *_served(f"{_BUILDERS}.cpu.cpu_adagrad", "CPUAdagradBuilder", cpu_adagrad_operator),
        # compiled at start on every CPU machine, used by inference alone, which then reduces through gloo
        Seam("deepspeed.comm.torch", None, "build_shm_op", _always(lambda: None)),
    ]


def _served(module: str, builder: str, operator: Any) -> list[Seam]:
    def load(_: Any, verbose: bool = False) -> Any:
        return operator

    def is_compatible(_: Any, verbose: bool = False) -> bool:
        return True

    return [
        Seam(module, builder, "load", _always(load)),
        Seam(module, builder, "is_compatible", _always(is_compatible)),
    ]


def _always(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda _: replacement

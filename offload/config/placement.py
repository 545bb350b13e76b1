"""Sections and keys in the wrong place: DeepSpeed refuses some without a reason and ignores the others."""

from collections.abc import Iterator, Mapping
from typing import Any

from offload.config.aio import AioConfig
from offload.config.base import ConfigSection
from offload.config.offload_optimizer import OffloadOptimizerConfig
from offload.config.offload_param import OffloadParamConfig
from offload.config.section import OffloadConfig

SECTIONS: tuple[type[ConfigSection], ...] = (
    AioConfig,
    OffloadConfig,
    OffloadParamConfig,
    OffloadOptimizerConfig,
)
ZERO = "zero_optimization"

_HOMES = {kind.section.rpartition(".")[2]: kind.section for kind in SECTIONS} | {ZERO: ZERO}
_CONTAINERS = ("", ZERO, *(kind.section for kind in SECTIONS))


def section_at(config: Mapping[str, Any], path: str) -> Any:
    """What stands at a dotted path, or None."""
    value: Any = config
    for name in path.split(".") if path else ():
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def misplaced(config: Mapping[str, Any]) -> list[str]:
    """One line for each section or key that stands where nothing reads it."""
    return [*_misplaced_sections(config), *_keys_beside_their_section(config)]


def without_misplaced(values: Any) -> Any:
    """A section's values without other sections in them, about which `misplaced` has already spoken."""
    if not isinstance(values, Mapping):
        return values
    return {key: value for key, value in values.items() if not (key in _HOMES and isinstance(value, Mapping))}


def _misplaced_sections(config: Mapping[str, Any]) -> Iterator[str]:
    for container in _CONTAINERS:
        inside = section_at(config, container)
        for name in inside if isinstance(inside, Mapping) else ():
            found = f"{container}.{name}" if container else str(name)
            if name in _HOMES and found != _HOMES[name]:
                yield f"{found}: `{name}` does not belong there; move it to {_place(_HOMES[name])}"


def _keys_beside_their_section(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys written straight into zero_optimization instead of the section inside it."""
    inside = section_at(config, ZERO)
    for name in inside if isinstance(inside, Mapping) else ():
        homes = [kind.section for kind in SECTIONS if name in kind.model_fields or name in kind.old_names]
        if homes:
            yield f"{ZERO}.{name}: no such key; move it into {' or '.join(homes)}"


def _place(home: str) -> str:
    parent, _, name = home.rpartition(".")
    return (
        f'{parent}: "{parent}": {{"{name}": {{...}}}}' if parent else f'the top level: {{"{name}": {{...}}}}'
    )

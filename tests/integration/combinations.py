"""The combinations that the parity table lists, chosen so that each two settings meet."""

from collections.abc import Iterator
from dataclasses import replace

from tests.integration.models import FEATURES
from tests.integration.training import Case

STALE_GRADIENT = (
    "stock ZeRO-3 applies the gradient of an earlier step once more to a parameter that got none; "
    "here its gradient is zero, as in `torch` with `set_to_none=False`"
)
STOCK_DIFFERS = {"no gradient in some steps": STALE_GRADIENT, "used in some micro-batches": STALE_GRADIENT}
"""Features whose numbers are not stock DeepSpeed's, and why."""
REASONS = (STALE_GRADIENT,)
"""Every reason for a "no", in the order of the page's notes."""

_BOTH_ON_NVME = ("nvme", "nvme")
_OPTIMIZER_ON_NVME = ("memory", "nvme")
_PARAMS_ON_NVME = ("nvme", "cpu")
_NOTHING_ON_NVME = ("memory", "cpu")
_NO_OPTIMIZER_OFFLOAD = ("nvme", "none")

_MATRIX = {
    ("bf16", 1, False): [
        (_NOTHING_ON_NVME, "off"),
        (_OPTIMIZER_ON_NVME, "off"),
        (_BOTH_ON_NVME, "both"),
        (_PARAMS_ON_NVME, "off"),
    ],
    ("bf16", 4, True): [(_OPTIMIZER_ON_NVME, "read"), (_BOTH_ON_NVME, "off"), (_PARAMS_ON_NVME, "off")],
    ("fp16", 1, True): [
        (_NOTHING_ON_NVME, "off"),
        (_OPTIMIZER_ON_NVME, "both"),
        (_BOTH_ON_NVME, "read"),
        (_PARAMS_ON_NVME, "off"),
    ],
    ("fp16", 4, False): [(_OPTIMIZER_ON_NVME, "off"), (_BOTH_ON_NVME, "write"), (_PARAMS_ON_NVME, "off")],
    ("fp32", 1, False): [(_OPTIMIZER_ON_NVME, "write"), (_BOTH_ON_NVME, "off"), (_PARAMS_ON_NVME, "off")],
    ("fp32", 4, True): [
        (_NOTHING_ON_NVME, "off"),
        (_OPTIMIZER_ON_NVME, "both"),
        (_BOTH_ON_NVME, "read"),
    ],
}
_WITHOUT_OPTIMIZER_OFFLOAD = [("bf16", 4, True), ("fp16", 1, False), ("fp32", 1, True)]
_FEATURES_WITH_THEIR_OWN_GRADIENTS = {
    "two parameter groups",
    "no gradient in some steps",
    "used in some micro-batches",
    "state set by user (full)",
    "gradient set by user (full)",
}

TWO_MODELS = Case(*_BOTH_ON_NVME, feature="two models in one process")
TWO_RANKS = Case(*_BOTH_ON_NVME, ranks=2)
TRAINER = Case(*_BOTH_ON_NVME, "fp32", accumulation=2, clipping=True, feature="transformers.Trainer")
CASES_ELSEWHERE = (TWO_MODELS, TWO_RANKS, TRAINER)
"""The rows that have a test of their own."""


def all_cases() -> list[Case]:
    """Every row of the table."""
    return [*combinations(), *CASES_ELSEWHERE]


def combinations() -> Iterator[Case]:
    """The rows that one body tests; rows with the same numbers in memory follow each other."""
    for (dtype, accumulation, clipping), places in _MATRIX.items():
        for (params, optimizer), pipeline in places:
            yield Case(params, optimizer, dtype, accumulation, clipping, pipeline)
    for dtype, accumulation, clipping in _WITHOUT_OPTIMIZER_OFFLOAD:
        yield Case(*_NO_OPTIMIZER_OFFLOAD, dtype, accumulation, clipping)
    elsewhere = {case.feature for case in CASES_ELSEWHERE}
    for feature in FEATURES:
        if feature not in elsewhere | {"plain"}:
            yield from _with_feature(feature)


def _with_feature(feature: str) -> Iterator[Case]:
    accumulation = 4 if feature == "used in some micro-batches" else 1
    clipping = feature.startswith("gradient")
    case = Case(*_BOTH_ON_NVME, accumulation=accumulation, clipping=clipping, feature=feature)
    yield case
    if feature in _FEATURES_WITH_THEIR_OWN_GRADIENTS:
        yield replace(case, params="memory", pipeline="both", dtype="fp32")
        yield replace(case, optimizer="cpu", dtype="fp32")

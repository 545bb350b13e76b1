"""The combinations that the parity table lists, chosen so that each two settings meet."""

from collections.abc import Iterator
from dataclasses import replace

from tests.integration.models import FEATURES
from tests.integration.training import Case

STALE_GRADIENT = (
    "A parameter without a gradient in a step: stock ZeRO-3 applies the one of an earlier step once more, "
    "here it is zero, as in torch with `zero_grad(set_to_none=False)`;"
    " `test_against_torch.py` compares the two."
)
DROPPED_GRADIENT = (
    "A parameter that the last micro-batch of a window does not use: stock ZeRO-3 steps it with what an "
    "earlier step left and drops its gradients of this window, here they count, as in torch; same test."
)
REASONS = (STALE_GRADIENT, DROPPED_GRADIENT)
"""Every reason for a "no", in the order of the page's notes."""
STOCK_DIFFERS = {
    "no gradient in some steps": STALE_GRADIENT,
    "used in some micro-batches": DROPPED_GRADIENT,
}
"""Features whose numbers are not stock DeepSpeed's, and why."""

_BOTH_ON_NVME = ("nvme", "nvme")
_OPTIMIZER_ON_NVME = ("memory", "nvme")
_PARAMS_ON_NVME = ("nvme", "cpu")
_NOTHING_ON_NVME = ("memory", "cpu")
_NO_OPTIMIZER_OFFLOAD = ("nvme", "none")

_EVERYWHERE = (_OPTIMIZER_ON_NVME, _BOTH_ON_NVME, _PARAMS_ON_NVME)
_STREAMED = {
    ("bf16", 1, False): (_NOTHING_ON_NVME, *_EVERYWHERE),
    ("bf16", 4, True): _EVERYWHERE,
    ("fp16", 1, True): (_NOTHING_ON_NVME, *_EVERYWHERE),
    ("fp16", 4, False): (_OPTIMIZER_ON_NVME, _BOTH_ON_NVME),
    ("fp32", 1, False): (_OPTIMIZER_ON_NVME, _BOTH_ON_NVME),
    ("fp32", 4, True): (_NOTHING_ON_NVME, *_EVERYWHERE),
}
_BY_SUB_GROUP = {
    ("bf16", 4, True): [(_OPTIMIZER_ON_NVME, "read"), (_BOTH_ON_NVME, "off"), (_BOTH_ON_NVME, "both")],
    ("fp16", 1, False): [(_OPTIMIZER_ON_NVME, "both"), (_BOTH_ON_NVME, "write")],
    ("fp32", 1, True): [(_OPTIMIZER_ON_NVME, "off"), (_BOTH_ON_NVME, "read"), (_BOTH_ON_NVME, "both")],
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
    for numbers, places in _STREAMED.items():
        for place in places:
            yield Case(*place, *numbers)
    for numbers, ways in _BY_SUB_GROUP.items():
        for place, pipeline in ways:
            yield Case(*place, *numbers, pipeline, algorithm="torch Adam")
    for numbers in _WITHOUT_OPTIMIZER_OFFLOAD:
        yield Case(*_NO_OPTIMIZER_OFFLOAD, *numbers, algorithm="torch Adam")
    for algorithm in ("CPU Lion", "CPU Adagrad", "torch SGD"):
        yield Case(*_OPTIMIZER_ON_NVME, "bf16", 4, True, algorithm=algorithm)
        yield Case(*_BOTH_ON_NVME, "fp32", algorithm=algorithm)
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
        yield replace(case, params="memory", dtype="fp32")
        yield replace(case, optimizer="cpu", dtype="fp32")
        yield replace(case, params="memory", pipeline="both", algorithm="torch Adam", dtype="fp32")

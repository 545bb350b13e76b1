"""The page docs/parity.md: made from what the tests found, never typed.

`python -m tests.integration.parity --write` renders it anew from the results of the last whole run.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from tests.integration.combinations import REASONS, all_cases
from tests.integration.training import Case

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "parity.md"
RESULTS = ROOT / "build" / "parity.json"
YES = "yes"
WRITE = "python -m tests.integration.parity --write"

_HEAD = f"""# Parity

Made by `tests/integration`, not typed: every row is a training run that the tests compared. After a run of
all tests, `{WRITE}` renders this page from its results.

- **As CPU offload**: losses, weights (16 bit and fp32), all moments and all counters are equal, bit for
  bit, to the same training with nothing on NVMe and this package enabled.
- **As stock**: losses and weights are those of DeepSpeed's own CPU offload within float32 rounding; in bf16
  and fp16 within what rounding the weights to 16 bit makes of that after six steps.
- **Exact resume**: saved, loaded into an engine with other first weights, equal bit for bit right after the
  load and after three more steps.

State on NVMe streams through a few chunks; only that of torch's Adam moves by sub-groups.

| Parameters | Optimizer | Precision | Accumulation | Clipping | Pipeline | What | Algorithm | Ranks \
| As CPU offload | As stock | Exact resume |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Answers:
    """What a case's runs showed: `yes`, or the reason for a no."""

    as_cpu: str = YES
    as_stock: str = YES
    resume: str = YES


def line(case: Case, answers: Answers) -> str:
    """The case's row."""
    settings = (
        case.params,
        case.optimizer,
        case.dtype,
        case.accumulation,
        "on" if case.clipping else "off",
        case.pipeline,
        case.feature,
        case.algorithm,
        case.ranks,
    )
    cells = [*settings, *(_cell(answer) for answer in astuple(answers))]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def render(results: dict[Case, Answers]) -> str:
    """The whole page; reasons are notes below the table."""
    rows = "\n".join(line(case, results[case]) for case in all_cases() if case in results)
    notes = "\n".join(f"{number}. {reason}" for number, reason in enumerate(REASONS, 1))
    return f"{_HEAD}{rows}\n\n{notes}\n"


def _cell(answer: str) -> str:
    return YES if answer == YES else f"no ({REASONS.index(answer) + 1})"


def save(results: dict[Case, Answers]) -> None:
    """Keep what was found, beside what earlier runs found of other cases."""
    entries = [[asdict(case), asdict(answers)] for case, answers in (load() | results).items()]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(entries, indent=1))


def load() -> dict[Case, Answers]:
    """What the runs so far found."""
    entries: Iterable[tuple[dict, dict]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else ()
    return {Case(**case): Answers(**answers) for case, answers in entries}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: {WRITE}")
    missing = [str(case) for case in all_cases() if case not in load()]
    if missing:
        sys.exit(f"no results yet for {', '.join(missing)}; run pytest tests/integration")
    PAGE.write_text(render(load()))
    print(f"{PAGE} written from {RESULTS}")

"""docs/config.md is the reference: its tables say what the models say, key by key."""

import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import annotated_types
import pytest

from offload.config.base import shown
from offload.config.placement import SECTIONS

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def kind_of(field):
    """What a user may write, in the words of the page."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(f'`"{choice}"`' for choice in get_args(field.annotation))
    if get_args(field.annotation) == (int, Literal["auto"]):
        return 'integer or `"auto"`'
    if field.annotation is bool:
        return "true or false"
    if Path in get_args(field.annotation):
        return "path"
    low = next(bound.ge for bound in field.metadata if isinstance(bound, annotated_types.Ge))
    high = next(bound.le for bound in field.metadata if isinstance(bound, annotated_types.Le))
    return f"{'integer' if field.annotation is int else 'number'}, {power(low)} to {power(high)}"


def power(bound):
    """Large bounds as powers of two, which is how they were chosen."""
    if bound < 1 << 20:
        return f"{bound:g}"
    exponent = bound.bit_length() - 1
    return f"2^{exponent}" if bound == 1 << exponent else f"2^{exponent + 1} - 1"


def rows_of(section):
    for name, field in section.model_fields.items():
        meaning = " ".join(field.description.split())
        default = "none" if field.default is None else f"`{shown(field.default)}`"
        yield f"| `{name}` | {kind_of(field)} | {default} | {meaning} |"


def tables():
    """The rows under each heading that names a section."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        if heading.startswith("`"):
            yield heading.strip("`"), [line for line in text.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.section)
def test_the_page_lists_every_key_as_the_model_has_it(section):
    assert dict(tables())[section.section] == list(rows_of(section))


def test_the_page_lists_no_other_section():
    assert {heading for heading, _ in tables()} == {section.section for section in SECTIONS}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.section)
def test_the_page_names_every_old_name(section):
    for old, new in section.old_names.items():
        assert re.search(rf"`{old}`.*`{new}`", PAGE.read_text())

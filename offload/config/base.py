"""What every section of the config shares: closed, frozen, tolerant of spelling, strict about meaning."""

import difflib
import json
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails
from typing_extensions import Self

from offload.errors import OffloadConfigError, OffloadWarning

AUTO = "auto"


def _refuse_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("it should be a number")
    return value


def nearest_key(key: str, valid: Mapping[str, Any]) -> str | None:
    """The valid key that `key` was most likely meant to be."""
    by_letters = {name.replace("_", ""): name for name in valid}
    letters = key.lower().replace("_", "").replace("-", "")
    matches = difflib.get_close_matches(letters, by_letters, n=1, cutoff=0.6)
    return by_letters[matches[0]] if matches else None


Integer = Annotated[int, BeforeValidator(_refuse_boolean)]
"""A whole number; text such as "8" is read as one, true and false are not."""

Share = Annotated[float, BeforeValidator(_refuse_boolean)]
"""A number between 0 and 1."""


class ConfigSection(BaseModel):
    """One section; its field docstrings are the reference that docs/config.md prints."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    section: ClassVar[str]
    """Where the section stands in the config file; every message starts with it."""

    old_names: ClassVar[Mapping[str, str]] = {}
    """Names that published examples use, and what they are called here."""

    must_be_written: ClassVar[frozenset[str]] = frozenset()
    """Keys for which "auto" is refused, because no value follows from it."""

    auto_is_a_value: ClassVar[frozenset[str]] = frozenset()
    """Keys for which "auto" says something else than leaving them out."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise OffloadConfigError("\n".join(self._problems(error))) from None

    @classmethod
    def parse(cls, values: object) -> Self:
        """The section as it stands in a config file; absent and null are the defaults."""
        if values == AUTO and cls.must_be_written:
            raise OffloadConfigError(
                f'{cls.section} is "auto", but nothing here can choose it; write its keys'
            )
        if values is None or values == AUTO:
            return cls()
        if not isinstance(values, Mapping):
            raise OffloadConfigError(f"{cls.section} is {shown(values)}; write an object: {{...}}")
        return cls(**{str(key): value for key, value in values.items()})

    @classmethod
    def key(cls, name: str) -> str:
        """The full name of a key, as the user finds it in the file."""
        return f"{cls.section}.{name}"

    @model_validator(mode="before")
    @classmethod
    def _settle_names_and_auto(cls, values: dict[str, Any]) -> dict[str, Any]:
        settled = dict(values)
        for old, new in cls.old_names.items():
            if old in settled:
                cls._rename(settled, old, new)
        keys = cls.model_fields.keys() - cls.auto_is_a_value
        for name in [name for name, value in settled.items() if value == AUTO and name in keys]:
            if name in cls.must_be_written:
                raise ValueError(
                    f'{cls.key(name)} is "auto", but nothing here can choose it; write its value'
                )
            del settled[name]
        return settled

    @classmethod
    def _rename(cls, values: dict[str, Any], old: str, new: str) -> None:
        value = values.pop(old)
        if values.setdefault(new, value) != value:
            raise ValueError(
                f"{cls.key(old)} is {shown(value)} and {cls.key(new)} is {shown(values[new])}, "
                f"two names of one setting; keep {new}"
            )
        warnings.warn(
            f"{cls.key(old)} is an old name; it is read as {new} here and ignored by DeepSpeed: write {new}",
            OffloadWarning,
            stacklevel=2,
        )

    @classmethod
    def _problems(cls, error: ValidationError) -> list[str]:
        return [cls._problem(details) for details in error.errors(include_url=False)]

    @classmethod
    def _problem(cls, details: ErrorDetails) -> str:
        path = ".".join(str(part) for part in details["loc"])
        if details["type"] == "extra_forbidden":
            return cls._unknown(path)
        if not path:  # a rule across keys: its message names them
            return str(details["ctx"]["error"])
        expected = details["msg"].removeprefix("Value error, ").replace("Input ", "it ")
        default = cls.model_fields[str(details["loc"][0])].default
        return f"{cls.key(path)} is {shown(details['input'])}; {expected} (default: {shown(default)})"

    @classmethod
    def _unknown(cls, name: str) -> str:
        valid = {**cls.model_fields, **cls.old_names}
        nearest = nearest_key(name, valid)
        nearest = cls.old_names.get(nearest, nearest) if nearest else None
        if nearest:
            return f"{cls.key(name)}: no such key; did you mean {nearest}?"
        return f"{cls.key(name)}: no such key; {cls.section} knows {', '.join(cls.model_fields)}"


def shown(value: object) -> str:
    """A value the way the JSON file shows it."""
    return json.dumps(value, default=str)

"""From what a user hands over (a dict, a file, DeepSpeed's base64 text) to one dict."""

import base64
import binascii
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import OffloadConfigError

_HJSON_STARTS = ("{", "#", "//", "/*")


def load(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """The config as a dict of its own, read from whichever form DeepSpeed takes."""
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise OffloadConfigError(
            f"config is a {type(config).__name__}; pass a dict or the path of a JSON file"
        )
    if isinstance(config, str) and not os.path.exists(config) and (text := _decoded(config)):
        return _parsed(text, "config (base64)")
    return _parsed(_text_of(Path(config)), str(config))


def _decoded(text: str) -> str | None:
    """DeepSpeed's launcher passes configs as base64; a path never decodes to a JSON object."""
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise OffloadConfigError(f"{path}: no such config file; check the path") from None
    except IsADirectoryError:
        raise OffloadConfigError(f"{path} is a directory; name the JSON file in it") from None
    except UnicodeDecodeError as error:
        raise OffloadConfigError(
            f"{path}: not text in UTF-8 ({error.reason} at byte {error.start})"
        ) from None
    except (OSError, ValueError) as error:
        raise OffloadConfigError(f"{str(path)!r}: the config file cannot be read: {error}") from None


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        parsed = _parse_as_deepspeed_does(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise OffloadConfigError(f"{name}: not valid JSON at {where}: {error.msg}") from None
    except RecursionError:
        raise OffloadConfigError(f"{name}: nested too deeply to be a config") from None
    except OffloadConfigError as error:
        raise OffloadConfigError(f"{name}: {error}") from None
    if not isinstance(parsed, dict):
        raise OffloadConfigError(
            f"{name}: a config is a JSON object {{...}}, this is a {type(parsed).__name__}"
        )
    return parsed


def _parse_as_deepspeed_does(text: str) -> Any:
    """Strict JSON, else Hjson (comments, trailing commas), which DeepSpeed accepts and brings along."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith(_HJSON_STARTS):
            raise  # Hjson would take any text with colons for an object
        try:
            hjson = importlib.import_module("hjson")
            return hjson.loads(text, object_pairs_hook=_unique_keys)
        except (ImportError, ValueError) as second:
            if isinstance(second, OffloadConfigError):
                raise
            raise error from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) == len(pairs):
        return unique
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    raise OffloadConfigError(f"written twice in one object: {', '.join(twice)}; keep one of each")

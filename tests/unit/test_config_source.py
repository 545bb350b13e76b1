"""Whatever form a config comes in, it is read, or refused with its name and place."""

import base64
import json
import os

import pytest

from offload.config.source import load
from offload.errors import OffloadConfigError

CONFIG = {"aio": {"queue_depth": 8}}


def test_a_dict_is_copied():
    loaded = load(CONFIG)
    loaded["more"] = 1
    assert "more" not in CONFIG


@pytest.mark.parametrize("kind", [str, os.fspath, lambda path: path])
def test_a_file_is_read(tmp_path, kind):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    assert load(kind(path)) == CONFIG


def test_base64_is_read_as_deepspeeds_launcher_passes_it():
    assert load(base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()) == CONFIG


def test_comments_are_read_where_hjson_is_installed(tmp_path):
    pytest.importorskip("hjson")
    path = tmp_path / "ds.json"
    path.write_text('{\n  # a comment\n  "aio": {"queue_depth": 8,},\n}\n')
    assert load(path) == CONFIG


def test_a_byte_order_mark_does_no_harm(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8-sig")
    assert load(path) == CONFIG


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"aio": {"queue_depth": 8}', "line 1, column 27"),
        ('{\n "aio": {\n  "queue_depth": }', "line 3, column 18"),
        ("", "line 1, column 1"),
        ("root:x:0:0:root:/root:/bin/bash\n", "line 1, column 1"),
    ],
)
def test_broken_json_is_refused_with_line_and_column(tmp_path, text, place):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(OffloadConfigError, match=rf"ds.json: not valid JSON at {place}"):
        load(path)


def test_a_key_written_twice_is_refused(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"aio": {"queue_depth": 8, "queue_depth": 9}}')
    with pytest.raises(OffloadConfigError, match=r"ds.json: written twice in one object: queue_depth"):
        load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(OffloadConfigError, match=r"none.json: no such config file"):
        load(tmp_path / "none.json")


def test_a_directory_is_named(tmp_path):
    with pytest.raises(OffloadConfigError, match=r"is a directory"):
        load(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(b'{"a": "\xff\xfe"}')
    with pytest.raises(OffloadConfigError, match="not text in UTF-8"):
        load(path)


@pytest.mark.parametrize("text", ["[1]", "3", '"text"', "null"])
def test_json_that_is_no_object_is_refused(tmp_path, text):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(OffloadConfigError, match="a config is a JSON object"):
        load(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_endless_nesting_is_refused(tmp_path, text):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(OffloadConfigError, match=r"nested too deeply|not valid JSON"):
        load(path)


@pytest.mark.parametrize("config", [None, 3, b"{}", ["ds.json"]])
def test_other_types_are_refused(config):
    with pytest.raises(OffloadConfigError, match="pass a dict or the path"):
        load(config)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_impossible_paths_are_refused(path):
    with pytest.raises(OffloadConfigError, match="cannot be read"):
        load(path)

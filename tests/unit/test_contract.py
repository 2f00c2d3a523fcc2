"""Files on disk: refused by version, written whole, never with NaN."""

import json
from typing import ClassVar

import pytest

from workflow import contract
from workflow.contract import Document, InputError, Strict, canonical_json, digest, write_atomic


class Sample(Document):
    SCHEMA_VERSION: ClassVar[int] = 3

    value: float | None


def test_a_document_comes_back_as_it_was_written(tmp_path):
    written = Sample(schema_version=3, value=0.1)
    written.write(tmp_path / "sample.json")
    assert Sample.read(tmp_path / "sample.json") == written


@pytest.mark.parametrize(("version", "age"), [(2, "an older"), (4, "a newer"), (None, "a newer or unknown")])
def test_another_schema_version_is_refused_by_name(tmp_path, version, age):
    path = tmp_path / "sample.json"
    path.write_text(json.dumps({"schema_version": version, "value": 1.0}))
    with pytest.raises(InputError, match=rf"{age}.*version {version}.*Sample.*allowed: 3"):
        Sample.read(path)


@pytest.mark.parametrize("text", ["{", "", '{"schema_version": 3, "value"'])
def test_a_half_written_file_is_an_error_with_its_path(tmp_path, text):
    path = tmp_path / "sample.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"sample\.json: not JSON"):
        Sample.read(path)


def test_an_unknown_key_is_refused(tmp_path):
    path = tmp_path / "sample.json"
    path.write_text('{"schema_version": 3, "value": 1.0, "valeu": 2.0}')
    with pytest.raises(InputError, match="valeu"):
        Sample.read(path)


def test_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="finite number"):
        Sample(schema_version=3, value=float("nan")).write(tmp_path / "sample.json")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full_disk(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(contract.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_equal_data_has_one_digest_whatever_its_order():
    assert canonical_json({"b": 1, "a": [1, 2]}) == b'{"a":[1,2],"b":1}'
    assert digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
    assert digest({"a": [1, 2]}) != digest({"a": [2, 1]})


def test_models_do_not_turn_text_into_numbers():
    class Number(Strict):
        n: int

    with pytest.raises(ValueError, match="valid integer"):
        Number(n="4")


def test_an_error_says_where_what_and_what_to_do():
    error = InputError("found 'x'", file="f.yaml", line=3, key="a.b", allowed="y, z", do="write y")
    assert str(error) == "f.yaml:3: a.b: found 'x'; allowed: y, z; write y"

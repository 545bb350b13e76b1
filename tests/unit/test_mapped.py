"""A swapped tensor can be used in place, from its file, and the file stays as it is."""

import os

import pytest
import torch

from offload.checkpoint.mapped import mapped_tensor
from offload.errors import OffloadIOError
from offload.swap.layout import Extent

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def stored(path, values, offset=0):
    raw = values.view(torch.uint8).numpy().tobytes()
    path.write_bytes(bytes(offset) + raw + b"tail")
    return Extent(str(path), offset, len(raw), "exp_avg of sub-group 1")


@pytest.mark.parametrize("offset", [0, 4096, 12288])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tensor_has_the_values_of_the_extent(tmp_path, offset, dtype):
    values = torch.arange(1001).to(dtype)
    assert torch.equal(mapped_tensor(stored(tmp_path / "a", values, offset), dtype), values)


def test_writing_to_the_tensor_changes_no_file(tmp_path):
    values = torch.randn(3000)
    extent = stored(tmp_path / "a", values)
    before = (tmp_path / "a").read_bytes()
    mapped_tensor(extent, torch.float32).zero_()
    assert (tmp_path / "a").read_bytes() == before


def test_the_values_outlive_the_name_of_the_file(tmp_path):
    values = torch.randn(3000)
    mapped = mapped_tensor(stored(tmp_path / "a", values), torch.float32)
    (tmp_path / "a").unlink()
    assert torch.equal(mapped, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mapped_tensor_saves_as_its_values_alone(tmp_path, dtype):
    values = torch.arange(1001).to(dtype)
    torch.save(mapped_tensor(stored(tmp_path / "a", values, 4096), dtype).clone(), tmp_path / "saved.pt")
    assert torch.equal(torch.load(tmp_path / "saved.pt"), values)


def test_a_file_that_is_too_short_is_an_error_with_name_path_and_sizes(tmp_path):
    extent = stored(tmp_path / "a", torch.randn(3000), 4096)
    os.truncate(tmp_path / "a", 5000)
    with pytest.raises(OffloadIOError, match=r"exp_avg of sub-group 1.* 16096 B .* 5000 B") as caught:
        mapped_tensor(extent, torch.float32)
    assert caught.value.filename == str(tmp_path / "a")


def test_a_missing_file_is_an_error_with_its_name(tmp_path):
    with pytest.raises(OffloadIOError, match="exp_avg") as caught:
        mapped_tensor(Extent(str(tmp_path / "a"), 0, 4, "exp_avg"), torch.float32)
    assert caught.value.filename == str(tmp_path / "a")

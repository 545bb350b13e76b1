import pytest
import torch


@pytest.mark.parametrize(
    "tensor, reason",
    [
        (torch.empty(4, 4).t(), "contiguous"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
    ],
)
def test_tensors_without_plain_bytes_are_refused(handle, tmp_path, tensor, reason):
    for call in (handle.read, handle.write):
        with pytest.raises(ValueError, match=reason):
            call(tensor, tmp_path / "x")
    with pytest.raises(TypeError):
        handle.write(b"bytes", tmp_path / "x")


def test_parameters_move_without_a_gradient(handle, tmp_path):
    parameter = torch.nn.Parameter(torch.randn(1000))
    handle.write(parameter, tmp_path / "p").wait()
    other = torch.nn.Parameter(torch.zeros(1000))
    handle.read(other, tmp_path / "p").wait()
    assert torch.equal(parameter, other) and other.grad_fn is None

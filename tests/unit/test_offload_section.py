"""Our own `offload` section: closed, so that a typing mistake never passes."""

import pytest

from offload.config import OffloadConfig
from offload.errors import OffloadConfigError


@pytest.mark.parametrize("backend", ["auto", "uring", "libaio", "posix"])
def test_every_backend_can_be_chosen(backend):
    assert OffloadConfig(backend=backend).backend == backend


def test_the_default_backend_is_auto():
    assert OffloadConfig().backend == "auto"


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(OffloadConfigError, match=r"offload.backend is \"io_uring\".*'uring'"):
        OffloadConfig(backend="io_uring")


def test_an_unknown_key_is_refused_with_the_nearest_one():
    with pytest.raises(OffloadConfigError, match=r"offload.backends: no such key; did you mean backend\?"):
        OffloadConfig(backends="uring")


@pytest.mark.parametrize(
    "written, read", [(0, 0), ("1048576", 1 << 20), (1 << 40, 1 << 40), ("auto", "auto")]
)
def test_the_host_cache_is_a_number_of_bytes_or_auto(written, read):
    assert OffloadConfig.parse({"host_cache": written}).host_cache == read


@pytest.mark.parametrize("written", [-1, True, 0.5, "half", None])
def test_any_other_host_cache_is_refused_by_name(written):
    with pytest.raises(OffloadConfigError, match=r"offload.host_cache is .*; it should be a number of bytes"):
        OffloadConfig.parse({"host_cache": written})

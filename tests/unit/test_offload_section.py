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

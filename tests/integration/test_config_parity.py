"""Our models take every key that the installed DeepSpeed takes, with its defaults."""

import pytest

from offload.config import AioConfig, OffloadOptimizerConfig, OffloadParamConfig

zero = pytest.importorskip("deepspeed.runtime.zero.offload_config")
aio = pytest.importorskip("deepspeed.runtime.swap_tensor.aio_config")

OURS_DIFFER = {"queue_depth": 64}


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        (zero.DeepSpeedZeroOffloadParamConfig, OffloadParamConfig),
        (zero.DeepSpeedZeroOffloadOptimizerConfig, OffloadOptimizerConfig),
    ],
)
def test_offload_sections_have_deepspeeds_keys_and_defaults(stock, ours):
    assert {name: field.default for name, field in ours.model_fields.items()} == {
        name: field.default for name, field in stock.model_fields.items()
    }


def test_aio_has_deepspeeds_keys_and_defaults_but_for_the_depth():
    assert AioConfig().model_dump() == aio.AIO_DEFAULT_DICT | OURS_DIFFER

"""The model section: types that fit together."""

import pytest

from qerl.config.load import load_config
from qerl.errors import ConfigError
from qerl.train.resume import MAY_DIFFER


def test_attention_in_float16_is_for_products_in_bfloat16():
    assert load_config(None, []).model.attention_dtype == "compute"
    assert load_config(None, ["model.attention_dtype=float16"]).model.attention_dtype == "float16"
    with pytest.raises(ConfigError, match=r"less than model\.dtype=float32: set model\.attention_dtype=compute"):
        load_config(None, ["model.attention_dtype=float16", "model.dtype=float32"])
    assert not {"model", "model.attention_dtype"} & set(MAY_DIFFER), "a run keeps it when it is resumed"

"""The quantization section: choices that fit together, and agree with the formats that there are."""

import typing

import pytest

from qerl.config.load import load_config
from qerl.config.schema import QuantConfig
from qerl.errors import ConfigError
from qerl.formats import FORMAT_NAMES, get_format


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["quant.format=nvfp5"], "nvfp4"),
        (["quant.double_quant=true"], "double_quant is about nf4"),
        (["quant.method=four_over_six", "quant.format=nf4"], "method of nvfp4 and cannot quantize nf4"),
        (["quant.method=four_over_six", 'quant.overrides={"layers.0.*": mxfp4}'], "cannot quantize mxfp4"),
        (["quant.lm_head=mxfp4"], "lm_head"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, settings)


def choices(field: str) -> tuple[str, ...]:
    return typing.get_args(QuantConfig.model_fields[field].annotation)


def test_every_choice_exists_and_every_method_is_a_method_of_some_format():
    assert set(choices("format")) | set(choices("lm_head")) | {"nf4_dq"} == set(FORMAT_NAMES)
    assert set(choices("method")) == {method for name in FORMAT_NAMES for method in get_format(name).methods}
    for name in choices("format"):
        for method in choices("method"):
            if method in get_format(name).methods:
                assert load_config(None, [f"quant.format={name}", f"quant.method={method}"]).quant.method == method
            else:
                with pytest.raises(ConfigError, match=method):
                    load_config(None, [f"quant.format={name}", f"quant.method={method}"])


def test_double_quantization_names_another_stored_format():
    assert QuantConfig(format="nf4").storage("nf4") == "nf4"
    assert QuantConfig(format="nf4", double_quant=True).storage("nf4") == "nf4_dq"
    assert QuantConfig(overrides={"*": "nf4"}, double_quant=True).storage("nvfp4") == "nvfp4"

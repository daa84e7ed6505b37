"""Offsets that 32 bits do not hold are found in Triton's intermediate code (`triton_compile.py` looks for them in every kernel)."""

import pytest
from addresses import growing_offsets

CODE = """module {{
  tt.func public @f(%x: !tt.ptr<f32> loc("x"(#loc)), %width: i32 loc("width"(#loc))) attributes {{noinline = false}} {{
    %c = arith.constant {constant} : i32 loc(#loc1)
    %row = tt.get_program_id {axis} : i32 loc(#loc2)
    %wide = arith.extsi %row : i32 to i64 loc(#loc3)
    %wide_width = arith.extsi %width : i32 to i64 loc(#loc3)
    %columns = tt.make_range {{end = 128 : i32, start = 0 : i32}} : tensor<128xi32> loc(#loc4)
    %p = arith.muli {product} loc(#loc5)
    %q = tt.addptr %x, %p : !tt.ptr<f32>, {kind} loc(#loc6)
    %many = tt.splat %q : !tt.ptr<f32> -> tensor<128x!tt.ptr<f32>> loc(#loc7)
    %places = tt.addptr %many, %columns : tensor<128x!tt.ptr<f32>>, tensor<128xi32> loc(#loc7)
  }}
}}"""


@pytest.mark.parametrize(
    ("product", "kind", "axis", "constant", "grows"),
    [
        ("%row, %width : i32", "i32", "x", 3584, True),
        ("%width, %row : i32", "i32", "y", 3584, True),
        ("%row, %c : i32", "i32", "x", 3584, True),
        ("%row, %c : i32", "i32", "x", 128, False),  # of a grid as large as there are elements
        ("%row, %c : i32", "i32", "y", 3584, False),  # 65,535 programs at most
        ("%wide, %wide_width : i64", "i64", "x", 3584, False),
    ],
)
def test_a_row_times_a_width_in_32_bits_is_found(product, kind, axis, constant, grows):
    found = growing_offsets(CODE.format(product=product, kind=kind, axis=axis, constant=constant))
    assert [line.split()[0] for line in found] == (["%q"] if grows else [])

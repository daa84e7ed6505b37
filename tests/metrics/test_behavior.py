import math
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qerl.metrics.behavior import behavior_rows, behavior_schema, read_behavior, read_run_facts
from qerl.metrics.run_dir import RunDir
from qerl.model.aqn import NoiseState
from qerl.records import Completion, Group, Outcome, PolicyState, Prompt, Rollout, SamplingSpec, Score


def float32(value: float) -> float:
    """The nearest float32, as the engine records it."""
    return struct.unpack("f", struct.pack("f", value))[0]


def prompt(name: str) -> Prompt:
    return Prompt(id=name, question=f"What is {name}?", answer="4", text="rendered", token_ids=(5, 6, 7))


def completion(of: Prompt, key: int, tokens: tuple[int, ...], stop: str = "stop") -> Completion:
    return Completion(
        prompt=of,
        sample_key=key,
        token_ids=tokens,
        text="answer — ≠ 四",
        behavior_logprobs=tuple(float32(-math.sqrt(token + key + 0.1)) for token in tokens),
        sampler_logprobs=tuple(float32(-0.1 * token) for token in tokens),
        stop_reason=stop,
    )


def rollout(noise: NoiseState | None) -> tuple[Rollout, list[Group]]:
    prompts = [prompt("one"), prompt("two")]
    completions = (
        completion(prompts[0], 0, (1, 2, 3)),
        completion(prompts[0], 1, (9,), "length"),
        completion(prompts[1], 2, (2**31 - 1, 4)),
        completion(prompts[1], 3, (4, 4)),
    )
    scores = (
        Score(reward=1.0, parts={"accuracy": 1.0, "overlong": -0.25}, outcome=Outcome.CORRECT, parsed="4"),
        Score(reward=0.1, parts={"accuracy": 0.0, "overlong": 0.1}, outcome=Outcome.TRUNCATED, parsed=None),
        Score(reward=None, parts={"accuracy": None}, outcome=Outcome.UNSCORABLE, parsed=None, note="timed out"),
        Score(reward=0.0, parts={"accuracy": 0.0}, outcome=Outcome.WRONG, parsed="5"),
    )
    made = Rollout(
        index=11,
        group_size=2,
        completions=completions,
        sampling=SamplingSpec(
            temperature=0.7, top_p=0.9, top_k=50, min_p=0.01, max_new_tokens=64, seed=2**63, rollout=11
        ),
        policy=PolicyState(
            policy_version=22, adapter_hash="aa", norm_hash="bb", base_format="nvfp4", base_hash="cc", noise=noise
        ),
        engine="plain",
        kernels={"fp4_linear": "reference", "attention": "reference"},
        cache_state="empty",
        stats={"seconds": 1.0},
    )
    groups = [
        Group(prompt=prompts[i], completions=completions[2 * i : 2 * i + 2], scores=scores[2 * i : 2 * i + 2])
        for i in (0, 1)
    ]
    return made, groups


KEPT = (True, False)
"""Of the two groups, the first was trained on."""

NOISE = NoiseState(seed=2**64 - 1, rollout=11, stage=3, sigma=0.0123456789, sites=("attn_norm", "mlp_norm"))


FULL_NOISE = NoiseState(
    seed=5,
    rollout=11,
    scope="group",
    stage=3,
    sigma=0.1,
    sites=("attn_norm", "qk_norm"),
    magnitude="sensitivity",
    group_size=2,
    prompt="clean",
    sharing="independent",
    factor=1.25,
    site_scales=(0.5, 1.7),
)
WALK = NoiseState(
    seed=5,
    rollout=11,
    stage=3,
    sigma=0.1,
    sites=("attn_norm",),
    mode="accumulate",
    kl_target=None,
    history=((0, 0.0), (4, 0.3), (9, 0.1)),
)


@pytest.mark.parametrize("noise", [NOISE, FULL_NOISE, WALK])
def test_the_noise_state_comes_back_from_any_row(tmp_path, noise):
    path = RunDir.create(tmp_path).write_rollout_parquet(11, behavior_rows(*rollout(noise), KEPT))
    rows = read_behavior(path)
    assert [NoiseState.from_dict(row["noise"]) for row in rows] == [noise] * 4
    keys = {"rollout": [0, 0, 0, 0], "group": [0, 0, 1, 1]}[noise.scope]
    assert [row["noise"]["key"] for row in rows] == keys


@pytest.mark.parametrize("noise", [None, NOISE, FULL_NOISE, WALK])
def test_rows_come_back_from_the_file_exactly_as_they_went_in(tmp_path, noise):
    run = RunDir.create(tmp_path)
    rows = behavior_rows(*rollout(noise), KEPT)
    facts = {"checkpoint": "/models/demo", "tokenizer_hash": "dd"}
    path = run.write_rollout_parquet(11, rows, run_facts=facts)
    assert path == tmp_path / "rollouts" / "rollout-000011.parquet"
    assert read_behavior(path) == rows
    assert read_run_facts(path) == facts


def test_a_row_says_what_the_sample_was_drawn_from():
    made, groups = rollout(NOISE)
    rows = behavior_rows(made, groups, KEPT)
    assert [row["sample_key"] for row in rows] == [0, 1, 2, 3]
    assert [row["in_batch"] for row in rows] == [True, True, False, False]
    row = rows[1]
    assert row["prompt_id"] == "one"
    assert row["prompt_token_ids"] == [5, 6, 7]
    assert row["token_ids"] == [9]
    assert row["completion_mask"] == [1]
    assert row["behavior_logprobs"] == list(made.completions[1].behavior_logprobs)
    assert row["stop_reason"] == "length"
    assert (row["reward"], row["outcome"], row["parsed"]) == (0.1, "truncated", None)
    assert row["policy_version"] == 22
    assert row["noise"] == {
        "seed": 2**64 - 1,
        "stream": "noise",
        "rollout": 11,
        "scope": "rollout",
        "key": 0,
        "stage": 3,
        "sigma": 0.0123456789,
        "magnitude": "absolute",
        "sites": ["attn_norm", "mlp_norm"],
        "group_size": 1,
        "prompt": "noisy",
        "mode": "replace",
        "sharing": "shared",
        "factor": 1.0,
        "site_scales": [],
        "kl_target": None,
        "history": [],
    }
    assert row["sampling"]["top_k"] == 50
    assert rows[2]["note"] == "timed out"
    assert rows[2]["parts"] == {"accuracy": None}


def test_column_types_do_not_depend_on_the_rows(tmp_path):
    run = RunDir.create(tmp_path)
    paths = [
        run.write_rollout_parquet(i, behavior_rows(*rollout(noise), KEPT)) for i, noise in enumerate((None, NOISE))
    ]
    paths.append(run.write_rollout_parquet(2, []))
    for path in paths:
        assert pq.read_schema(path).remove_metadata() == behavior_schema()
    assert behavior_schema().field("behavior_logprobs").type == pa.list_(pa.float32())
    assert pa.concat_tables([pq.read_table(path) for path in paths]).num_rows == 8


def test_a_missing_column_is_caught_and_leaves_no_file(tmp_path):
    run = RunDir.create(tmp_path)
    rows = behavior_rows(*rollout(None), KEPT)
    del rows[1]["base_hash"]
    with pytest.raises(AssertionError, match="base_hash"):
        run.write_rollout_parquet(0, rows)
    assert list(run.rollouts_dir.iterdir()) == []
    assert run.rollout_paths() == []


def test_chosen_columns_are_read_alone(tmp_path):
    run = RunDir.create(tmp_path)
    path = run.write_rollout_parquet(0, behavior_rows(*rollout(None), KEPT))
    assert read_behavior(path, ["prompt_id", "parts"])[0] == {
        "prompt_id": "one",
        "parts": {"accuracy": 1.0, "overlong": -0.25},
    }

"""Several suites and checkpoints in one go, adapters that must change something, clean against noisy."""

import json
from dataclasses import asdict

import pytest

from qerl.config.load import load_config
from qerl.data.synthetic import arithmetic_problems
from qerl.errors import ConfigError, RunFolderError
from qerl.eval.files import suite_name, suite_names
from qerl.metrics.behavior import read_behavior
from qerl.metrics.run_dir import RunDir
from qerl.train.deployment import choose_targets, measure
from qerl.train.noise.deployed import NoiseRequest
from qerl.train.rescore import rescore
from qerl.train.run import train
from qerl.train.standalone import sample_target
from qerl.train.target import resolve_target

SETTINGS = [
    "model.path=demo",
    "model.dtype=float32",
    "data.eval_limit=8",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_prompt_tokens=96",
    "rollout.max_new_tokens=40",
    "lora.rank=4",
    "optim.lr=3e-3",
    "train.steps=2",
    "train.save_every=1",
    "eval.every=0",
    "aqn.num_stages=2",
    "aqn.sigma_start=0.3",
    "diagnostics.canary=false",
    "log.progress=off",
    "run.name=tiny",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("deployment")
    for split in ("train", "test"):
        rows = [asdict(problem) for problem in arithmetic_problems(split, 16)]
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = [f"data.train={path}", f"data.eval={path}", f"run.dir={path}"]
    train(load_config(None, [*SETTINGS, *where]))
    return path


def run(folder, targets, suites=(), noise=None):
    told = []
    return measure(targets, suites, noise=noise, warn=told.append), told


def test_base_and_all_checkpoints_on_two_suites_in_one_go(folder):
    targets = choose_targets(str(folder / "tiny"), checkpoints="all", base=True)
    assert [name for name, _ in targets] == ["base", "checkpoint-1", "checkpoint-2"]
    found, told = run(folder, targets, (str(folder / "test.jsonl"), str(folder / "train.jsonl")))
    assert told == []
    assert [(m.policy, m.suite) for m in found.measurements] == [
        (policy, suite) for policy in ("base", "checkpoint-1", "checkpoint-2") for suite in ("test", "train")
    ]
    # The same protocol for all, and the run's own evaluations come out again.
    assert len({json.dumps(m.result.policy | {"adapters": 0}) for m in found.measurements}) == 1
    kept = RunDir(folder / "tiny")
    for index, step in ((0, 0), (4, 2)):
        rows = kept.read_evaluation(step)
        assert [r["answers"] for r in found.measurements[index].result.rows] == [r["answers"] for r in rows]
    assert [effect.dead for effect in found.effects] == [False, False]
    assert all(effect.mean_kl > 0 for effect in found.effects)
    assert [(c.suite, c.first, c.second) for c in found.comparisons] == [
        ("test", "base", "checkpoint-1"),
        ("test", "base", "checkpoint-2"),
        ("train", "base", "checkpoint-1"),
        ("train", "base", "checkpoint-2"),
    ]


def test_each_policy_alone_gives_what_it_gave_among_others(folder):
    among, _ = run(folder, choose_targets(str(folder / "tiny"), checkpoints="1,2", base=True))
    for name, options in (("base", {"base": True}), ("checkpoint-1", {"checkpoints": "1"}), ("checkpoint-2", {})):
        alone, _ = run(folder, choose_targets(str(folder / "tiny"), **options))
        (same,) = [m for m in among.measurements if m.policy == name]
        assert alone.measurements[0].result.rows == same.result.rows


def test_noise_is_keyed_by_draw_and_held_against_the_clean_policy(folder):
    targets = choose_targets(str(folder / "tiny"), base=True, checkpoints="2")
    found, _ = run(folder, targets, noise=NoiseRequest(draws=2))
    assert [m.policy for m in found.measurements] == [
        "base",
        "checkpoint-2",
        "checkpoint-2, noise draw 0",
        "checkpoint-2, noise draw 1",
    ]
    (spread,) = found.spreads
    assert [key["stream"] for key in spread.keys] == ["eval_noise", "eval_noise/1"]
    assert spread.sigma == pytest.approx(0.3)
    assert spread.mean == pytest.approx(sum(spread.accuracies) / 2)
    clean = found.measurements[1].result
    assert spread.against_clean.difference == pytest.approx(spread.mean - clean.accuracy)
    texts = [[row["answers"][0]["text"] for row in m.result.rows] for m in found.measurements[1:]]
    assert texts[0] != texts[1] != texts[2] != texts[0]
    again, _ = run(folder, targets, noise=NoiseRequest(draws=2))
    assert again.spreads == found.spreads


def test_a_run_trained_with_noise_ends_with_its_noisy_accuracy_against_the_clean_one(folder):
    kept = RunDir(folder / "tiny")
    stated = kept.read_json(kept.summary_path)["noisy"]
    found, _ = run(folder, choose_targets(str(folder / "tiny")), noise=NoiseRequest(draws=1))
    (spread,) = found.spreads
    assert stated["keys"] == [dict(key) for key in json.loads(json.dumps(spread.keys))]
    assert stated["mean"] == spread.mean
    assert stated["against_clean"]["difference"] == spread.against_clean.difference
    assert stated["against_clean"]["low"] <= stated["against_clean"]["difference"] <= stated["against_clean"]["high"]
    rows = (kept.evaluations_dir / "step-000002-noise0.jsonl").read_text().splitlines()
    assert [json.loads(row)["answers"] for row in rows] == [r["answers"] for r in found.measurements[1].result.rows]
    assert kept.evaluation_steps() == [0, 2]
    last = kept.read_metrics()[-1]
    assert last["eval/noisy_accuracy"] == spread.mean
    assert "eval/noisy_accuracy" not in kept.read_metrics()[0]


@pytest.mark.parametrize(
    "settings",
    [
        ("aqn.mode=accumulate",),
        ("aqn.magnitude=kl", "aqn.sigma_start=0.1", "aqn.sigma_end=0.01"),
        ("aqn.magnitude=sensitivity", "aqn.scope=response", "aqn.prompt=clean"),
        ("aqn.sharing=independent", "aqn.match_budget=true"),
    ],
    ids=lambda settings: settings[0],
)
def test_every_kind_of_noise_is_deployed_as_the_run_deployed_it(folder, tmp_path, settings):
    where = [
        f"data.train={folder}",
        f"data.eval={folder}",
        f"run.dir={tmp_path}",
        "eval.before=false",
        "data.eval_limit=4",
    ]
    train(load_config(None, [*SETTINGS, *where, *settings]))
    stated = RunDir(tmp_path / "tiny").read_json("summary.json")["noisy"]
    found, _ = run(folder, choose_targets(str(tmp_path / "tiny")), noise=NoiseRequest(draws=1))
    (spread,) = found.spreads
    assert stated["keys"] == json.loads(json.dumps(spread.keys))
    assert stated["accuracies"] == list(spread.accuracies)
    kept = (tmp_path / "tiny" / "evaluations" / "step-000002-noise0.jsonl").read_text().splitlines()
    assert [json.loads(row)["answers"] for row in kept] == [r["answers"] for r in found.measurements[1].result.rows]


def sampled(target, out, settings=(), **asked):
    """(texts, record of the noise) of what `qerl rollout` writes."""
    said = []
    facts = sample_target(resolve_target(str(target), settings), samples=2, limit=3, out=out, warn=said.append, **asked)
    rows = read_behavior(RunDir(out).rollout_path(0))
    assert len({json.dumps({**(row["noise"] or {}), "key": 0}) for row in rows}) == 1
    return [row["text"] for row in rows], rows[0]["noise"], facts["noise"], said


def test_rollouts_are_sampled_with_the_noise_that_evaluations_measure_and_record_it(folder, tmp_path):
    asked = ("eval.noise=true", "aqn.scope=response")
    texts, noise, words, _ = sampled(folder / "tiny", tmp_path / "noisy", asked)
    found, _ = run(folder, choose_targets(str(folder / "tiny"), asked), noise=NoiseRequest(draws=1))
    (expected,) = json.loads(json.dumps(found.spreads[0].keys))
    assert {name: noise[name] for name in expected} == expected | {"group_size": 2}
    assert words == "scope response, sigma 0.3"
    clean, nothing, words, _ = sampled(folder / "tiny", tmp_path / "clean")
    assert (nothing, words) == (None, "none") and clean != texts
    other, noise, _, _ = sampled(folder / "tiny", tmp_path / "other", asked, sigma=0.1)
    assert noise["sigma"] == 0.1 and other not in (texts, clean)
    silent, noise, words, said = sampled(folder / "tiny", tmp_path / "silent", asked, sigma=0.0)
    assert (silent, noise, words) == (clean, None, "none") and any("sigma 0" in text for text in said)


def test_a_model_that_was_not_trained_with_noise_is_sampled_with_a_level_that_is_given(tmp_path):
    settings = (
        "data.train=arithmetic",
        "rollout.max_prompt_tokens=96",
        "rollout.max_new_tokens=12",
        "model.dtype=float32",
    )
    with pytest.raises(ConfigError, match=r"eval.noise=true without --sigma.*--sigma 0.01, or set eval.noise=false"):
        sampled("demo", tmp_path / "refused", (*settings, "eval.noise=true", "aqn.sigma_start=0.5"))
    with pytest.raises(ConfigError, match="--sigma is no level of noise; got inf"):
        sampled("demo", tmp_path / "refused", settings, sigma=float("inf"))
    assert not (tmp_path / "refused").exists()
    texts, noise, _, _ = sampled("demo", tmp_path / "noisy", (*settings, "eval.noise=true"), sigma=0.3)
    assert noise["sigma"] == 0.3
    assert sampled("demo", tmp_path / "same", settings, sigma=0.3)[:2] == (texts, noise)
    replayed = rescore(tmp_path / "noisy")
    assert replayed.noise == "scope rollout, stage 0, sigma 0.3" and replayed.largest < 1e-4


def test_a_run_can_do_without_its_noisy_accuracy(folder, tmp_path):
    where = [f"data.train={folder}", f"data.eval={folder}", f"run.dir={tmp_path}"]
    for change in ("eval.noisy_draws=0", "aqn.enabled=false", "eval.noise=true"):
        train(
            load_config(None, [*SETTINGS, *where, change, f"run.name={change}", "train.steps=1", "eval.before=false"])
        )
        kept = RunDir(tmp_path / change)
        assert kept.read_json(kept.summary_path)["noisy"] is None
        assert [path.name for path in kept.evaluations_dir.iterdir()] == ["step-000001.jsonl"]


def test_a_sigma_of_ones_own_reaches_the_base_too_and_zero_is_clean(folder):
    targets = choose_targets(str(folder / "tiny"), base=True)
    found, _ = run(folder, targets, noise=NoiseRequest(draws=1, sigma=0.5))
    assert found.spreads[0].sigma == 0.5
    clean, noisy = (m.result.rows for m in found.measurements)
    assert clean != noisy
    found, told = run(folder, targets, noise=NoiseRequest(draws=1, sigma=0.0))
    assert found.spreads == ()
    assert "sigma 0" in told[0]
    with pytest.raises(ConfigError, match="no policy here was trained with any"):
        run(folder, targets, noise=NoiseRequest(draws=1))


def test_an_adapter_that_changes_nothing_is_told(folder):
    adapter = RunDir(folder / "tiny").adapter_path(0)
    settings = [*SETTINGS[1:], "quant.format=nvfp4", f"data.eval={folder}"]
    found, told = run(folder, choose_targets("demo", settings, adapter=adapter))
    assert found.effects[0].dead
    assert "changes no logit of the base" in told[0]


def test_checkpoints_are_named_by_step_or_all(folder, tmp_path):
    with pytest.raises(ConfigError, match="50,100, or all"):
        choose_targets(str(folder / "tiny"), checkpoints="newest")
    with pytest.raises(RunFolderError, match="a step of 1, 2"):
        choose_targets(str(folder / "tiny"), checkpoints="1,7")
    RunDir.create(tmp_path / "empty").write_text("config.resolved.yaml", "")
    with pytest.raises(RunFolderError, match="no checkpoint"):
        choose_targets(str(tmp_path / "empty"), checkpoints="all")


def test_suites_are_called_by_name_or_by_the_stem_of_their_file():
    assert [suite_name(s) for s in ("gsm8k", "gsm8k:train", "data/x.jsonl", "openai/gsm8k", "folder/svamp")] == [
        "gsm8k",
        "gsm8k:train",
        "x",
        "gsm8k",
        "svamp",
    ]


def test_data_sets_of_one_stem_are_told_apart_by_their_folders():
    sources = ["a/test.jsonl", "b/test.jsonl", "/x/b/test.jsonl", "gsm8k", "one/gsm8k"]
    assert list(suite_names(sources).values()) == ["a-test", "b-test", "x-b-test", "gsm8k", "one-gsm8k"]
    assert suite_names(["data/test.jsonl", "gsm8k:train"]) == {"data/test.jsonl": "test", "gsm8k:train": "gsm8k:train"}


def test_checkpoints_of_full_mode_are_models_of_their_own(folder, tmp_path):
    where = [f"data.train={folder}", f"data.eval={folder}", f"run.dir={tmp_path}", "quant.format=bf16"]
    settings = [setting for setting in SETTINGS if not setting.startswith("lora.")]
    train(load_config(None, [*settings, *where, "train.mode=full", "eval.before=false"]))
    targets = choose_targets(str(tmp_path / "tiny"), checkpoints="all", base=True)
    found, _ = run(folder, targets, noise=NoiseRequest(draws=1))
    assert [m.policy for m in found.measurements] == [
        "base",
        "checkpoint-1",
        "checkpoint-1, noise draw 0",
        "checkpoint-2",
        "checkpoint-2, noise draw 0",
    ]
    after = RunDir(tmp_path / "tiny").read_evaluation(2)
    assert [r["answers"] for r in found.measurements[3].result.rows] == [r["answers"] for r in after]
    assert [name for name, _ in choose_targets(str(tmp_path / "tiny"))] == ["checkpoint-2"]

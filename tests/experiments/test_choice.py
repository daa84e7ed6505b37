from qerl.experiments.choice import best_recipe

AXES = {"low": {"optim.lr": 1e-5}, "high": {"optim.lr": 1e-4}}


def test_the_best_mean_over_tuning_seeds_is_chosen():
    found = best_recipe({"low": [0.30, 0.32], "high": [0.40, 0.20]}, AXES)
    assert found["axes"] == {"optim.lr": 1e-5}
    assert abs(found["score"] - 0.31) < 1e-12
    assert (found["trials"], found["failed"]) == (4, 0)


def test_a_recipe_with_a_failed_trial_counts_and_cannot_be_chosen():
    found = best_recipe({"low": [0.30, 0.32], "high": [0.90, None]}, AXES)
    assert found["axes"] == {"optim.lr": 1e-5}
    assert (found["trials"], found["failed"]) == (4, 1)


def test_the_first_of_equals_is_chosen():
    assert best_recipe({"low": [0.3], "high": [0.3]}, AXES)["axes"] == {"optim.lr": 1e-5}


def test_nothing_is_chosen_when_all_failed():
    found = best_recipe({"low": [None], "high": [None]}, AXES)
    assert found["axes"] is None and found["score"] is None and found["failed"] == 2

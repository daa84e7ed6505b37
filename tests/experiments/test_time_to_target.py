from qerl.experiments.time_to_target import time_to_target


def point(step, accuracy, seconds, devices=1):
    return {
        "step": step,
        "accuracy": accuracy,
        "train_seconds": seconds,
        "device_seconds": None if devices is None else seconds * devices,
        "wall_seconds": None if step == 0 else seconds + 30.0,
        "tokens": step * 1000,
        "samples": step * 256,
    }


RUN = [
    point(0, 0.27, 0.0),
    point(20, 0.38, 60.0),
    point(40, 0.46, 120.0),
    point(60, 0.44, 180.0),
    point(80, 0.47, 240.0),
]


def test_the_first_evaluation_at_the_target_counts_even_if_it_is_lost_again():
    found = time_to_target(RUN, 0.45)
    assert (found.reached, found.step) == (True, 40)
    assert found.spent == {"wall_seconds": 150.0, "device_seconds": 120.0, "tokens": 40_000, "samples": 10_240}
    assert set(found.bound.values()) == {None}


def test_equal_to_the_target_is_enough_and_order_does_not_matter():
    assert time_to_target(RUN[::-1], 0.46).step == 40


def test_a_run_that_never_gets_there_is_censored_at_its_last_evaluation():
    found = time_to_target(RUN, 0.5)
    assert (found.reached, found.step) == (False, None)
    assert set(found.spent.values()) == {None}
    assert found.bound == {"wall_seconds": 270.0, "device_seconds": 240.0, "tokens": 80_000, "samples": 20_480}


def test_what_comes_after_the_budget_does_not_count():
    found = time_to_target(RUN, 0.45, budget=119.0)
    assert not found.reached
    assert found.bound["device_seconds"] == 60.0
    assert time_to_target(RUN, 0.45, budget=120.0).step == 40


def test_two_devices_cost_twice():
    doubled = [point(p["step"], p["accuracy"], p["train_seconds"], devices=2) for p in RUN]
    assert time_to_target(doubled, 0.45).spent["device_seconds"] == 240.0
    assert not time_to_target(doubled, 0.45, budget=200.0).reached


def test_without_a_gpu_the_seconds_of_training_count():
    on_cpu = [point(p["step"], p["accuracy"], p["train_seconds"], devices=None) for p in RUN]
    assert time_to_target(on_cpu, 0.45).spent["device_seconds"] == 120.0


def test_a_base_that_is_good_enough_costs_nothing():
    assert time_to_target(RUN, 0.2).spent["device_seconds"] == 0.0


def test_a_run_without_evaluations_reaches_nothing():
    found = time_to_target([], 0.2)
    assert (found.reached, set(found.bound.values())) == (False, {None})

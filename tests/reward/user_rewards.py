"""Reward functions as a user might write them, good and bad."""

import os
import time


def length(completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def echo(prompts, completions, completion_ids, answer, level, **kwargs):
    """1 where every keyword list holds what it should."""
    assert "question" in kwargs
    return [
        float(p == "<user>How many?<assistant>" and ids == [0, 1, 2, 3, 4] and a == "18" and n == 3)
        for p, ids, a, n in zip(prompts, completion_ids, answer, level, strict=True)
    ]


def moody(completions, **kwargs):
    print("standard output of a user function")
    values = []
    for text in completions:
        if text == "raise":
            raise KeyError("no such thing")
        if text == "hang":
            time.sleep(60)
        if text == "die":
            os._exit(3)
        values.append({"none": None, "nan": float("nan"), "text": "much", "bool": True}.get(text, 0.5))
    return values


def hang(completions):
    time.sleep(60)


def too_few(completions):
    return [1.0]


def a_number(completions):
    return 1.0


def arrays(completions):
    import numpy

    return numpy.arange(len(completions), dtype=numpy.float32)


not_callable = 5

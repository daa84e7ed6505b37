"""Generation and training take turns on one device: a hundred turns leave nothing behind, and changing over is quick."""

import gc
import time

import pytest
import torch

from qerl import memory
from qerl.config.load import load_config
from qerl.kernels.cuda import lent_bytes
from qerl.objective.batch import Sample
from qerl.records import Prompt, SamplingSpec
from qerl.train.learn import learn
from qerl.train.optimizer import make_optimizer
from qerl.train.session import open_session
from qerl.train.timing import StageTimer

SETTINGS = (
    "model.path=demo",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_prompt_tokens=8",
    "rollout.max_new_tokens=6",
    "lora.rank=2",
    "train.token_budget=20",
    "train.checkpointing=full",
)
PROMPTS = [Prompt(id=str(i), question="", answer="", text="", token_ids=(5 + i, 6, 7, 8)) for i in range(2)]


class Turns:
    """A session that samples and learns in turn."""

    def __init__(self, *settings):
        self.config = load_config(None, [*SETTINGS, *settings])
        self.session = open_session(self.config)
        self.optimizer = make_optimizer(self.session.model.trainable_parameters(), self.config.optim)
        self.timer = StageTimer(self.session.device)
        self.done = 0

    def sample(self):
        sampling = SamplingSpec(temperature=1.0, max_new_tokens=6, seed=0, rollout=self.done)
        completions, self.stats = self.session.engine.generate(PROMPTS, sampling, group_size=2)
        return completions

    def give_back(self):
        if self.config.rollout.keep_cache == "off":
            self.session.engine.release()
            memory.return_unused(self.session.device)

    def turn(self):
        answers = [
            Sample(completion=completion, advantage=(-1.0) ** key, in_loss=True)
            for key, completion in enumerate(self.sample())
        ]
        self.give_back()
        groups = [answers[:2], answers[2:]]
        learn(
            self.config, self.session.model, self.optimizer, groups, noise=None, completed=self.done, timer=self.timer
        )
        self.done += 1


def live_tensors():
    """Number and bytes of the tensors that Python knows of."""
    gc.collect()
    found = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    return len(found), sum(tensor.numel() * tensor.element_size() for tensor in found)


def test_turns_leave_no_tensor_behind():
    turns = Turns("model.device=cpu", "model.dtype=float32", "train.steps=200")
    for _ in range(3):
        turns.turn()
    before = live_tensors()
    for _ in range(25):
        turns.turn()
    assert live_tensors() == before


@pytest.mark.gpu
@pytest.mark.parametrize("keep", ["on", "off"])
def test_a_hundred_turns_leave_no_gpu_memory_behind(keep):
    """Also where the memory of keys and values is really handed over, each turn (`off`)."""
    turns = Turns("model.device=cuda", "train.steps=200", f"rollout.keep_cache={keep}")
    # Enough that every number of rows that a decode step may have has been captured.
    for _ in range(20):
        turns.turn()
    torch.cuda.synchronize()
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    for _ in range(50):
        turns.turn()
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    for _ in range(50):
        turns.turn()
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() == allocated
    assert lent_bytes(turns.session.device)[0] == 0
    assert torch.cuda.memory_reserved() <= reserved
    turns.sample()
    assert (lent_bytes(turns.session.device)[0] > 0) == (keep == "off")


@pytest.mark.gpu
@pytest.mark.parametrize("keep", ["on", "off"])
def test_changing_over_costs_less_than_fifty_milliseconds(keep):
    """What a rollout after training takes beyond one after a rollout, with what giving memory back takes."""
    turns = Turns("model.device=cuda", "train.steps=200", f"rollout.keep_cache={keep}")
    for _ in range(3):
        turns.turn()

    def seconds(action):
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def sample_and_give_back():
        turns.sample()
        turns.give_back()

    after_training, after_rollout = [], []
    for _ in range(10):
        turns.turn()
        after_training.append(seconds(sample_and_give_back))
        turns.sample()
        after_rollout.append(seconds(turns.sample))
    assert sorted(after_training)[5] - sorted(after_rollout)[5] < 0.05


@pytest.mark.gpu
def test_answers_after_memory_came_back_are_those_of_a_kept_cache():
    """The same bits: steps that were captured before read keys and values where they are again."""
    given, kept = (Turns("model.device=cuda", f"rollout.keep_cache={keep}") for keep in ("off", "on"))
    for _ in range(4):
        given.give_back()
        assert lent_bytes(given.session.device)[0] == 0
        first, second = given.sample(), kept.sample()
        assert lent_bytes(given.session.device)[0] > 0
        captures = given.stats["graph_captures"]
        assert [(c.token_ids, c.behavior_logprobs) for c in first] == [
            (c.token_ids, c.behavior_logprobs) for c in second
        ]
    assert captures == 0

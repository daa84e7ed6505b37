"""That ``learn`` computes again, and sends to the host, what the configuration says: gradients are the same either way and cannot tell."""

import pytest
import torch
from tiny_models import load_tiny, write_tiny

from qerl.config.load import load_config
from qerl.kernels.fp4_linear import reference
from qerl.model import decoder, recompute
from qerl.model.linear import GroupedLinear
from qerl.objective.batch import Sample
from qerl.records import Completion, Prompt
from qerl.train.learn import learn
from qerl.train.optimizer import make_optimizer
from qerl.train.timing import StageTimer

LENGTHS = (3, 5, 4, 6)
PROMPT = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path)
    return path


@pytest.fixture
def learned(folder):
    """Learns from four answers in two micro-batches; gives the model."""

    def run(*settings):
        config = load_config(
            None,
            [
                "lora.rank=2", "rollout.max_prompt_tokens=3", "rollout.max_new_tokens=6", "train.token_budget=17",
                "objective.denominator=behavior", *settings,
            ],
        )  # fmt: skip
        model = load_tiny(folder, lora=config.lora)
        answers = []
        for key, length in enumerate(LENGTHS):
            prompt = Prompt(id=str(key), question="", answer="", text="", token_ids=(3, 4, 5 + key))
            completion = Completion(
                prompt=prompt, sample_key=key, token_ids=tuple(range(7, 7 + length)), text="", stop_reason="stop",
                behavior_logprobs=(-4.5,) * length, sampler_logprobs=(-4.5,) * length,
            )  # fmt: skip
            answers.append(Sample(completion=completion, advantage=(-1.0) ** key, in_loss=True))
        optimizer = make_optimizer(model.trainable_parameters(), config.optim)
        stats = learn(config, model, optimizer, [answers], noise=None, completed=0, timer=StageTimer())
        assert stats.metrics()["updates"] == 1
        return model

    return run


@pytest.mark.parametrize(
    ("way", "layers", "activations", "products"),
    [("auto", 1, 1, 4), ("none", 1, 1, 4), ("selective", 1, 2, 4), ("full", 2, 2, 7)],
)
def test_each_way_runs_the_layers_and_their_activations_as_often_as_it_says(
    learned, monkeypatch, way, layers, activations, products
):
    """A layer is counted by its projection of q, k and v. Of its four products the last is not made again."""
    counted = {"layers": 0, "activations": 0, "products": 0}
    linear, activation, product = GroupedLinear.stacked, decoder.silu_mul, reference.forward

    def counts_layers(self, *arguments, **keywords):
        counted["layers"] += self.lora is not None and len(self.lora.lora_b) == 3
        return linear(self, *arguments, **keywords)

    def counts_activations(*arguments, **keywords):
        counted["activations"] += 1
        return activation(*arguments, **keywords)

    def counts_products(*arguments, **keywords):
        counted["products"] += 1
        return product(*arguments, **keywords)

    monkeypatch.setattr(reference, "forward", counts_products)
    monkeypatch.setattr(GroupedLinear, "stacked", counts_layers)
    monkeypatch.setattr(decoder, "silu_mul", counts_activations)
    model = learned(f"train.checkpointing={way}")
    once = 2 * model.spec.num_layers
    assert counted == {"layers": layers * once, "activations": activations * once, "products": products * once}


@pytest.mark.parametrize("offload", [False, True])
def test_layer_inputs_go_to_the_host_and_come_back_where_that_is_asked(learned, monkeypatch, offload):
    moved = {"to": [], "back": []}

    def spy(pin_memory=False):
        assert not pin_memory, "only a GPU's copies need pinned memory"

        def pack(tensor):
            moved["to"].append(tuple(tensor.shape))
            return tensor

        def unpack(tensor):
            moved["back"].append(tuple(tensor.shape))
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    monkeypatch.setattr(recompute, "save_on_cpu", spy)
    model = learned("train.checkpointing=full", f"train.activation_offloading={str(offload).lower()}")
    streams = (
        sorted((2 * PROMPT + sum(pair), model.spec.hidden_size) for pair in (LENGTHS[:2], LENGTHS[2:]))
        * model.spec.num_layers
    )
    expected = sorted(streams) if offload else []
    inputs = {way: sorted(shape for shape in shapes if shape in streams) for way, shapes in moved.items()}
    assert inputs == {"to": expected, "back": expected}
    assert offload or not moved["to"]

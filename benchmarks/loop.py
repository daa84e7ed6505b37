"""Seconds by stage of whole steps of ``qerl train``, rewards, records, diagnostics and noise among them: of a real model, or on random weights.

    python benchmarks/loop.py --model Qwen2.5-Coder-0.5B-Instruct [--data gsm8k] [--out results/loop_real_05b.json] [--steps 12] [--beside key=value ...] [key=value ...]
    python benchmarks/loop.py [--out FILE] [--steps 12] [--size 0.5B] [--tiny] [key=value ...]

Trains ``configs/gsm8k_05b_nvfp4_aqn.yaml`` (32 prompts x 8 answers of at most 512 tokens, NVFP4, rank 32, AQN): half of the steps without noise, half with the
largest. The first step of each half captures its graphs; what is called settled is the others, clean and noisy ones apart: median, least
and most of seconds by stage, of tokens, and of how far the engine's log-probs are from the trainer's. ``memory`` is the run's ``memory.json``: bytes by owner and phase,
predicted and measured. With ``--beside`` (once for each setting) a second run follows, of the same model, data and seed with these settings changed;
what the first one gave is in the file before it begins, and it does not begin where the first was interrupted.

Without ``--model`` it trains on a folder that is made
for it: a Qwen2.5 of the given size with random weights, a tokenizer of as many words, questions of about 90 words. So many tokens
end an answer that the mean length is about 280; a reward that depends on the last letters makes some 40 % of the groups mixed, which is what
Qwen2.5-Coder-0.5B had on GSM8K (answers of other groups have no gradient and are only scored). Nothing is learned; time and memory are
those of a real run, save that random text is cheap to judge.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.stored import write_result
from benchmarks.synthetic import SHAPES
from benchmarks.timing import require_gpu
from benchmarks.training import TINY
from qerl.config.load import load_config
from qerl.errors import RunStopped
from qerl.metrics.machine_catalogue import STAGES
from qerl.metrics.run_dir import RunDir
from qerl.train.run import train
from qerl.train.stop import Deadline

ROOT = Path(__file__).resolve().parents[1]

SETTINGS = (
    "aqn.num_stages=2", "optim.warmup_ratio=0.0", "diagnostics.every=0", "eval.before=false", "eval.after=false", "eval.every=0",
    "data.eval=null", "train.save_every=0", "train.save_adapter_every=0", "log.progress=off", "log.completions=0",
)  # fmt: skip
RANDOM = ("reward.functions=[format]", "reward.format_pattern='[a-f]a$'")
"""Of random weights."""
SMALL = ("rollout.max_prompt_tokens=96", "rollout.max_new_tokens=16", "rollout.prompts_per_step=2", "lora.rank=2")
"""Of ``--tiny``."""
SUMMED_UP = (
    "time/step", *(f"time/{stage}" for stage in STAGES), "rollout/tokens_per_second", "tokens/prompt", "tokens/completion", "tokens/effective",
    "sampling/sampling_logp_difference/mean", "mean_abs_prob_difference",
)  # fmt: skip
KEPT = (
    *SUMMED_UP, "step", "aqn/sigma", "canary/engine_difference", "canary/adapter_effect",
    *(f"canary/own/{name}" for name in ("engine_difference", "adapters_effect", "adapters_share", "noise_effect", "noise_share")),
)  # fmt: skip
STOPS = 400
"""Tokens that end an answer: one of about 380 of a vocabulary of 151,936."""
LETTERS = str.maketrans("0123456789", "abcdefghij")
TEMPLATE = "{% for message in messages %}{{ message['role'] + ' ' + message['content'] }}{% endfor %}"


def model_config(size: str, *, tiny: bool) -> dict[str, Any]:
    """A ``config.json``."""
    if tiny:
        return TINY | {"architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6}
    shape = SHAPES[size]
    heads, kv_heads = shape["heads"]
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936 if shape["tied"] else 152064,
        "hidden_size": shape["hidden_size"], "intermediate_size": shape["intermediate_size"],
        "num_hidden_layers": shape["num_layers"], "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": shape["tied"],
    }  # fmt: skip


def write_model(folder: Path, config: dict[str, Any], device: torch.device) -> None:
    """A checkpoint of random weights with a tokenizer of whole words."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary, hidden, inner = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return values.mul_(0.02).bfloat16().cpu()

    tensors = {"model.embed_tokens.weight": normal(vocabulary, hidden), "model.norm.weight": torch.ones(hidden)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = torch.ones(hidden)
        for part, shape in shapes.items():
            tensors[f"{name}.self_attn.{part}.weight"] = normal(*shape)
            if part != "o_proj":
                tensors[f"{name}.self_attn.{part}.bias"] = normal(shape[0])
        tensors |= {f"{name}.mlp.{part}.weight": normal(*shape) for part, shape in mlp.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    stops = random.Random(0).sample(range(vocabulary), max(1, STOPS * vocabulary // 151936))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    # Numbers and words of letters, as a text with arithmetic has.
    names = [f"{i}" if i < 1000 else f"{i}".translate(LETTERS) for i in range(vocabulary - 1)]
    words = {word: i for i, word in enumerate([*names, "unknown"])}
    inner_tokenizer = Tokenizer(models.WordLevel(words, unk_token="unknown"))
    inner_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner_tokenizer, unk_token="unknown", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)


def write_questions(path: Path, count: int, words: int, vocabulary: int) -> None:
    draw = random.Random(1)
    rows = [
        {"question": " ".join(str(draw.randrange(min(1000, vocabulary - 1))) for _ in range(words)), "answer": "42"}
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the steps that do not begin a stage of noise, clean and noisy ones apart: median, least and most."""
    sigmas = [row.get("aqn/sigma", 0.0) for row in rows]
    usual = [row for i, row in enumerate(rows) if i and sigmas[i] == sigmas[i - 1]]
    found = {}
    for kind, noisy in (("clean", False), ("noisy", True)):
        steps = [row for row in usual if (row.get("aqn/sigma", 0.0) > 0) == noisy]
        cells = {name: [row[name] for row in steps if name in row] for name in SUMMED_UP}
        found[kind] = {
            "steps": [int(row["step"]) for row in steps],
            "sigma": sorted({row.get("aqn/sigma", 0.0) for row in steps}),
            **{
                name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
                for name, values in cells.items()
                if values
            },
        }
    return found


def result(run: RunDir) -> dict[str, Any]:
    """What a run says of itself."""
    rows = [row for row in run.read_metrics() if row["step"] > 0]
    planned = load_config(run.config_path, []).train
    return {
        "plan": {"token_budget": planned.token_budget, "checkpointing": planned.checkpointing},
        "settled": summarize(rows),
        "memory": json.loads(run.memory_path.read_text()) if run.memory_path.exists() else None,
        "steps": [
            {key: value for key, value in row.items() if key in KEPT or key.startswith(("memory/", "time/"))}
            for row in rows
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", help="a folder or a NAME under $QERL_MODELS, instead of random weights")
    parser.add_argument("--data", help="data set of --model, where it is not the configuration's")
    parser.add_argument("--size", default="0.5B", choices=sorted(SHAPES), help="of random weights")
    parser.add_argument(
        "--seconds", type=float, help="of each run: no step is begun that would end later, by the longest so far"
    )
    parser.add_argument(
        "--beside", action="append", default=[], metavar="key=value", help="a setting of a second run; may be repeated"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    require_gpu(tiny=arguments.tiny)
    settings = [*SETTINGS, *(() if arguments.model else RANDOM), *(SMALL if arguments.tiny else ())]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.model:
            own = [f"model.path={arguments.model}", *([f"data.train={arguments.data}"] if arguments.data else [])]
        else:
            own = made_folder(folder, arguments.size, tiny=arguments.tiny)
        asked = [*settings, f"train.steps={arguments.steps}", *own, f"run.dir={folder}", *arguments.settings]
        found, whole = trained(asked, arguments.seconds)
        keep(arguments.out, settings, found)
        if arguments.beside and whole:
            gc.collect()
            other, _ = trained([*asked, *arguments.beside, "run.name=beside"], arguments.seconds)
            keep(arguments.out, settings, found | {"beside": {"settings": arguments.beside, **other}})


def keep(out: Path | None, settings: list[str], found: dict[str, Any]) -> None:
    """Write what there is so far, and show the run that has just ended."""
    if out is not None:
        write_result(out, settings=settings, **found)
    run = found.get("beside", found)
    print(json.dumps({key: run[key] for key in ("settings", "plan", "settled") if key in run}, indent=1), flush=True)


def trained(settings: list[str], seconds: float | None) -> tuple[dict[str, Any], bool]:
    """(what a run with these settings says of itself, whether nothing interrupted it). An interrupt ends it after its step."""
    made = load_config(ROOT / "configs" / "gsm8k_05b_nvfp4_aqn.yaml", settings)
    whole = False
    with contextlib.suppress(RunStopped):
        train(made, deadline=Deadline(seconds))
        whole = True
    return result(RunDir.open(Path(made.run.dir) / made.run.name)), whole


def made_folder(folder: Path, size: str, *, tiny: bool) -> list[str]:
    """Makes a model and questions; gives the settings that name them."""
    config = model_config(size, tiny=tiny)
    (folder / "model").mkdir()
    write_model(folder / "model", config, torch.device("cpu" if tiny else "cuda"))
    write_questions(folder / "questions.jsonl", 400, 8 if tiny else 90, config["vocab_size"])
    return [f"model.path={folder / 'model'}", f"data.train={folder / 'questions.jsonl'}"]


if __name__ == "__main__":
    main()

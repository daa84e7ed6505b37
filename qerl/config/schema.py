"""The configuration: one strict, frozen pydantic model a stage, free of torch.

Defaults are overridden by a YAML file, and that by dotted ``key=value`` arguments (``config.load``). Unknown keys are
errors. Values that depend on other values (``auto``) are resolved here, once, so that ``config.resolved.yaml`` shows
what really ran. The docstring under each field is the text of ``docs/config.md``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from qerl.config.aqn import AqnConfig
from qerl.config.diagnostics import DiagnosticsConfig
from qerl.config.model import ModelConfig
from qerl.config.objective import ObjectiveConfig
from qerl.config.section import EachOnce, Fraction, NonNegative, Positive, Section, Temperature

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


DEFAULT_PASS_TOKENS = 16384
"""Tokens of one packed pass when ``train.token_budget`` is ``auto`` and nothing says how much memory there is."""
MAX_AUTO_SEQUENCES = 256
"""Sequences decoded at once when ``rollout.max_num_seqs`` is ``auto``."""

Format = Literal["bf16", "nvfp4", "mxfp4", "nf4"]


class QuantConfig(Section):
    """How the frozen base weights are held."""

    format: Format = "nvfp4"
    """Storage format of the decoder's linear layers. `bf16` keeps them in `model.dtype`, unquantized."""
    method: Literal["rtn", "mse", "four_over_six"] = "rtn"
    """How weights are quantized at load. `rtn`: round to nearest. `mse`: search each block's scale for the least squared error, which pays for nvfp4 (docs/nvfp4.md, "Which method"). `four_over_six` (nvfp4): each block's largest weight becomes 6 or 4, whichever leaves less error. A folder that holds packed weights keeps them."""
    rounding: Literal["ct", "torchao"] = "ct"
    """Named rounding of nvfp4 and mxfp4: byte-equal to compressed-tensors (`ct`) or to torchao (`torchao`)."""
    double_quant: bool = False
    """nf4: store block scales in 8 bits too (4.13 bits a weight instead of 4.5)."""
    lm_head: Literal["bf16", "fp8", "nvfp4"] = "bf16"
    """Format of the LM head. `bf16` keeps it in `model.dtype`; otherwise it is a packed copy, also of a tied embedding, which itself stays."""
    overrides: dict[str, Format] = {}
    """Format by module pattern, e.g. `{"layers.0.*": bf16}`, matched against names such as `layers.0.mlp.down_proj`; the last match wins. q/k/v, and gate/up, of one layer must agree; a pattern that matches nothing is an error."""
    dense_cache: Literal["auto", "on", "off"] = "auto"
    """Keep a dequantized copy of each weight beside the packed one. On a GPU in bfloat16 it is kept of weights of less than 10 million numbers (every one of a 0.5B model) and is what the kernels multiply with: nothing is rounded for it, and they are faster from 17 rows on. `auto`: on for the CPU, where unpacking costs more than the product, and for a GPU where a model's largest weight has at most 30 million numbers (up to a 1.5B, of which q, k, v and o are kept), the copies take at most 5 % of the memory budget and, in training, the rest of the plan stays as it is. An unquantized weight that small needs no copy, and the kernel reads it unless `off`, which is also what `auto` becomes where a plan keeps no copies of other weights beside it."""

    @model_validator(mode="after")
    def _check(self) -> QuantConfig:
        used = {self.format, *self.overrides.values()}
        if self.double_quant and "nf4" not in used:
            raise ValueError("quant.double_quant is about nf4, which neither quant.format nor quant.overrides asks for")
        if self.method == "four_over_six" and used - {"nvfp4", "bf16"}:
            others = ", ".join(sorted(used - {"nvfp4", "bf16"}))
            raise ValueError(
                f"quant.method=four_over_six is a method of nvfp4 and cannot quantize {others}: use mse or rtn"
            )
        return self

    def storage(self, name: str) -> str:
        """The stored format that a format of the configuration means: nf4 has two."""
        return "nf4_dq" if name == "nf4" and self.double_quant else name


class LoraConfig(Section):
    """The adapters: y = W x + (alpha / rank) * B A x."""

    rank: Positive = 32
    """Rank r of A [r, d_in] and B [d_out, r]."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale numerator; the adapter output is multiplied by alpha / rank."""
    targets: Annotated[tuple[Projection, ...], EachOnce] = PROJECTIONS
    """Projections that carry an adapter, each named once. One that matches nothing in the model is an error."""
    train_norms: bool = True
    """Also train the two RMSNorm scales of each layer (the released recipe does); the final norm stays frozen."""


class DataConfig(Section):
    """Prompts for training and evaluation."""

    train: str | None = None
    """A .jsonl/.parquet file, a built-in data set (`arithmetic`, `calculations`), a folder NAME under $QERL_DATA, or a hub name (`owner/name` or `owner/name/config`); `NAME:split` picks a split (default train)."""
    eval: str | None = None
    """The same for evaluation (default split: test)."""
    eval_limit: Positive | None = None
    """Use only the first N evaluation problems."""
    question_key: str = "question"
    """Field of a row that holds the question (a string, or a list of chat messages)."""
    answer_key: str = "answer"
    """Field of a row that holds the reference answer."""
    system_prompt: str | None = None
    """System message of the chat; none lets the template use its own default."""
    prompt_template: str = "{question}"
    """User message; `{question}` is replaced by the row's question."""


KvFormat = Literal["compute", "fp8_values", "fp8"]


class RolloutConfig(Section):
    """How training answers are sampled."""

    prompts_per_step: Positive = 32
    """Prompts drawn per rollout."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Answers per prompt (TRL `num_generations`)."""
    temperature: Temperature = 1.0
    """Sampling temperature, from 0.001; or 0, greedy, which training refuses."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass; 1 is off. Anything below 1 warns in training: mass outside the support cannot be recovered."""
    top_k: NonNegative = 0
    """Keep the k likeliest tokens; 0 is off."""
    min_p: Fraction = 0.0
    """Keep tokens at least min_p times as likely as the likeliest; 0 is off."""
    max_prompt_tokens: Positive = 512
    """Longer prompts are dropped, counted and shown."""
    max_new_tokens: Positive = 1024
    """Longest answer; one that does not stop by then is `truncated`."""
    max_num_seqs: Positive | Literal["auto"] = "auto"
    """Sequences decoded at once; `auto`: all of a rollout up to 256."""
    kv_cache_gb: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Most memory of keys and values on a GPU, in GB. Where it is less than all sequences need at their longest, some wait; one must have room. `auto`: what they need, or what the memory budget leaves."""
    kv_format: KvFormat = "compute"
    """Keys and values in the type of attention (`model.attention_dtype`), values alone in FP8 (`fp8_values`, a quarter less memory in bfloat16) or both (`fp8`, half). FP8 moves log-probs away from the trainer's, `fp8` beyond the line of a fault; needs compute capability 8.9 on a GPU."""
    static_shapes: bool = False
    """An answer has the same bits alone, in any batch and in any order: each decode step has max_num_seqs rows, each prompt a pass of its own. Slower."""
    read_together: bool | Literal["auto"] = "auto"
    """On a GPU, decode steps of at least 64 rows read long prompts once for the answers that share them, where each row is spared at least 768 tokens on average (eight answers: from 1,025 tokens on; two: 1,537): a quarter less time a step with 256 answers to prompts of 2,048, and log-probs that differ by rounding. `auto`: true, but not with static_shapes, which excludes it."""
    keep_cache: Literal["auto", "on", "off"] = "auto"
    """On a GPU, keep that memory while training; `off` gives it back after every rollout. `auto`: kept if the plan fits so."""


class OverlongConfig(Section):
    """Soft overlong punishment of DAPO: 0 up to max_new_tokens - buffer, then linear to -penalty."""

    enabled: bool = False
    """Add the punishment to the reward (never to accuracy)."""
    buffer_tokens: Positive = 256
    """Width of the linear part; must be smaller than rollout.max_new_tokens."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """Punishment of an answer that reaches max_new_tokens."""


class RewardConfig(Section):
    """What an answer is worth."""

    functions: tuple[str, ...] = ("accuracy",)
    """`accuracy`, `format`, `module:function` or `file.py:function`. The outcome of a sample is decided by accuracy alone."""
    weights: tuple[float, ...] = (1.0,)
    """One weight a function."""
    format_pattern: str = r"\\boxed\{.+\}"
    """Regular expression that `format` looks for anywhere in the answer (dot matches newline)."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Longest time of one call of a reward function (the whole batch first, single answers if that fails) and of one symbolic comparison."""
    max_unscored_steps: NonNegative = 3
    """End the run with an error after so many steps in a row in which no answer could be scored; 0 goes on for ever."""
    overlong: OverlongConfig = OverlongConfig()
    """Soft overlong punishment."""

    @model_validator(mode="after")
    def _check(self) -> RewardConfig:
        if not self.functions:
            raise ValueError("reward.functions is empty: name at least one, such as accuracy")
        if len(self.weights) != len(self.functions):
            raise ValueError(
                f"reward.weights has {len(self.weights)} entries for {len(self.functions)} reward.functions"
            )
        return self


class OptimConfig(Section):
    """AdamW on what is trained (`train.mode`)."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw`: both moments in float32. `adamw_8bit`: bitsandbytes' AdamW8bit, moments in 8 bits by blocks (needs bitsandbytes)."""
    lr: Annotated[float, Field(gt=0)] = 1.0e-5
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    """AdamW moment decays."""
    eps: Annotated[float, Field(gt=0)] = 1.0e-8
    """AdamW epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of matrices (LoRA; in full mode embeddings too); norm scales and biases are never decayed."""
    warmup_ratio: Fraction = 0.1
    """Share of planned updates in which lr rises linearly from 0."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After warm-up: cosine to 0 at the last planned update, or constant."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.2
    """Global gradient norm is clipped to this."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a gradient with NaN or infinity does: end the run, or leave out the update with a warning. The batch is written to `nonfinite/` either way, and no parameter changes."""
    updates_per_rollout: Positive = 1
    """Optimizer updates made from one rollout; its groups are split into that many mini-batches."""


class TrainConfig(Section):
    """What is trained, length, seed, batching and saving."""

    mode: Literal["lora", "full"] = "lora"
    """`lora`: adapters (and norms) on a frozen base. `full`: every weight of an unquantized model: linear layers, biases, norms, embedding and head (docs/training.md)."""
    steps: Positive = 200
    """Rollout steps; planned updates = steps * optim.updates_per_rollout."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Root of every keyed draw: data order, sampling, noise, adapter initialization."""
    token_budget: Positive | Literal["auto"] = 16384
    """Most tokens (prompt + answer) of one packed forward/backward pass; the loss does not depend on it. `auto`: what the plan finds room for in 70 % of the memory budget, up to 65536 (fewer and larger passes keep a GPU busier); 16384 without a budget."""
    share_prompts: bool | Literal["auto"] = "auto"
    """Compute the prompt of a group once in a pass, and not for each answer, where noise lets answers share it (docs/training.md). `auto`: on a GPU."""
    checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """What the backward pass computes again instead of keeping it. `none`: nothing. `selective`: what cheap operations give (norms, gated activation). `full`: whole layers. `auto`: the first of these whose plan fits the memory budget; none without a budget."""
    activation_offloading: bool = False
    """With `checkpointing: full`, keep a GPU's layer inputs in the host's memory between forward and backward pass; refused on the CPU, whose memory that is."""
    memory_budget: Annotated[float, Field(gt=0)] | Literal["auto", "off"] = "auto"
    """GB (1e9 bytes) that the run may take. On a GPU, PyTorch's allocator is held to it, and the predicted peak may fill 92 % of it; a plan beyond that is refused before weights are read. On the CPU the plan may fill all of it. `auto`: a plan of 92 % of a GPU's memory, no bound on the CPU. `off`: no plan is refused."""
    save_every: NonNegative = 50
    """Steps between checkpoints; 0 saves only the last."""
    keep_checkpoints: NonNegative = 0
    """Keep only the newest N checkpoints; 0 keeps all."""
    save_adapter_every: NonNegative | Literal["auto"] = "auto"
    """Keep the adapter (full mode: the whole model) of every N-th rollout, so its behavior records can be scored again; 0 keeps none. `auto`: 1, and 0 in full mode."""


class EvalConfig(Section):
    """The declared deployment policy that evaluation measures."""

    every: NonNegative = 50
    """Steps between evaluations; 0 evaluates only before and after."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    temperature: Temperature = 0.0
    """0 is greedy; else from 0.001."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass."""
    samples: Positive = 1
    """Answers per question; more than 1 needs a temperature above 0."""
    noise: bool = False
    """Evaluate with the training noise of the current stage (keyed apart from every rollout): while a run trains in place of the clean policy, `qerl eval`
    beside it. `qerl rollout` samples with it."""
    noisy_draws: NonNegative = 1
    """After training with `aqn.enabled`, evaluate with its noise too, under so many keys, against the clean policy; 0 does not."""
    max_new_tokens: Positive | None = None
    """Longest answer; none takes rollout.max_new_tokens."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Level of the intervals."""

    @model_validator(mode="after")
    def _check(self) -> EvalConfig:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"eval.samples={self.samples} greedy answers would all be the same: set eval.temperature above 0"
            )
        return self


class LogConfig(Section):
    """Where metrics go besides metrics.jsonl."""

    backends: Annotated[tuple[Literal["jsonl", "tensorboard", "wandb", "trackio"], ...], EachOnce] = ("jsonl",)
    """jsonl is always written; the others need their package."""
    completions: NonNegative = 8
    """Answers per step written as readable text under completions/."""
    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """Terminal display: a live table, one line a step, or nothing; `auto` picks live on a terminal."""


class RunConfig(Section):
    """Where the run folder goes."""

    dir: str = "runs"
    """Folder that holds run folders."""
    name: str = "run"
    """Name of this run's folder: one folder, no path. A folder that already holds a run is refused unless --resume is given."""

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        bad = any(not sign.isprintable() or sign in "/\\" for sign in self.name)
        if bad or self.name != self.name.strip() or self.name in ("", ".", ".."):
            raise ValueError(
                f"run.name={self.name!r} is no name of a folder: use printable signs without / and \\, and run.dir for the path"
            )
        if not self.dir.strip() or "\0" in self.dir:
            raise ValueError(f"run.dir={self.dir!r} names no folder: use . for the current one")
        return self


class Config(Section):
    """The whole configuration of a training run."""

    model: ModelConfig = ModelConfig()
    quant: QuantConfig = QuantConfig()
    lora: LoraConfig = LoraConfig()
    aqn: AqnConfig = AqnConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    log: LogConfig = LogConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        updates, prompts = self.optim.updates_per_rollout, self.rollout.prompts_per_step
        if prompts % updates:
            raise ValueError(
                f"rollout.prompts_per_step={prompts} groups cannot be split into optim.updates_per_rollout={updates} equal mini-batches: "
                f"use a multiple of {updates}"
            )
        if self.train.save_adapter_every == "auto":
            object.__setattr__(self.train, "save_adapter_every", 0 if self.train.mode == "full" else 1)
        if self.train.mode == "full":
            self._check_full_mode()
        if self.train.activation_offloading and self.train.checkpointing != "full":
            raise ValueError(
                f"train.activation_offloading has no meaning with train.checkpointing={self.train.checkpointing}: it moves the "
                "layer inputs that train.checkpointing=full keeps"
            )
        overlong = self.reward.overlong
        if overlong.enabled and overlong.buffer_tokens >= self.rollout.max_new_tokens:
            raise ValueError(
                f"reward.overlong.buffer_tokens={overlong.buffer_tokens} must be smaller than "
                f"rollout.max_new_tokens={self.rollout.max_new_tokens}"
            )
        longest = self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        if self.train.token_budget != "auto" and longest > self.train.token_budget:
            raise ValueError(
                f"train.token_budget={self.train.token_budget} cannot hold one sequence of rollout.max_prompt_tokens + "
                f"rollout.max_new_tokens = {longest} tokens: raise the budget or shorten the sequences"
            )
        return self

    def _check_full_mode(self) -> None:
        """Full mode trains the weights themselves: nothing packed, no adapters, no reference that the base could serve as."""
        packed = [f"quant.format={self.quant.format}"] if self.quant.format != "bf16" else []
        packed += [f"quant.overrides {name}: {fmt}" for name, fmt in self.quant.overrides.items() if fmt != "bf16"]
        packed += [f"quant.lm_head={self.quant.lm_head}"] if self.quant.lm_head != "bf16" else []
        if packed:
            raise ValueError(
                f"train.mode=full trains the weights themselves, which {packed[0]} would hold packed and frozen: use "
                "quant.format=bf16 and quant.lm_head=bf16, or train.mode=lora"
            )
        plain = LoraConfig()
        unused = [name for name in LoraConfig.model_fields if getattr(self.lora, name) != getattr(plain, name)]
        if unused:
            raise ValueError(
                f"lora.{unused[0]} has no meaning with train.mode=full, which has no adapters: leave it out, or use train.mode=lora"
            )
        if self.objective.kl_coef > 0:
            raise ValueError(
                f"objective.kl_coef={self.objective.kl_coef:g} needs a reference policy; with train.mode=full that would be a "
                "second copy of the whole model, which is not kept: use objective.kl_coef=0, or train.mode=lora, whose "
                "reference is the frozen base"
            )

    @property
    def pass_tokens(self) -> int:
        """Most tokens of one packed pass; what ``auto`` is without a plan."""
        if self.train.token_budget != "auto":
            return self.train.token_budget
        return max(DEFAULT_PASS_TOKENS, self.rollout.max_prompt_tokens + self.rollout.max_new_tokens)

    def shares_prompts(self, device_type: str) -> bool:
        """Whether passes compute a group's prompt once, as far as the configuration decides it."""
        choice = self.train.share_prompts
        return device_type == "cuda" if choice == "auto" else choice

    @property
    def decode_slots(self) -> int:
        """Sequences decoded at once."""
        most = min(MAX_AUTO_SEQUENCES, self.rollout.prompts_per_step * self.rollout.group_size)
        return most if self.rollout.max_num_seqs == "auto" else self.rollout.max_num_seqs

    @property
    def reads_together(self) -> bool:
        """Whether answers to one prompt may read it together."""
        rollout = self.rollout
        return not rollout.static_shapes if rollout.read_together == "auto" else rollout.read_together

    @property
    def planned_updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.train.steps * self.optim.updates_per_rollout

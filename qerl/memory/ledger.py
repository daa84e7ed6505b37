"""Bytes by owner and phase, from the configuration and the model's shapes.

Owners that are there throughout:

================  =====================================================================================
base_weights      decoder linears as stored (packed codes, scales, biases)
dense_cache       dequantized copies beside them (``quant.dense_cache``)
embeddings        embedding matrix, and the LM head when it is not tied, or packed
norms             float32 RMSNorm scales, and the reference copy when a KL term needs one
tables            cosines and sines of all positions, float32
adapters          float32 LoRA masters
adapter_copies    the adapters in the compute type, as the kernels read them, where that is not float32
masters           full mode: float32 copies of weights that are narrower
optimizer         AdamW moments, two a trained parameter: float32, or 8 bits with a float32 scale a block of 256
kv_cache          keys and values, where they are kept between rollouts (a GPU, ``rollout.keep_cache``)
workspace         on a GPU: cuBLAS, and room for the largest packed weight dequantized; again for captured steps of many rows
batch             tokens of a rollout packed for learning, with their positions, targets and recorded log-probs
================  =====================================================================================

Owners of a phase: ``kv_cache`` otherwise and ``noise`` (rollout, logprobs, backward; a GPU's tables of few rows stay, as captured steps do), ``gradients`` (backward, optimizer: float32, one a trained parameter),
``activations`` (backward: what autograd keeps of one micro-batch), and ``working`` (any: the most that exists for a moment beside
these). The phases are load, rollout, logprobs, backward, optimizer.

Legend: T tokens of a micro-batch, D hidden size, F inner width of the MLP, V vocabulary, q and kv rows of the query and of the key
projection, i bytes of an element of the compute type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from qerl.config.schema import Config
from qerl.kernels.token_logprobs.head import STRETCH_ELEMENTS
from qerl.kernels.token_logprobs.tiles import TILE_ROWS, tile_tokens
from qerl.memory import shapes
from qerl.memory.pages import check_pages
from qerl.memory.rows import decode_rows, pass_bytes, table_bytes
from qerl.memory.shapes import ITEMSIZE, StoredGroup
from qerl.model.spec import ModelSpec
from qerl.units import GB

PHASES = ("load", "rollout", "logprobs", "backward", "optimizer")
CUBLAS_WORKSPACE, CUBLAS_USERS = 1 << 25, 3
"""cuBLAS on Hopper, for each of: the main thread, autograd's thread, the stream on which decode steps are captured."""
BATCH_BYTES, BATCH_ANSWER_BYTES = 48, 32
"""Of a token in a packed batch: id, position, sample, its key's place and the keys of shared prompts, int64; more for one of an
answer: where it is predicted, target and sample, int64, two log-probs."""
DECODE_ROWS = 64
"""Most rows for which the NVFP4 kernels read a packed weight as it is (``kernels.fp4_linear.decode``)."""
LOGITS_HELD = 1
"""Float32 copies of the logits of a decode step that exist at once: the sampler reads them in place, and truncation makes one more."""
PAGE_TOKENS = 64
"""Tokens of a page of keys and values on a GPU (``rollout.engine``)."""
KV_BYTES = {"compute": (0, 0), "fp8_values": (0, 1), "fp8": (1, 1)}
"""Bytes of a number of keys and of values by ``rollout.kv_format``; 0: of the compute type."""
PREFILL_TOKENS = 8192
"""Most prompt tokens of one prefill pass (``rollout.engine``)."""
CAST_ELEMENTS = 1 << 25
"""Weights that quantizing at load works on at once, in float32 and some copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Predicted bytes."""

    after_load: ClassVar[tuple[str, ...]] = ("optimizer", "masters", "kv_cache")
    """Resident owners that do not exist yet while weights are loaded."""
    resident: Mapping[str, int]
    """Owner -> bytes that are there in every phase."""
    phases: Mapping[str, Mapping[str, int]]
    """Phase -> owner -> bytes that the phase brings."""

    def total(self, phase: str) -> int:
        """Bytes of a phase at its peak."""
        later = self.after_load if phase == "load" else ()
        resident = sum(size for owner, size in self.resident.items() if owner not in later)
        return resident + sum(self.phases[phase].values())

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(PHASES, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes of the phase that needs most."""
        return self.total(self.peak_phase)

    def owners(self) -> dict[str, int]:
        """Owner -> the most bytes it has in any phase."""
        found = dict(self.resident)
        for brought in self.phases.values():
            for owner, size in brought.items():
                found[owner] = max(found.get(owner, 0), size)
        return found


def predict(config: Config, spec: ModelSpec, *, device_type: str) -> Ledger:
    """The ledger of a training run.

    Args:
        config: the run's configuration; what ``auto`` leaves open counts as the setting that needs most memory.
        spec: the model's shapes.
        device_type: ``cpu`` or ``cuda``; decides ``dense_cache: auto``. Working memory is that of a GPU's kernels.

    Raises:
        ConfigError: ``aqn.sites`` names a norm that the model does not have.
    """
    itemsize = ITEMSIZE[config.model.dtype]
    stored = shapes.stored_groups(config, spec)
    biases = spec.num_layers * sum(group.out_features for group in spec.groups() if group.bias)
    tensors = shapes.trained_tensors(spec, config)
    adapters = sum(tensors.get("adapters", ()))
    trained = [size for part in tensors.values() for size in part]
    gradients = 4 * sum(trained)
    kv_cache = {"kv_cache": kv_bytes(config, spec, device_type)}
    kept = device_type == "cuda" and config.rollout.keep_cache != "off"
    tables = table_bytes(config, spec, device_type)
    # Captured steps outlive a rollout, and so do the tables that they read.
    stay = tables if device_type == "cuda" else 0
    noise = stay + pass_bytes(config, spec, micro_batch_tokens(config, device_type))
    batch = _batch(config)
    resident = {
        "base_weights": shapes.weight_bytes(stored, itemsize) + biases * itemsize,
        "dense_cache": shapes.dense_cache_elements(config, spec, stored, device_type) * itemsize,
        "embeddings": spec.vocab_size * spec.hidden_size * itemsize + shapes.head_bytes(config, spec, itemsize),
        "norms": 4 * (2 if config.objective.kl_coef > 0 else 1) * shapes.norm_parameters(spec),
        "tables": 2 * 4 * spec.max_positions * spec.head_dim,
        "adapters": 4 * adapters,
        "adapter_copies": itemsize * adapters if itemsize < 4 else 0,
        "masters": 4 * sum(tensors.get("weights", ())) if itemsize < 4 else 0,
        "optimizer": sum(shapes.moment_bytes(size, config.optim.name) for size in trained),
        "workspace": _workspace(config, spec, stored) if device_type == "cuda" else 0,
        **(kv_cache if kept else {}),
    }
    phases: dict[str, dict[str, int]] = {
        "load": {"working": _loading(config, spec, itemsize)},
        "rollout": {
            **({} if kept else kv_cache),
            "noise": tables,
            "working": _sampling(config, spec, itemsize, device_type),
        },
        "logprobs": {
            "batch": batch,
            "noise": noise,
            "working": _scoring(config, spec, itemsize, device_type),
        },
        "backward": {
            **_end_of_pass(config, spec, gradients, _activations(config, spec, itemsize, device_type), device_type),
            "batch": batch,
            "noise": noise,
            "working": _backward_working(config, spec, itemsize, device_type),
        },
        "optimizer": {"gradients": gradients, "batch": batch, **({"noise": stay} if stay else {})},
    }
    return Ledger(resident=resident, phases=phases)


def micro_batch_tokens(config: Config, device_type: str) -> int:
    """T: most tokens of one micro-batch; the budget, or all that a mini-batch can have."""
    return min(config.pass_tokens, mini_batch_tokens(config, device_type))


def mini_batch_tokens(config: Config, device_type: str) -> int:
    """Most tokens that one update is made from."""
    groups = -(-config.rollout.prompts_per_step // config.optim.updates_per_rollout)
    return groups * group_tokens(config, device_type)[0]


def group_tokens(config: Config, device_type: str, answer: int | None = None) -> tuple[int, int]:
    """Tokens of a group whose answers all have ``answer`` tokens (as many as they may, if that is not given), and keys that they have:
    those of a shared prompt once for itself and again for each answer."""
    prompt, answers = config.rollout.max_prompt_tokens, config.rollout.group_size
    each = prompt + (config.rollout.max_new_tokens if answer is None else answer)
    aqn = config.aqn
    apart = aqn.enabled and aqn.prompt != "clean" and aqn.scope not in ("rollout", "group")
    if apart or not config.shares_prompts(device_type):
        return answers * each, answers * each
    return answers * each - (answers - 1) * prompt, answers * each + prompt


def _repeated_keys(config: Config, device_type: str) -> int:
    """Most keys of shared prompts that stand again in a micro-batch. Shorter answers leave room for more groups: it is the length at which
    all groups of a mini-batch just fill it, or the longest."""
    groups = -(-config.rollout.prompts_per_step // config.optim.updates_per_rollout)
    room = config.pass_tokens // groups - config.rollout.max_prompt_tokens
    answer = min(config.rollout.max_new_tokens, max(1, room // config.rollout.group_size))
    tokens, keys = group_tokens(config, device_type, answer)
    return min(groups * (keys - tokens), micro_batch_tokens(config, device_type) * (keys - tokens) // tokens)


def _batch(config: Config) -> int:
    """All answers of a rollout, which are packed before the first update."""
    rollout = config.rollout
    token = BATCH_BYTES * rollout.max_prompt_tokens + (BATCH_BYTES + BATCH_ANSWER_BYTES) * rollout.max_new_tokens
    return rollout.prompts_per_step * rollout.group_size * token


def _end_of_pass(config: Config, spec: ModelSpec, gradients: int, activations: int, device_type: str) -> dict[str, int]:
    """Gradients and activations at the widest moment of a backward pass. All gradients are there from the second micro-batch on; in
    a single one they come layer by layer while activations go, so it is the pass's beginning or its end."""
    first, last = -(-gradients // spec.num_layers), -(-activations // spec.num_layers)
    several = mini_batch_tokens(config, device_type) > config.pass_tokens
    if several or gradients + last >= first + activations:
        later = activations if several else last
        return {"gradients": gradients, "activations": later}
    return {"gradients": first, "activations": activations}


def _workspace(config: Config, spec: ModelSpec, stored: Sequence[StoredGroup]) -> int:
    """The scratch is bfloat16, and as large as the largest weight it serves with its adapters beside it, or a stretch of a packed head. A captured
    step that needs it has one of its own."""
    rank = config.lora.rank if config.train.mode == "lora" else 0
    served = shapes.scratch_elements(stored, rank)
    if config.quant.lm_head != "bf16":
        served.append(min(spec.vocab_size * spec.hidden_size, STRETCH_ELEMENTS))
    scratch = 2 * max(served, default=0)
    return CUBLAS_USERS * CUBLAS_WORKSPACE + scratch * (2 if config.decode_slots > DECODE_ROWS else 1)


def kv_bytes(config: Config, spec: ModelSpec, device_type: str) -> int:
    """Bytes of keys and values: of all sequences at their longest, or as many as ``rollout.kv_cache_gb`` allows on a GPU."""
    wanted = wanted_kv_bytes(config, spec, device_type)
    if config.rollout.kv_cache_gb == "auto" or device_type != "cuda":
        return wanted
    return min(wanted, int(config.rollout.kv_cache_gb * GB))


def wanted_kv_bytes(config: Config, spec: ModelSpec, device_type: str, sequences: int | None = None) -> int:
    """Bytes of keys and values of so many sequences (all that are decoded at once) at their longest.

    On a GPU whole pages, with the prompt of a spare row, one page that belongs to nobody and two more; on the CPU one slot more than
    there are sequences. The last token of an answer is never fed back.
    """
    token, longest, prompt = _token_bytes(config, spec), _longest(config), config.rollout.max_prompt_tokens
    rows = config.decode_slots if sequences is None else sequences
    if device_type != "cuda":
        return (rows + 1) * longest * token
    return (rows * -(-longest // PAGE_TOKENS) + prompt // PAGE_TOKENS + 3) * PAGE_TOKENS * token


def sequences_with_room(config: Config, spec: ModelSpec, device_type: str) -> int:
    """How many of the sequences that are decoded at once, at least one, keys and values have room for when all are at their longest; the others
    wait."""
    one = wanted_kv_bytes(config, spec, device_type, sequences=1)
    each = wanted_kv_bytes(config, spec, device_type, sequences=2) - one
    further = (kv_bytes(config, spec, device_type) - one) // each
    return min(config.decode_slots, max(1, 1 + further))


def check_cache(config: Config, spec: ModelSpec, device_type: str) -> None:
    """Refuse a ``rollout.kv_cache_gb`` in which the longest prompt and answer have no room; on a GPU, where it means something.

    Raises:
        ConfigError: it is too small.
    """
    if device_type == "cuda":
        page_bytes = PAGE_TOKENS * _token_bytes(config, spec)
        pages = kv_bytes(config, spec, device_type) // page_bytes
        check_pages(pages, _longest(config), page_tokens=PAGE_TOKENS, page_bytes=page_bytes)


def _token_bytes(config: Config, spec: ModelSpec) -> int:
    """Keys and values of a token, all layers."""
    compute = ITEMSIZE[config.model.dtype]
    key, value = KV_BYTES[config.rollout.kv_format]
    return spec.num_layers * spec.kv_size * ((key or compute) + (value or compute))


def _longest(config: Config) -> int:
    """Tokens in the cache of the longest prompt and answer."""
    rollout = config.rollout
    return rollout.max_prompt_tokens + max(rollout.max_new_tokens, config.eval.max_new_tokens or 0) - 1


def _loading(config: Config, spec: ModelSpec, itemsize: int) -> int:
    """The largest group as read, and stacked; while it is quantized, float32 copies of a slice of it."""
    largest = shapes.largest_group(spec)
    return 2 * largest * 2 + 6 * 4 * min(largest, CAST_ELEMENTS)


def _sampling(config: Config, spec: ModelSpec, itemsize: int, device_type: str) -> int:
    """Logits of one decode step in float32, or one prefill pass, whichever is more."""
    prompts = config.rollout.prompts_per_step * config.rollout.max_prompt_tokens
    tokens = min(PREFILL_TOKENS, prompts)
    given = config.rollout
    truncated = given.top_k > 0 or given.top_p < 1 or given.min_p > 0
    logits = (LOGITS_HELD + truncated) * 4 * decode_rows(config, device_type) * spec.vocab_size
    return max(logits, _forward_bytes(config, spec, itemsize) * tokens)


def _scoring(config: Config, spec: ModelSpec, itemsize: int, device_type: str) -> int:
    """A pass without gradients, where there is one: the widest moment of a layer, or a chunk of logits."""
    if config.objective.denominator != "recomputed" and config.objective.kl_coef == 0:
        return 0
    tokens = micro_batch_tokens(config, device_type)
    layer = _forward_bytes(config, spec, itemsize) * tokens
    return _rotation(spec, tokens) + max(layer, _head_working(config, spec, tokens, itemsize))


def _rotation(spec: ModelSpec, tokens: int) -> int:
    """Cosines and sines of the tokens of a pass, float32."""
    return 2 * 4 * spec.head_dim * tokens


def _stream_bytes(config: Config) -> int:
    """Bytes of a value of the residual stream."""
    return 4 if config.model.stream_dtype == "float32" else ITEMSIZE[config.model.dtype]


def _forward_bytes(config: Config, spec: ModelSpec, itemsize: int) -> int:
    """Bytes a token at the widest moment of a layer without gradients: gate, up and their product, and the stream with the last
    layer's output before and after the layer. Of heads in float16 the projections beside them may be wider, float32."""
    inner = 3 * spec.intermediate_size * itemsize
    return max(inner, (4 + 2) * shapes.float16_heads(config, spec)) + 4 * spec.hidden_size * _stream_bytes(config)


def _head_working(config: Config, spec: ModelSpec, tokens: int, itemsize: int) -> int:
    """A tile of logits, in float32 and as probabilities, with its sums, and as many hidden states as exist at once around it: the last norm's input, the answers'
    share of its output with the gradient of the log-probs, that gradient scaled in float32, and the result."""
    tile = min(tile_tokens(tokens, spec.hidden_size), tokens)
    sums = tile * (TILE_ROWS * (4 + itemsize) + 2 * 4 * spec.hidden_size)
    return sums + tokens * spec.hidden_size * (3 * itemsize + _stream_bytes(config) + 4)


def kept_values(config: Config, spec: ModelSpec, device_type: str) -> int:
    """Values a token that autograd keeps of one layer, by counting the tensors of ``model/decoder.py``; all but the streams in the compute
    type.

    Two streams and two normed inputs (4 D); q and k rotated and v (q + 2 kv), attention's output (q); gate and up (2 F) and their
    product (F); in LoRA mode the shrunk inputs (rank a target). The projection of q, k and v (q + 2 kv) stays too where its heads are
    normed, and on the CPU, where v is a view of it (so kv less). With heads in float16, attention's output stays in that type too (q), and a
    projection that stays is float32.
    Independent noise draws need a normed input a projection (5 instead of 2). Selective checkpointing makes the normed inputs and the
    product again.
    """
    hidden, inner, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    independent = config.aqn.enabled and config.aqn.sharing == "independent"
    normed = (5 if independent else 2) * hidden
    again = normed + inner if config.train.checkpointing == "selective" else 0
    shrunk = config.lora.rank * len(config.lora.targets) if config.train.mode == "lora" else 0
    projected = q + 2 * kv if spec.qk_norm else 0
    if config.model.attention_dtype == "float16":
        projected = q + 2 * projected
    elif device_type == "cpu":
        projected = q + kv
    return 2 * hidden + normed + 2 * q + 2 * kv + projected + 3 * inner + shrunk - again


def _layer_bytes(config: Config, spec: ModelSpec, itemsize: int, device_type: str) -> int:
    """Bytes of one layer of a micro-batch kept whole: values, a float32 a norm and a head; keys and values of shared prompts for every
    answer; the CPU also keeps noise that differs by token."""
    size = kept_values(config, spec, device_type) * itemsize + 2 * spec.hidden_size * (_stream_bytes(config) - itemsize)
    size += 4 * (2 + spec.num_heads)
    differs = config.aqn.scope != "rollout" or config.aqn.prompt == "clean"
    if differs and device_type == "cpu":
        size += 4 * shapes.noise_width(config, spec) // spec.num_layers
    repeated = 2 * spec.kv_size * itemsize * _repeated_keys(config, device_type)
    return micro_batch_tokens(config, device_type) * size + repeated


def _activations(config: Config, spec: ModelSpec, itemsize: int, device_type: str) -> int:
    """Kept by one micro-batch: the layers, or the stream before each (one, where a GPU's wait on the host)."""
    if config.train.checkpointing != "full":
        return spec.num_layers * _layer_bytes(config, spec, itemsize, device_type)
    offloaded = config.train.activation_offloading and device_type != "cpu"
    streams = 1 if offloaded else spec.num_layers
    return micro_batch_tokens(config, device_type) * streams * spec.hidden_size * _stream_bytes(config)


def _backward_working(config: Config, spec: ModelSpec, itemsize: int, device_type: str) -> int:
    """The most of: a tile of logits with what is around it, and one layer's gradients (those of gate and up are the widest, or those of projections in
    float32, enlarged and not; and the stream's), on top of that layer computed again under full checkpointing.

    A head that learns has its gradient added up in float32 and rounded beside that; one that is the embedding, too, keeps it until the
    embedding's is there.
    """
    tokens = micro_batch_tokens(config, device_type)
    inner, hidden = spec.intermediate_size, spec.hidden_size
    head = _head_working(config, spec, tokens, itemsize)
    widest = max(2 * inner * itemsize, 2 * 4 * shapes.float16_heads(config, spec))
    layer = (widest + hidden * _stream_bytes(config)) * tokens
    if config.train.mode == "full":
        vocabulary = spec.vocab_size * hidden
        head += (4 + (itemsize if itemsize < 4 else 0)) * vocabulary
        layer += 4 * shapes.largest_group(spec) + (itemsize * vocabulary if spec.tie_embeddings else 0)
    if config.train.checkpointing == "full":
        # The stream before the layer is kept already.
        layer += _layer_bytes(config, spec, itemsize, device_type) - tokens * hidden * _stream_bytes(config)
    return _rotation(spec, tokens) + max(head, layer)

"""What is asked of post-training, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...datasets.loading import check_fields
from ..job.request import JobEnergy
from ..question.canonical import RequestError
from ..question.declaration import FILES, setting
from ..question.requests import SimulateRequest, StepQuestion
from ..question.traffic import LENGTHS, Lengths
from ..question.unread import changed, refuse_unread

METHODS = ("sft", "dpo", "ppo", "grpo")
RL = ("ppo", "grpo")  # methods that roll out
ADAPTERS = {"lora": "workload.lora_rank=16", "qlora": "workload.lora_rank=16 precision=nf4"}
RESPONSES = {"sft": 1, "dpo": 2, "ppo": 1, "grpo": 8}  # of a prompt; dpo: the chosen and the rejected one
PLACEMENTS = ("colocated", "apart", "search")
ENGINES = ("vllm", "sglang", "trtllm")
MOST_RESPONSES = 1 << 20
MOST_BATCHES = 64
MOST_LIVES = 100_000
MOST_PARTIAL = 4.0
OF_ROLLOUT = (  # settings that only methods with a rollout (ppo, grpo) read
    *(
        "rollout",
        "reward",
        "placement",
        "partial",
        "asynchronous",
        "offload_training",
        "offload_gbps",
        "sync_tensor_us",
        "kl",
        "old_log_probs",
    ),
)
PACKINGS = ("balanced", "bins", "none")


@dataclass(frozen=True)
class PromptLengths(Lengths):
    """Tokens of prompts."""

    mean: float = setting(256, least=1)


@dataclass(frozen=True)
class ResponseLengths(Lengths):
    """Tokens of responses, with a long tail, which ``workload.seq_len`` cuts."""

    kind: str = setting("lognormal", choices=LENGTHS)
    mean: float = setting(1024, least=1)
    std: float = 768
    high: int = setting(1 << 22, least=1)


@dataclass(frozen=True)
class RolloutEngine:
    """The engine that rolls out, and the layout of a replica."""

    engine: str = setting("vllm", "vllm | sglang | trtllm", choices=ENGINES)
    tp: int = setting(1, "tensor ranks of a replica", least=1)
    pp: int = setting(1, "pipeline stages of a replica", least=1)
    ep: int = setting(1, "expert ranks of a replica", least=1)
    gpus: int | None = setting(None, "that roll out, where they are apart; null: searched", least=1)
    precision: str = setting("", "such as fp8; empty: as in training, 16 bits where training packs weights")
    kv_fraction: float | None = setting(
        None, "of GPU memory for the engine (gpu_memory_utilization); null: as the engine has it"
    )
    max_seqs: int | None = setting(None, "that run at a time; null: as the engine has it", least=1)
    max_tokens: int | None = setting(None, "of an iteration; null: as the engine has it", least=1)
    async_scheduling: bool | None = setting(
        None, "the next iteration is scheduled while one runs; null: as the engine does today (vLLM from 0.14 on)"
    )
    token_us: float = setting(
        0.0, "until the trainer has each token and its log-prob, once a replica is done (NeMo-RL's loop in Python: 16)"
    )

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "rollout")
        if self.kv_fraction is not None and not 0 < self.kv_fraction <= 1:
            raise RequestError(f"rollout.kv_fraction={self.kv_fraction} must be a share, above 0 and at most 1")
        if self.gpus is not None and self.gpus % self.replica_gpus:
            raise RequestError(f"rollout.gpus={self.gpus} is no multiple of a replica's {self.replica_gpus} GPUs")

    @property
    def replica_gpus(self) -> int:
        """GPUs of a replica."""
        return self.tp * self.pp


@dataclass(frozen=True)
class RewardSource:
    """What scores responses."""

    model: str | None = setting(None, "a reward model, laid out as the trained one; null: rules alone")
    seconds: float = setting(0.0, "until all responses are scored by rules or a sandbox, beside a reward model")

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "reward")


@dataclass(frozen=True)
class PostTrainRequest(StepQuestion):
    """Post-training of the model of ``step`` by a ``method``.

    ``step`` says how it is trained: cluster, layout, framework. Its ``work.seq_len`` is the most tokens of prompt and
    response (responses are cut there), ``work.global_batch`` the sequences of an optimizer step (null: all of a batch)
    and ``work.micro_batch`` times ``seq_len`` the tokens that a micro-batch is packed to.
    """

    step: SimulateRequest = field(default_factory=lambda: SimulateRequest(model="llama3_8b"), metadata={"hidden": True})
    method: str = setting(
        "grpo", "sft | dpo | ppo | grpo; LoRA and QLoRA go with each: workload.lora_rank=16", choices=METHODS
    )
    prompts: int = setting(128, "of a batch; sft: sequences; dpo: pairs", least=1)
    responses: int | None = setting(None, "to each prompt; null: 8 of grpo, 1 of ppo", least=1)
    prompt_len: PromptLengths = setting(
        PromptLengths(), "tokens of prompts: fixed | uniform | zipf | normal | lognormal | empirical"
    )
    response_len: ResponseLengths = setting(
        ResponseLengths(),
        "tokens of responses before they are cut at workload.seq_len (the default is judged: give your own)",
    )
    lengths: str | None = setting(
        None, "a CSV file of real lengths, prompt_tokens and response_tokens, in place of both", http=FILES
    )
    iterations: int = setting(100, "batches of the whole run", least=1)
    epochs: int = setting(1, "times that each batch is trained on", least=1)
    kl: float = setting(0.001, "weight of the distance to a reference model; 0: there is none (dpo always has one)")
    old_log_probs: bool = setting(
        True, "the trainer computes log-probs of the responses again before it trains (ppo, grpo)"
    )
    critic: str | None = setting(None, "the critic of ppo; null: a model like the trained one")
    reward: RewardSource = field(default_factory=RewardSource)
    rollout: RolloutEngine = field(default_factory=RolloutEngine)
    placement: str = setting(
        "colocated",
        "colocated: rollout and training take turns on all GPUs | apart: each has its own | search",
        choices=PLACEMENTS,
    )
    asynchronous: bool = setting(
        False, "apart: the next batch is rolled out while this one is trained on, one step off"
    )
    partial: float = setting(
        0.0,
        "partial rollouts: this share of prompts is begun in addition; unfinished ones go on in the next batch",
    )
    offload_training: bool | None = setting(
        None,
        "training's state is in host memory while the GPUs roll out; null: where they are colocated; true, apart: "
        "optimizer states are there while log-probs are computed (NeMo-RL before 0.5)",
    )
    offload_gbps: float | None = setting(
        None,
        "of a GPU that copies optimizer states to the host or back while all of its node do; null: as PCIe lets pinned "
        "memory, as weights always do (NeMo-RL copies pageable memory: 4.3)",
        positive=True,
    )
    swap_reference: bool = setting(
        False,
        "the reference model's weights are in host memory, and change places with the trained ones for its log-probs "
        "(NeMo-RL): weights are copied three times",
    )
    sync_tensor_us: float | None = setting(
        None, "of a weight sync, for each tensor of the checkpoint; null: as NeMo-RL, 760 colocated and 360 apart"
    )
    packing: str = setting(
        "balanced",
        "sequences in micro-batches: balanced: as many tokens in each (veRL) | bins: whole ones, the longest first, in "
        "a pipeline padded to the fullest (NeMo-RL with Megatron) | none: each padded to the longest",
        choices=PACKINGS,
    )
    log_prob_micro_batch: int | None = setting(
        None, "times workload.seq_len: tokens of a micro-batch of log-probs; null: as in training", least=1
    )
    energy: JobEnergy = field(default_factory=JobEnergy)
    batches: int = setting(4, "that are rolled out with lengths of their own", least=1)
    lives: int = setting(1000, "times that the run is lived through", least=1)
    seed: int = setting(0, "of lengths and lives: the same seed has the same answer")

    def __post_init__(self) -> None:
        if self.method in ADAPTERS:
            raise RequestError(
                f"method={self.method}: adapters go with every method, such as method=sft {ADAPTERS[self.method]}"
            )
        check_fields(self, RequestError)
        for name, most in (("batches", MOST_BATCHES), ("lives", MOST_LIVES), ("partial", MOST_PARTIAL)):
            if getattr(self, name) > most:
                raise RequestError(f"{name}={getattr(self, name):,} is more than the {most:,} that are simulated")
        self.prompt_len.check("prompt_len")
        self.response_len.check("response_len")
        if self.step.work.kind != "train" or self.step.file is not None:
            raise RequestError(f"workload={self.step.work.kind} trains nothing: take workload=train")
        if self.step.cluster is None:
            raise RequestError("post-training needs a cluster: cluster=dgx_h100 (`opcast list clusters`)")
        self._check_batch()
        self._check_method()

    def _check_batch(self) -> None:
        if self.sequences > MOST_RESPONSES:
            raise RequestError(f"a batch of {self.sequences:,} responses is more than the {MOST_RESPONSES:,} simulated")
        mini = self.step.work.global_batch
        if mini is not None and self.sequences % mini:
            raise RequestError(
                f"workload.global_batch={mini} must divide the {self.sequences:,} sequences of a batch "
                "(prompts x responses)"
            )

    def _check_method(self) -> None:
        """RequestError for settings that a method or placement does not read."""
        if not self.rolls_out:
            refuse_unread(changed(self, OF_ROLLOUT), f"with method={self.method}")
            if self.responses not in (None, RESPONSES[self.method]):
                refuse_unread({"responses": self.responses}, f"with method={self.method}")
        if self.method != "ppo":
            refuse_unread(changed(self, ("critic",)), f"with method={self.method}")
        if not self.has_reference or self.step.work.lora_rank:
            why = "with adapters" if self.has_reference else "without a reference model"
            refuse_unread(changed(self, ("swap_reference",)), why)
        if self.placement == "apart" and not self.offload_training:
            refuse_unread(changed(self, ("offload_gbps",)), "with placement=apart without offload_training=true")
        if self.placement == "colocated":
            if self.asynchronous:
                raise RequestError("asynchronous=true needs GPUs of its own for rollout: placement=apart")
            if self.rollout.gpus is not None:
                raise RequestError(f"rollout.gpus={self.rollout.gpus} is of placement=apart: colocated uses all")

    @property
    def rolls_out(self) -> bool:
        """Whether responses are generated."""
        return self.method in RL

    @property
    def responses_of_prompt(self) -> int:
        """Sequences of each prompt."""
        return self.responses or RESPONSES[self.method]

    @property
    def sequences(self) -> int:
        """Sequences of a batch."""
        return self.prompts * self.responses_of_prompt

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of a batch."""
        return self.epochs * self.sequences // (self.step.work.global_batch or self.sequences)

    @property
    def has_reference(self) -> bool:
        """Whether a reference model computes log-probs."""
        return self.method == "dpo" or (self.rolls_out and self.kl > 0)

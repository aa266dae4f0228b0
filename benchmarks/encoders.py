"""Encoders side by side: training steps on texts as long as IMDb's reviews.

    python -m benchmarks.encoders --keep

Each round trains every contender on the same 64 examples in a changed order: forward, backward, Adan;
`eager` in random batches of 16 padded to their longest, the others in batches of 16 neighbours in length.
Ratios are medians over the rounds of two contenders' wall-clock times in one round, so that a neighbour on
the machine slows both. Lengths are drawn from a log-normal distribution with IMDb's mean and median (313 and
235 tokens, uncut), or read with `--lengths FILE`, one to a line. Weights are random: `mini`, and `minilm`
with the sizes of all-MiniLM-L6 (6 layers, hidden 384, 12 heads).

The last line is one JSON object: `cpu` by model and cap with `packed_vs_bucketed`, `fused_vs_bucketed` and
`fused_vs_eager_padded` (`bucketed` is `huggingface`; above 1 = faster, with the quartiles of each next to
it); `equivalence` of `fused` with `huggingface` in float64 without dropout (`hidden_max_abs`,
`gradient_max_rel`); `launches_per_step`, `bytes_per_token_layer` and `peak_mib` by encoder, of a BERT-base
step in bf16 (forward, backward, gradient norm, optimizer), counted from a trace with tensors that have sizes
only: operators that compute, those of `cuda_ext` with the kernels that each launches, the bytes that they
read and write, and the memory of activations and gradients. With a GPU there is also `cuda`: BERT-base in
bf16 at 512, `fused_vs_bucketed`, `fused_vs_eager_padded`, and `mfu` of `fused`.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.options import Benchmark
from benchmarks.step_trace import StepTrace
from cuda_ext import Adan
from trainers.data.batches import Batch, collate
from trainers.data.segments import pack
from trainers.data.tokens import TokenSet
from trainers.model_kinds.encoders import ENCODERS
from trainers.model_kinds.heads import ClassHead
from trainers.models import dropout, parity, student
from trainers.models.origin import Preset
from trainers.models.precision import Arithmetic
from trainers.models.student import Student
from trainers.tasks.scores import class_loss

BENCHMARK = Benchmark(
    "encoders",
    __doc__,
    fields=(
        "cpu",
        "equivalence.hidden_max_abs",
        "equivalence.gradient_max_rel",
        "launches_per_step",
        "bytes_per_token_layer",
        "peak_mib",
    ),
)

MEAN, MEDIAN = 313, 235
"""Tokens of IMDb's reviews, uncut."""
BATCH = 16
WINDOW = 32
"""Batches that are sorted by length together."""
VOCABULARY = 30522
PAD = 0
HEAD = ClassHead(("negative", "positive"))
PEAK_TFLOPS: Mapping[str, float] = {"H200": 989.0, "H100": 989.0, "A100": 312.0}
"""Dense bf16 peak by a part of the GPU's name, from NVIDIA's data sheets."""


@dataclass(frozen=True, slots=True)
class Sized(Preset):
    """A BERT of given sizes with random weights."""

    layers: int
    hidden: int
    heads: int

    def config(self, vocabulary_size: int) -> dict[str, Any]:
        """Fields of its configuration."""
        fields = Preset("mini").config(vocabulary_size)
        sizes = {"num_hidden_layers": self.layers, "hidden_size": self.hidden}
        return {
            **fields,
            **sizes,
            "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.hidden,
        }


MODELS: Mapping[str, Preset] = {
    "tiny": Preset("tiny"),
    "mini": Preset("mini"),
    "minilm": Sized("minilm", 6, 384, 12),
    "base": Preset("base"),
}


def drawn_lengths(count: int, seed: int) -> list[int]:
    """Returns lengths with IMDb's mean and median, log-normal, at least 8 tokens."""
    spread = math.sqrt(2 * math.log(MEAN / MEDIAN))
    drawn = np.random.default_rng(seed).lognormal(math.log(MEDIAN), spread, count)
    return [max(8, round(length)) for length in drawn]


def chosen_of(lengths: list[int], count: int, seed: int) -> list[int]:
    """Returns the lengths of a round's examples, shuffled.

    A window of 32 batches is sorted by length, as a run's data are, and evenly spaced batches are taken:
    sorted again they are the bucketed batches, and shuffled they are random ones.
    """
    rng = np.random.default_rng(seed)
    batches = np.sort(rng.choice(lengths, WINDOW * BATCH)).reshape(WINDOW, BATCH)
    step = WINDOW // max(1, count // BATCH)
    picked = batches[rng.integers(step) :: step]
    return [int(length) for length in rng.permutation(picked.flatten())]


def examples(lengths: list[int], cap: int) -> TokenSet:
    """Returns random tokens of these lengths, cut at a cap."""
    cut = [min(length, cap) for length in lengths]
    offsets = np.concatenate([[0], np.cumsum(cut)])
    tokens = np.random.default_rng(1).integers(1, VOCABULARY, offsets[-1])
    return TokenSet(tokens, offsets, np.arange(len(cut)) % 2, np.array(cut))


def build(model: str) -> Student:
    """Returns a model on the CPU, with the same weights for every encoder."""
    torch.manual_seed(0)
    built = student.build(
        MODELS[model], head=HEAD, vocabulary_size=VOCABULARY, dropout=0.1, max_length=512, pad_id=PAD
    )
    return built


def install(model: Student, encoder: str, *, host: bool = True) -> Student:
    """Gives a model an encoder, with the dropout of the device that it will train on."""
    ENCODERS[encoder].install(model.model)
    if host and ENCODERS[encoder].host_dropout:
        dropout.install(model)
    return model


def batches_of(data: TokenSet, encoder: str, *, bucketed: bool, multiple: int = 1) -> list[Batch]:
    """Returns all examples in batches of 16: neighbours in length, or in the order of drawing."""
    order = np.argsort(data.lengths, kind="stable") if bucketed else np.arange(len(data.lengths))
    made = [
        collate(data, order[first : first + BATCH], PAD, multiple) for first in range(0, len(order), BATCH)
    ]
    if not ENCODERS[encoder].packs:
        return made
    return [pack(batch, pad_id=PAD, multiple=multiple) for batch in made]


@dataclass(slots=True)
class Contender:
    """An encoder that trains.

    Attributes:
        model: its model, which trains on.
        optimizer: its own Adan.
        batches: gives the batches of a set of examples.
        device: where it trains.
        autocast: trains in bf16.
    """

    model: Student
    optimizer: torch.optim.Optimizer
    batches: Callable[[TokenSet], list[Batch]]
    device: torch.device
    autocast: bool = False

    @classmethod
    def of(
        cls, model: str, encoder: str, *, bucketed: bool, device: torch.device, autocast: bool
    ) -> Contender:
        """Returns an encoder with its own model and optimizer."""
        built = install(build(model), encoder, host=device.type == "cpu").to(device).train()
        multiple = 1 if device.type == "cpu" else 8
        return cls(
            built,
            Adan(built.parameters(), lr=1e-5),
            lambda data: batches_of(data, encoder, bucketed=bucketed, multiple=multiple),
            device,
            autocast,
        )

    def seconds(self, data: TokenSet) -> float:
        """Trains on all batches once; returns the time that it took, without laying out the batches."""
        batches = [batch.to(self.device) for batch in self.batches(data)]
        self._wait()
        begin = time.perf_counter()
        for batch in batches:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                loss = class_loss(self.model(batch).logits, batch) / BATCH
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


CONTENDERS: Mapping[str, tuple[str, bool]] = {
    "eager_padded": ("eager", False),
    "bucketed": ("huggingface", True),
    "packed": ("packed", True),
    "fused": ("fused", True),
}
"""Encoder of each contender, and whether its batches are bucketed by length."""

RATIOS: Mapping[str, tuple[str, str]] = {
    "packed_vs_bucketed": ("bucketed", "packed"),
    "fused_vs_bucketed": ("bucketed", "fused"),
    "fused_vs_eager_padded": ("eager_padded", "fused"),
}


def compared(
    model: str, cap: int, lengths: list[int], *, rounds: int, count: int, device: torch.device, autocast: bool
) -> dict[str, Any]:
    """Returns the ratios of one model and cap over interleaved rounds."""
    contenders = {
        name: Contender.of(model, encoder, bucketed=bucketed, device=device, autocast=autocast)
        for name, (encoder, bucketed) in CONTENDERS.items()
    }
    order = random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    tokens = []
    for number in range(rounds + 1):  # the first warms up
        data = examples(chosen_of(lengths, count, seed=number), cap)
        tokens.append(int(data.lengths.sum()))
        for name in order.sample(list(contenders), len(contenders)):
            taken[name].append(contenders[name].seconds(data))
    figures: dict[str, Any] = {}
    for ratio, (slower, faster) in RATIOS.items():
        found = [a / b for a, b in zip(taken[slower][1:], taken[faster][1:], strict=True)]
        figures[ratio] = round(statistics.median(found), 3)
        spread = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
        figures[f"{ratio}_quartiles"] = [round(spread[0], 3), round(spread[2], 3)]
    rate = [count_ / seconds for count_, seconds in zip(tokens[1:], taken["fused"][1:], strict=True)]
    figures["fused_tokens_per_s"] = round(statistics.median(rate))
    return figures


def equivalence(model: str, lengths: list[int], cap: int) -> dict[str, float]:
    """Returns how far `fused` is from `huggingface` in float64."""
    data = examples(lengths, cap)
    batch = pack(collate(data, np.arange(len(lengths)), PAD, 1), pad_id=PAD, multiple=1)
    found = parity.measure(
        build(model),
        lambda other: install(other, "fused"),
        batch,
        class_loss,
        encoder="fused",
        arithmetic=Arithmetic(),
    )
    return {
        "hidden_max_abs": found.hidden_max_abs,
        "hidden_rounding": found.hidden_rounding,
        "gradient_max_rel": found.gradient_max_rel,
        "gradient_rounding": found.gradient_rounding,
    }


@dataclass(frozen=True, slots=True)
class Traced:
    """A step in bf16 as a trace shows it.

    Attributes:
        launches: of forward, backward, the gradient's norm and the optimizer.
        bytes_per_token_layer: that the operators of forward and backward read and write.
        peak_mib: most memory of activations and gradients alive at once.
    """

    launches: int
    bytes_per_token_layer: int
    peak_mib: float


def traced(model: str, encoder: str) -> Traced:
    """Returns the trace of a step in bf16, of a batch of eight texts of 256."""
    built = install(build(model), encoder, host=False).to(torch.bfloat16).to("meta").train()
    data = examples([256] * 8, 256)
    batch = collate(data, np.arange(8), PAD, 8)
    if ENCODERS[encoder].packs:
        batch = pack(batch, pad_id=PAD, multiple=8)
    batch = batch.to(torch.device("meta"))
    trace = StepTrace()
    with trace:
        loss = class_loss(built(batch).logits, batch)
        loss.backward()  # type: ignore[no-untyped-call]
    sizes = [parameter.numel() for parameter in built.parameters()]
    # Norms of all tensors in two passes, their sum in four operators; steps counted, and AdamW of four lists.
    norm_launches = list_launches(sizes, 110) + 1 + 4
    step_launches = list_launches([1] * len(sizes), 110) + list_launches(sizes, 36)
    layers = built.model.config.num_hidden_layers
    return Traced(
        launches=trace.launched + norm_launches + step_launches,
        bytes_per_token_layer=round(trace.bytes / (8 * 256 * layers)),
        peak_mib=round(trace.peak_bytes / 2**20, 1),
    )


def list_launches(sizes: list[int], tensors_at_once: int) -> int:
    """Returns the launches of torch's kernels over lists of tensors: 320 blocks of 65,536 elements each.

    Args:
        sizes: elements of each tensor.
        tensors_at_once: tensors of a launch at most; fewer the more lists there are.
    """
    launches = blocks = tensors = 0
    for size in sizes:
        tensors += 1
        for left in range(-(-size // 65_536) - 1, -1, -1):
            blocks += 1
            if blocks == 320 or (tensors == tensors_at_once and not left):
                launches, blocks, tensors = launches + 1, 0, int(left > 0)
    return launches + (blocks > 0)


def on_cuda(lengths: list[int], *, rounds: int, count: int) -> dict[str, Any]:
    """Returns the ratios of BERT-base in bf16 at 512 on a GPU, and the share of its peak that is reached."""
    device = torch.device("cuda")
    figures = compared("base", 512, lengths, rounds=rounds, count=count, device=device, autocast=True)
    name = torch.cuda.get_device_name(device)
    peak = next((value for part, value in PEAK_TFLOPS.items() if part in name), None)
    cut = [min(length, 512) for length in lengths]
    attended = sum(length * length for length in cut) / sum(cut)
    # Per token forward: 24 H^2 of products and 4 S H of attention in each layer; backward is twice that.
    layers, hidden = 12, 768
    flops = 3 * layers * (24 * hidden * hidden + 4 * attended * hidden)
    reached = flops * figures["fused_tokens_per_s"] / 1e12
    return {**figures, "gpu": name, "tflops": round(reached, 1), "mfu": peak and round(reached / peak, 3)}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Returns all figures."""
    if given.lengths:
        lengths = [int(line) for line in Path(given.lengths).read_text().split()]
    else:
        lengths = drawn_lengths(10_000, seed=0)
    if given.cuda_only:
        return {"cuda": on_cuda(lengths, rounds=given.rounds, count=4 * given.examples)}
    cpu = torch.device("cpu")
    figures: dict[str, Any] = {"cpu": {}}
    for model in given.models.split(","):
        figures["cpu"][model] = {}
        for cap in map(int, given.caps.split(",")):
            found = compared(
                model,
                cap,
                lengths,
                rounds=given.rounds,
                count=given.examples,
                device=cpu,
                autocast=False,
            )
            figures["cpu"][model][str(cap)] = found
            print(f"{model} {cap}: {found}", flush=True)
    first = given.models.split(",")[0]
    figures["equivalence"] = equivalence(first, lengths[:4], int(given.caps.split(",")[-1]))
    traces = {encoder: traced(given.traced, encoder) for encoder in ("huggingface", "packed", "fused")}
    for figure in ("launches", "bytes_per_token_layer", "peak_mib"):
        name = "launches_per_step" if figure == "launches" else figure
        figures[name] = {encoder: getattr(trace, figure) for encoder, trace in traces.items()}
    if torch.cuda.is_available():
        figures["cuda"] = on_cuda(lengths, rounds=given.rounds, count=4 * given.examples)
    return figures


def main() -> None:
    """Command line."""
    parser = BENCHMARK.parser()
    parser.size("--rounds", 5, smoke=1, help="timed rounds of each model and cap")
    parser.size("--examples", 64, smoke=16, help="examples of a round, a multiple of 16")
    parser.size("--models", "mini,minilm", smoke="tiny", help="models, separated by commas")
    parser.size("--caps", "128,256,512", smoke="32", help="longest examples in tokens")
    parser.size("--traced", "base", smoke="tiny", help="model whose launches are counted")
    parser.add_argument("--lengths", help="file with the tokens of each text, one number to a line")
    parser.add_argument("--cuda-only", action="store_true", help="only the figures of the GPU")
    given = parser.parse_args()
    if given.cuda_only and not torch.cuda.is_available():
        parser.error("no CUDA device is visible; leave out --cuda-only")
    BENCHMARK.report(measure(given), given)


if __name__ == "__main__":
    main()

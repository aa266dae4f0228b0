"""Packed binary layers next to torch's fp32 and int8 Linear, and packed models next to fp32 ones.

    python -m benchmarks.binary --keep
    python -m benchmarks.binary --instructions avx2 --keep

Each round times every contender on the same input in a changed order. Ratios are medians over the rounds of
two contenders' wall-clock times in one round, so that a neighbour on the machine slows both; above 1 = the
packed one is faster. Shapes are Linears of BERT-base and MiniLM: `bert_ffn` (768 to 3,072), `bert_square`
(768 to 768), `minilm_ffn` (384 to 1,536) and `minilm_square` (384 to 384), of 1, 16 and 128 rows. With
`--instructions avx2` our kernels, ATen's, MKL's and oneDNN's are all limited to AVX2.

The last line is one JSON object, with two threads unless it says otherwise: `xnor_vs_fp32` and
`weight_only_vs_fp32` by shape and rows: layers with binary and with fp32 inputs next to torch's fp32 Linear;
`vs_int8`: both (`xnor`, `weight_only`) next to torch's dynamically quantised Linear; `one_thread`: these with
one thread. `end_to_end_vs_fp32` by model (`minilm`, `bert`) and batch size: forward pass of texts of 128
tokens, binary weights and inputs, embeddings and attention in fp32; `held_back_by`: largest shares of the
operators in the time of the packed pass at the largest batch. `weight_memory_ratio`: measured memory of the
packed encoder layers over that of fp32, of the model where it is larger. `exact`: every packed layer and
model equals the simulated one bit for bit; `kernels`: what computed the packed layers.
`training_time_vs_huggingface`: time of a training step with simulated bits over that of `huggingface`
(below 1 = faster), MiniLM, 16 texts of 128 tokens.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.options import Benchmark

BENCHMARK = Benchmark(
    "binary",
    __doc__,
    fields=(
        "xnor_vs_fp32",
        "weight_only_vs_fp32",
        "vs_int8",
        "one_thread",
        "end_to_end_vs_fp32",
        "held_back_by",
        "weight_memory_ratio",
        "exact",
        "kernels",
        "training_time_vs_huggingface",
    ),
    also=("torch_capability",),
)

SHAPES: Mapping[str, tuple[int, int]] = {
    "bert_ffn": (768, 3072),
    "bert_square": (768, 768),
    "minilm_ffn": (384, 1536),
    "minilm_square": (384, 384),
}
"""Inputs and outputs."""
ROWS = (1, 16, 128)
TOKENS = 128
MODELS: Mapping[str, tuple[int, int, int]] = {
    "tiny": (2, 64, 2),
    "minilm": (6, 384, 12),
    "bert": (12, 768, 12),
}
"""Layers, hidden size and heads."""
LIMITS: Mapping[str, Mapping[str, str]] = {
    "avx2": {
        "STILLHOUSE_CPU_CAPABILITY": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
}
"""Environment that limits every library to an instruction set; they read it as they load."""
Run = Callable[[], object]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch and our kernels with a number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds(run: Run, calls: int) -> float:
    """Returns the time of so many calls."""
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - begin


def ratios(contenders: Mapping[str, Run], rounds: int, slot_s: float) -> dict[str, list[float]]:
    """Returns the time of a call of each contender, by round.

    Args:
        contenders: Contenders by name.
        rounds: Timed rounds.
        slot_s: Time that a contender has in a round at least, unless one call takes longer.
    """
    calls = {}
    for name, run in contenders.items():
        run()  # Allocates and warms up.
        calls[name] = max(1, round(slot_s / max(1e-7, seconds(run, 3) / 3)))
    order, taken = random.Random(0), {name: list[float]() for name in contenders}
    for _ in range(rounds):
        for name in order.sample(list(contenders), len(contenders)):
            taken[name].append(seconds(contenders[name], calls[name]) / calls[name])
    return taken


def faster(slow: list[float], fast: list[float]) -> float:
    """Returns the median ratio of two contenders' times in a round."""
    return round(statistics.median(a / b for a, b in zip(slow, fast, strict=True)), 3)


def quantised(linear: nn.Linear) -> nn.Module | None:
    """Returns torch's dynamically quantised form of a Linear; None where this torch has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: nn.Module = torch.ao.quantization.quantize_dynamic(
                nn.Sequential(linear), {nn.Linear}, dtype=torch.qint8
            )
    except (AttributeError, RuntimeError):
        return None
    return model[0]


def layers(inputs: int, outputs: int) -> dict[str, nn.Module]:
    """Returns one Linear as it is, quantised and packed."""
    from trainers.models.binary.layers import FrozenInputs, FrozenLinear
    from trainers.models.binary.packed import PackedLinear

    linear = nn.Linear(inputs, outputs)
    signs, scale = linear.weight.detach() >= 0, linear.weight.detach().abs().mean(1)
    bias = linear.bias.detach()
    found: dict[str, nn.Module | None] = {
        "fp32": linear,
        "int8": quantised(linear),
        "xnor": PackedLinear(FrozenLinear(signs, scale, bias, FrozenInputs(1, True, 0.8, 0.05))),
        "weight_only": PackedLinear(FrozenLinear(signs, scale, bias, FrozenInputs(0, True, 1.0, 0.0))),
    }
    return {name: layer.eval() for name, layer in found.items() if layer is not None}


def layer_is_exact(built: Mapping[str, nn.Module], x: torch.Tensor) -> bool:
    """Returns whether packed layers equal the arithmetic that training simulates."""
    from tests.cuda_ext.binary_reference import reference_weight_linear

    packed: Any = built["xnor"]
    linear: Any = built["fp32"]
    signs = linear.weight.detach() >= 0
    levels = torch.where(x >= packed.threshold, 1.0, -1.0)
    simulated = nn.functional.linear(levels, torch.where(signs, 1.0, -1.0)) * packed.factor + packed.bias
    few: Any = built["weight_only"]
    reference = reference_weight_linear(x[:4], signs, few.factor, few.bias)
    return torch.equal(packed(x), simulated) and torch.equal(few(x[:4]), reference)


def of_layers(shapes: list[str], rows: list[int], rounds: int, slot_s: float) -> dict[str, Any]:
    """Returns the ratios of all shapes and numbers of rows, and whether packed layers are exact."""
    figures: dict[str, Any] = {"xnor_vs_fp32": {}, "weight_only_vs_fp32": {}, "vs_int8": {}, "exact": True}
    for shape in shapes:
        built = layers(*SHAPES[shape])
        for count in rows:
            x = torch.randn(count, SHAPES[shape][0])
            figures["exact"] &= layer_is_exact(built, x)
            contenders = {name: partial(layer, x) for name, layer in built.items()}
            taken = ratios(contenders, rounds, slot_s)
            for kind in ("xnor", "weight_only"):
                of_shape = figures[f"{kind}_vs_fp32"].setdefault(shape, {})
                of_shape[str(count)] = faster(taken["fp32"], taken[kind])
                if "int8" in taken:
                    of_int8 = figures["vs_int8"].setdefault(kind, {}).setdefault(shape, {})
                    of_int8[str(count)] = faster(taken["int8"], taken[kind])
    return figures


def encoder(model: str) -> nn.Module:
    """Returns a BERT of given sizes with random weights."""
    from transformers.models.bert.configuration_bert import BertConfig
    from transformers.models.bert.modeling_bert import BertModel

    torch.manual_seed(0)
    depth, hidden, heads = MODELS[model]
    config = BertConfig(
        num_hidden_layers=depth,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        attn_implementation="sdpa",
    )
    built: nn.Module = BertModel(config, add_pooling_layer=False)
    return built


def binarised(fp32: Any, ids: torch.Tensor) -> Any:
    """Returns a copy with binary weights and inputs, whose scales are set from data."""
    from trainers.model_kinds.families import QUANTISED
    from trainers.models.binary import install
    from trainers.models.binary.settings import Binary

    model = copy.deepcopy(fp32)
    settings = Binary(weights="sign", activations="elastic", activation_bits=1)
    setattr(model.config, QUANTISED, settings.model_dump(mode="json"))
    install.install(model)
    with install.calibrating(model):
        model(ids)
    return model


def shares(run: Run) -> dict[str, float]:
    """Returns the operators with the largest shares of the time of a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    times = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    whole = sum(times.values()) or 1.0
    largest = sorted(times, key=times.__getitem__, reverse=True)[:6]
    return {name: round(times[name] / whole, 3) for name in largest}


def of_models(models: list[str], batches: list[int], rounds: int) -> dict[str, Any]:
    """Returns how packed models compare with fp32: time by batch size, memory, and whether they are exact."""
    from trainers.models.binary.packed import pack
    from trainers.telemetry.memory import weight_mib

    figures: dict[str, Any] = {"end_to_end_vs_fp32": {}, "held_back_by": {}, "exact": True}
    memory = []
    for name in models:
        fp32 = encoder(name).eval()
        ids = torch.randint(1000, 30000, (max(batches), TOKENS))
        simulated = binarised(fp32, ids[:1]).eval()
        packed = copy.deepcopy(simulated)
        pack(packed)
        memory.append(weight_mib(packed.encoder) / weight_mib(fp32.encoder))  # type: ignore[arg-type]
        with torch.inference_mode():
            same = torch.equal(packed(ids[:1]).last_hidden_state, simulated(ids[:1]).last_hidden_state)
            figures["exact"] &= same
            of_model = figures["end_to_end_vs_fp32"].setdefault(name, {})
            for batch in batches:
                contenders = {"fp32": partial(fp32, ids[:batch]), "packed": partial(packed, ids[:batch])}
                taken = ratios(contenders, rounds, slot_s=0.0)
                of_model[str(batch)] = faster(taken["fp32"], taken["packed"])
            figures["held_back_by"][name] = shares(partial(packed, ids))
    figures["weight_memory_ratio"] = round(max(memory), 5)
    return figures


def training_time(model: str, batch: int, rounds: int) -> float:
    """Returns the time of forward and backward with simulated bits over that of fp32."""
    fp32 = encoder(model).train()
    ids = torch.randint(1000, 30000, (batch, TOKENS))
    simulated = binarised(fp32, ids[:1]).train()

    def step(trained: Any) -> None:
        trained(ids).last_hidden_state.square().mean().backward()
        trained.zero_grad(set_to_none=True)

    contenders = {"fp32": partial(step, fp32), "binary": partial(step, simulated)}
    taken = ratios(contenders, rounds, slot_s=0.0)
    return faster(taken["binary"], taken["fp32"])


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Returns all figures."""
    from cuda_ext import binary

    shapes, models = given.shapes.split(","), given.models.split(",")
    rows, batches = ([int(word) for word in words.split(",")] for words in (given.rows, given.batches))
    with torch.inference_mode(), threads(1):
        one = of_layers(shapes, rows, given.rounds, given.slot_s)
    with threads(2):
        with torch.inference_mode():
            two = of_layers(shapes, rows, given.rounds, given.slot_s)
        whole = of_models(models, batches, given.model_rounds)
        training = training_time(models[0], max(batches), given.model_rounds)
    exact = one.pop("exact") and two["exact"] and whole["exact"]
    return {
        **two,
        **whole,
        "one_thread": one,
        "exact": exact,
        "kernels": binary.capability(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "training_time_vs_huggingface": training,
    }


def main() -> None:
    """Command line."""
    parser = BENCHMARK.parser()
    parser.size("--rounds", 15, smoke=1, help="timed rounds of each shape and number of rows")
    parser.size("--model-rounds", 5, smoke=1, help="timed rounds of each model and batch size")
    parser.size("--slot-s", 0.004, smoke=0.0, help="seconds that a contender has in a round of a shape")
    parser.size("--shapes", ",".join(SHAPES), smoke="minilm_square", help="shapes, separated by commas")
    parser.size("--rows", ",".join(map(str, ROWS)), smoke="1,3", help="numbers of rows")
    parser.size("--models", "minilm,bert", smoke="tiny", help="models, separated by commas")
    parser.size("--batches", "1,16", smoke="1,2", help="batch sizes")
    parser.add_argument("--instructions", choices=LIMITS, help="limit every library to an instruction set")
    given = parser.parse_args()
    limit = LIMITS.get(given.instructions, {})
    if any(os.environ.get(name) != value for name, value in limit.items()):
        os.environ.update(limit)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.binary", *sys.argv[1:]])
    name = f"binary_{given.instructions}" if given.instructions else None
    BENCHMARK.report(measure(given), given, name=name)


if __name__ == "__main__":
    main()

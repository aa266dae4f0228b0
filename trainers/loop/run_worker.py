from trainers.config import RunConfig
from trainers.data.batches import Transform
from trainers.data.segments import Packing, StaticRow, StaticShape, up_to_multiple
from trainers.device_kinds.counters import other_device
from trainers.model_kinds.encoders import ENCODERS
from trainers.models.precision import arithmetic_for, inference_for
from trainers.parallel import workers_of
from trainers.reporting import NullSink, Sink
from trainers.tasks.base import Prepared
from trainers.telemetry.instruments import Instruments
from trainers.telemetry.timeline import timeline_for


class RunWorker:
    """One worker's place in a run; `sink` is the null sink on all but rank 0."""

    def __init__(self, config: RunConfig, sink: Sink, began_s: float, instruments: Instruments) -> None:
        self.config, self.instruments, kind = config, instruments, config.rates.kind
        self.workers = workers_of(config)
        self.sink: Sink = sink if self.workers.rank == 0 else NullSink()
        self.device = kind.backend.device(config.rates.hardware)
        self.arithmetic = arithmetic_for(config.precision, self.device, config.numerics)
        self.timeline = timeline_for(self.device, began_s)
        self.inference = inference_for(config.numerics, self.arithmetic, self.device)
        self.encoder = ENCODERS[config.model.encoder]
        self.multiple = kind.width_multiple  # Batch widths are rounded up to a multiple of this

    def laid_out(self, transform: Transform | None, prepared: Prepared, rows: int) -> Transform | None:
        """Returns a transform that ends with the layout of encoder and device, for at most so many `rows`."""
        if self.encoder.packs:
            return Packing(transform, prepared.pad_id, self.multiple)
        if self.config.rates.kind.static_shapes:
            labels_tokens = prepared.train.token_labels is not None
            return StaticShape(transform, prepared.pad_id, rows, self.config.task.max_length, labels_tokens)
        return transform

    def trained_as(
        self, transform: Transform | None, prepared: Prepared, sized: RunConfig
    ) -> Transform | None:
        """Returns the transform of training batches; for recorded passes these have few shapes."""
        if not sized.model.cuda_graphs:
            return self.laid_out(transform, prepared, sized.micro_size)
        width = up_to_multiple(sized.task.max_length, self.multiple)
        examples, tokens = sized.micro_size, sized.batch.micro_tokens
        if tokens is None:
            tokens = examples * width
        else:
            examples = min(sized.share, max(1, tokens // int(prepared.train.lengths.min(initial=tokens))))
        # One row more than there are examples; each of its stand-ins is a token of the packed row, too.
        rows, labels_tokens = examples + 1, prepared.train.token_labels is not None
        shape = StaticShape(transform, prepared.pad_id, rows, width, labels_tokens)
        return StaticRow(shape, self.multiple, up_to_multiple(tokens + rows + 1, self.multiple))

    def log(self, line: str) -> None:
        self.sink.log("info", line)

    def warn(self, line: str) -> None:
        self.sink.log("warning", line)

    def warn_of_other_device(self) -> None:
        """Warns if the GPU is not the one whose power, bandwidth and peaks the run uses."""
        rates = self.config.rates
        reported = rates.kind.backend.name(self.device)
        if reported is not None and other_device(reported, rates.reported_as):
            self.warn(
                f"hardware {rates.hardware} is requested, but this {rates.kind.noun} is {reported}: cost, "
                "MFU and modelled energy use the figures of the former; use the variant that the nodes have "
                "(docs/hardware.md)"
            )

"""The teacher: a frozen model of the student's kind, checked before its weights are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainers.config import Precision, RunConfig, Workspace
from trainers.data import tokenizers
from trainers.data.batches import Batch
from trainers.device_kinds import kind_of
from trainers.distillation.projected_student import RelationTap
from trainers.errors import BadSpecError, NotFiniteError
from trainers.model_kinds.families import QUANTISED
from trainers.model_kinds.heads import HEADS, ClassHead, Head, SpanHead, TokenHead
from trainers.models import origin, student
from trainers.models.fit import teacher_misfits
from trainers.models.origin import WEIGHTS, Folder
from trainers.models.precision import Rounded, has_bf16, has_fp16
from trainers.models.student import Output
from trainers.tasks.base import Prepared, Task
from trainers.telemetry.flops import flop_count_of

_FIELD = "model.teacher"
_UNNAMED = re.compile(r"LABEL_\d+")  # What transformers writes where no one named the classes


def locate(text: str, workspace: Workspace) -> Folder:
    """Returns the folder of `model.teacher`; `BadSpecError` for presets, and as in `origin.locate`."""
    place = origin.locate(text, workspace, _FIELD)
    if not isinstance(place, Folder):
        raise BadSpecError(
            f"{_FIELD} '{text}' is a preset, whose weights are random; give the folder of a trained model"
        )
    return place


@dataclass(frozen=True, slots=True)
class TeacherFormat:
    name: str  # Description of what really runs, for the record
    precision: Precision = Precision.fp32  # Precision whose published peak bounds its products
    dtype: torch.dtype = torch.float32
    rounded: bool = False  # Products of operands rounded to bf16 in fp32 arithmetic


def format_on(device: torch.device, wanted: str, student: Precision = Precision.fp32) -> TeacherFormat:
    """Returns the format of `distillation.teacher_precision`; `BadSpecError` if the device does not have it.

    Of the half formats `auto` prefers fp16 on a GPU: as fast as bf16, and eight times as precise. `student`
    is the run's precision: tf32 is switched on for the process, and so for an fp32 teacher.
    """
    kind = kind_of(device)
    if wanted == "auto":
        has = {"fp16": has_fp16, "bf16": has_bf16}
        wanted = next(name for name in kind.teacher_precisions if name not in has or has[name](device))
    if wanted not in kind.teacher_precisions:
        raise BadSpecError(
            f"distillation.teacher_precision {wanted} needs a GPU, but this worker computes on its "
            f"{kind.noun}; use auto"
        )
    if wanted == "fp16":
        return TeacherFormat("fp16 weights and arithmetic", Precision.fp16, torch.float16)
    if wanted == "bf16":
        if has_bf16(device):
            return TeacherFormat("bf16 weights and arithmetic", Precision.bf16, torch.bfloat16)
        return TeacherFormat(Rounded(torch.bfloat16).name, rounded=True)
    return TeacherFormat("tf32", Precision.tf32) if student is Precision.tf32 else TeacherFormat("fp32")


class Teacher:
    """A teacher that exists and fits, without its weights; raises `BadSpecError` for any other."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        task: Task,
        data: Prepared,
        device: torch.device,
        report: Callable[[str], None],
    ) -> None:
        self._config, self._device = config, device
        self._with_head = config.distillation.soft_weight > 0.0
        self.folder = folder = locate(name, config.workspace)
        self.data = _read_by(folder, config, task, data, report)
        fields = folder.config()
        self.shape = folder.family.shape(fields)
        for misfit in teacher_misfits(config, str(folder), folder.family, fields):
            raise BadSpecError(f"{_FIELD}: {misfit.reason}")
        if self._with_head:
            _require_same_task(folder, fields, data.head, task.spellings, report)
        # Half precision would round the weights whose signs are used.
        wanted = Precision.fp32 if QUANTISED in fields else config.distillation.teacher_precision
        self.format = format_on(device, wanted, config.precision)
        self.sha256 = origin.digest(folder, config.workspace)

    def load(self, *, relations_of: Sequence[int] = ()) -> LoadedTeacher:
        """Reads the weights and converts them, once; keeps relations of some layers, in this order.

        Raises `BadSpecError` if they do not fit their own configuration, or the head is missing.
        """
        model = student.build(
            self.folder,
            head=self.data.head if self._with_head else SpanHead(),  # the smallest, and unused
            vocabulary_size=self.data.vocabulary_size,
            dropout=0.0,
            max_length=self._config.task.max_length,
            pad_id=self.data.pad_id,
        )
        if self._with_head and model.fresh:
            raise BadSpecError(
                f"{_FIELD} {self.folder} has no weight {model.fresh[0]} for task "
                f"{self._config.task.name}; fine-tune it on the task first"
            )
        if self.format.rounded:
            Rounded(torch.bfloat16).prepare(model)
        model.requires_grad_(False).to(self._device, self.format.dtype).eval()
        tap = RelationTap(model, relations_of) if relations_of else None
        return LoadedTeacher(model, tap, self._device, with_head=self._with_head)


class LoadedTeacher:
    def __init__(
        self, model: student.Student, tap: RelationTap | None, device: torch.device, *, with_head: bool
    ) -> None:
        self.model, self._tap, self._device, self._with_head = model, tap, device, with_head
        self.flop_count = flop_count_of(model.model.config, model.head if with_head else None)

    @torch.no_grad()
    def __call__(self, batch: Batch, *, with_hidden: bool) -> Output:
        """Logits, and with `with_hidden` hidden states and relations, in fp32; no logits without a head."""
        batch = batch.padded()  # its layers are transformers' own
        # Its weights have their format already: the student's autocast must not convert them again.
        if self._tap is not None:
            self._tap.open = with_hidden
        with torch.autocast(self._device.type, enabled=False):
            encoded = self.model.encode(batch, with_hidden=with_hidden)
            logits = self.model.logits(encoded, batch).float() if self._with_head else torch.empty(0)
        hidden = tuple(state.float() for state in encoded.hidden_states) if with_hidden else ()
        relations = () if self._tap is None else tuple(part.float() for part in self._tap.take())
        return Output(logits, hidden, relations)


def require_finite(logits: torch.Tensor, teacher: Teacher) -> None:
    """Raises NotFiniteError for logits that the teacher's number format cannot hold."""
    if not bool(torch.isfinite(logits).all()):
        remedy = "set distillation.teacher_precision to bf16 or fp32"
        if teacher.format.precision in (Precision.fp32, Precision.tf32):
            remedy = "its weights are damaged; use another teacher"
        raise NotFiniteError(
            f"{_FIELD} {teacher.folder} produces non-finite logits in {teacher.format.name}; {remedy}"
        )


def _read_by(
    folder: Folder, config: RunConfig, task: Task, data: Prepared, report: Callable[[str], None]
) -> Prepared:
    """Returns a run's examples as the teacher reads them: with its own tokenizer where that differs.

    It then teaches by its logits of whole texts, which do not depend on tokens; a run that needs more of it
    raises `BadSpecError`.
    """
    difference = _difference(data.tokenizer, folder)
    if difference is None:
        return data
    reason = None
    if data.head.reads != "text":
        reason = f"task {config.task.name} is learned token by token"
    elif config.distillation.looks_inside:
        reason = "hidden states and relations are compared token by token"
    elif not config.distillation.cache_logits:
        reason = "distillation.cache_logits is false"
    if reason is not None:
        raise BadSpecError(
            f"{_FIELD} {folder} has a different vocabulary than the student: {difference}; it can teach only "
            f"by cached logits of whole texts, but {reason}; use a student and a teacher with the same "
            "tokenizer"
        )
    report(f"{_FIELD}: the teacher has a tokenizer of its own and reads the same texts with it")
    of_teacher = task.prepare(config, folder, lambda line: report(f"{_FIELD}: {line}"))
    assert len(of_teacher.train) == len(data.train)
    return of_teacher


def _difference(file: Path, folder: Folder) -> str | None:
    """Returns where the pieces or their numbers differ, in words; None = nowhere."""
    own = tokenizers.file_in(folder.path)
    if file == own or (own.is_file() and file.read_bytes() == own.read_bytes()):
        return None
    vocabularies = (tokenizers.load(path).get_vocab() for path in (file.parent, folder.path))
    ours, theirs = (sorted(vocabulary, key=vocabulary.__getitem__) for vocabulary in vocabularies)
    for number, (our, their) in enumerate(zip_longest(ours, theirs)):
        if our != their:
            pieces = f"{len(theirs)} and {len(ours)} pieces"
            return f"{pieces}, first difference at {number} ({their!r} and {our!r})"
    return None


def _require_same_task(
    folder: Folder,
    fields: Mapping[str, Any],
    head: Head,
    spellings: Mapping[str, int],
    report: Callable[[str], None],
) -> None:
    try:
        with safe_open(str(folder.path / WEIGHTS), framework="pt") as stored:
            weights = list(stored.keys())
    except (SafetensorError, OSError) as error:
        raise BadSpecError(f"{folder.path / WEIGHTS}: the weights cannot be read ({error})") from None
    own = folder.family.heads
    suffixes = {suffix for suffix, begin in own.items() if any(name.startswith(begin) for name in weights)}
    # Heads of two kinds may have one name; then the class that wrote the folder decides.
    written_by = tuple(map(str, fields.get("architectures") or ()))
    suffixes = {suffix for suffix in suffixes if any(one.endswith(suffix) for one in written_by)} or suffixes
    if head.suffix not in suffixes:
        predictions = dict.fromkeys(kind.predicts for kind in HEADS if kind.suffix in suffixes)
        own_task = " and ".join(predictions) or "nothing, as it has no head"
        raise BadSpecError(
            f"{_FIELD} {folder} was trained to predict {own_task}, but the task needs {head.predicts}; "
            "fine-tune it on the task first, or set distillation.soft_weight: 0"
        )
    names = fields.get("id2label")
    if not isinstance(head, ClassHead | TokenHead) or not isinstance(names, dict):
        return
    if {*names} != {*map(str, range(len(names)))}:
        raise BadSpecError(
            f"{_FIELD} {folder}: config.json's id2label has the keys {', '.join(sorted(names))}; "
            f"number its classes 0 to {len(names) - 1}"
        )
    theirs = [str(names[str(number)]) for number in range(len(names))]
    if len(theirs) != len(head.classes):
        raise BadSpecError(
            f"{_FIELD} {folder} has {len(theirs)} classes, but the task has {len(head.classes)}; use a "
            "teacher fine-tuned on the task"
        )
    if all(_UNNAMED.fullmatch(name) for name in theirs):
        report(f"{_FIELD}: the teacher's classes have no names; assuming the task's order")
        return
    numbers = {our.casefold(): number for number, our in enumerate(head.classes)} | dict(spellings)
    for number, (their, our) in enumerate(zip(theirs, head.classes, strict=True)):
        if numbers.get(their.casefold()) != number:
            raise BadSpecError(
                f"{_FIELD} {folder} calls class {number} {their!r}, but the task calls it {our!r}; "
                "use a teacher fine-tuned on the task"
            )

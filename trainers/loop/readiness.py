"""Warms up a fresh process: loads kernels and runs one step of a toy model.

A library's first call costs more than later ones: lazy imports, thread pools, device contexts, kernel
selection. `first_step` makes these calls, so that no run's first step does.
"""

import numpy as np
import torch

from trainers.data.batches import Prefetcher, collate
from trainers.data.tokens import TokenSet
from trainers.device_kinds import DeviceKind
from trainers.model_kinds.heads import ClassHead
from trainers.models import dropout, student
from trainers.models.origin import Preset

_EXAMPLES, _LENGTH, _VOCABULARY = 8, 32, 128


def first_step(kind: DeviceKind) -> None:
    """Trains and evaluates a toy model for one step; generators are left as they were."""
    device = torch.device(kind.torch_type)
    with kind.backend.keep_random_state(device), torch.enable_grad():
        model = student.build(
            Preset("tiny"),
            head=ClassHead(("no", "yes")),
            vocabulary_size=_VOCABULARY,
            dropout=0.1,
            max_length=_LENGTH,
            pad_id=0,
        ).to(device)
        if kind.host_dropout:
            dropout.install(model)
        # Of different lengths, so that attention has a mask.
        offsets = np.cumsum([0, *range(_LENGTH - _EXAMPLES + 1, _LENGTH + 1)])
        ids = np.arange(offsets[-1]) % _VOCABULARY
        tokens = TokenSet(ids.astype(np.uint16), offsets, np.arange(_EXAMPLES) % 2)
        batches = Prefetcher(lambda step: collate(tokens, np.arange(_EXAMPLES), 0, 8), 0, 1)
        batch = batches.next().to(device)
        batches.close()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=kind.fused_steps)
        loss = torch.nn.functional.cross_entropy(model(batch).logits, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(batch).logits.cpu()

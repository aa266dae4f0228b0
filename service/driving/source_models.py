"""The models that runs start from: verified checkpoints of other runs."""

from __future__ import annotations

from pathlib import Path

from service.domain.records import Run
from service.driving.sweep_context import SweepContext
from service.specs.models import NoModel, Reference, checkpoint_of, reference
from service.store import NotFound
from trainers.checkpoints.manifest import verify


class SourceModels:
    """Finds checkpoints by `run:12`; each is verified once."""

    def __init__(self, context: SweepContext) -> None:
        self._context = context
        self._found: dict[str, Path] = {}
        """Checkpoint folder by `run:12`."""

    def of(self, run: Run) -> dict[str, Path] | None:
        """Returns the checkpoint folders that a run starts from; None = a source may still succeed.

        Raises:
            NoModel: a source has none and will have none.
        """
        models: dict[str, Path] = {}
        for text in (run.student, run.teacher):
            number = reference(text)
            if number is None or text is None:
                continue
            found = self._found.get(text) or self._find(number)
            if found is None:
                return None  # It had ended when the experiment was claimed, and is tried again.
            if isinstance(found, str):
                raise NoModel(found)  # Not for good: people can retry the source, and then this run.
            models[text] = self._found[text] = found
        return models

    def _find(self, number: int) -> Path | str | None:
        """Returns the best checkpoint of a run, or why there is none; None = there may be one later."""
        store = self._context.store
        try:
            source = store.run(number)
        except NotFound:
            return Reference(number, None, None, None).hopeless
        standing = Reference(number, source.state, source.failure_class, source.failure_message)
        if standing.pending:
            return None
        if standing.hopeless is not None:
            return standing.hopeless
        try:
            path = checkpoint_of(self._context.settings, store.source_of(source), "best")
        except NoModel as error:
            return str(error)
        problem = verify(path)
        if problem is not None:
            return f"run {number}: its checkpoint {path} is damaged ({problem})"
        return path

"""A dataset on the Hugging Face hub, read through the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from trainers.data.fingerprint import FileSet, digest_of
from trainers.data.parts import TRAIN, named_parts, used_parts
from trainers.data.preparation import preparing
from trainers.data.rows import Row
from trainers.errors import BadDataError


class HubDataset:
    """A dataset by hub id.

    Args:
        identifier: Such as `stanfordnlp/imdb`, or with one of its configurations
            `Salesforce/wikitext:wikitext-2-raw-v1`.
        offline: Use the local hub cache alone.
        test: `task.test`.
    """

    def __init__(self, identifier: str, *, offline: bool, test: Literal["auto", "none"]) -> None:
        self.name = identifier
        self._offline, self._test = offline, test

    @cached_property
    def parts(self) -> dict[str, FileSet]:
        """Fingerprints, as the library computes them from the dataset's revision and files.

        Raises:
            BadDataError: unknown id, no network, or no training part.
        """
        found: dict[str, FileSet] = {}
        for part, table in self._tables.items():
            identity = [str(table.info.version), len(table), sorted(table.features), str(table.split)]
            checksums = table.info.download_checksums or {}
            size = table.info.dataset_size or 0
            found[part] = FileSet(1, int(size), digest_of([self.name, identity, sorted(checksums)]))
        return found

    def rows(self, part: str) -> Iterator[Row]:
        for number, row in enumerate(self._tables[part], 1):
            yield Row(row, f"{self.name} ({part}), row {number}")

    @cached_property
    def _tables(self) -> Mapping[str, Any]:
        with preparing():
            splits = self._load()
        tables = named_parts(splits.get)
        if TRAIN not in tables:
            raise BadDataError(
                f"hub dataset '{self.name}' has no split named train (found: {', '.join(splits)})"
            )
        return used_parts(tables, self._test)

    def _load(self) -> Any:
        # Imported here: only runs on hub data pay for the import.
        import datasets

        identifier, _, configuration = self.name.partition(":")
        if Path(identifier).exists():  # The library would read that instead.
            raise BadDataError(
                f"hub dataset '{identifier}' has the same name as a path in the working directory "
                f"{Path.cwd()}; rename that path, or start elsewhere"
            )
        before = datasets.config.HF_HUB_OFFLINE
        datasets.config.HF_HUB_OFFLINE = self._offline or before
        try:
            return datasets.load_dataset(
                identifier,
                configuration or None,
                download_config=datasets.DownloadConfig(local_files_only=self._offline, disable_tqdm=True),
            )
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            hint = (
                "offline: only datasets in the local hub cache can be used; give a local path"
                if self._offline
                else "check the id and the network, or give a local path"
            )
            raise BadDataError(f"hub dataset '{self.name}' cannot be loaded ({reason}); {hint}") from error
        finally:
            datasets.config.HF_HUB_OFFLINE = before

"""What MLflow's aliases name answers here: a registry of predictors that follows those of a tracking server.

Someone moves an alias, on MLflow's page or by ``opcast train rollback=true`` on another machine; who follows makes that
version current in the own registry, fetched from MLflow where it is not there yet.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .predictor import CARD, Predictor, PredictorError, load
from .registry import Entry, Registry
from .tracking import DIGEST, PREFIX, alias_of, check, client_of, in_one_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


@dataclass
class AliasFollower:
    """Makes current in ``registry`` what the aliases of devices name at ``uri``; an alias that has not moved since it
    was last looked at costs one call for all of them."""

    uri: str
    registry: Registry
    seen: dict[tuple[str, str], str] = field(default_factory=dict)

    def look(self) -> list[str]:
        """The predictors that became current now, as ``gemm@torch/h100_sxm@3``.

        TrackingError when MLflow does not answer; predictors stay as they are. A version that this opcast cannot read
        is left alone, and looked at again when its alias moves.
        """
        check(self.uri)
        with in_one_line(self.uri):
            client = client_of(self.uri)
            moved = list(self._moved(client))
            return [f"{entry.name}@{entry.version}" for entry in moved]

    def _moved(self, client: MlflowClient) -> Iterator[Predictor]:
        for model in client.search_registered_models(filter_string=f"name LIKE '{PREFIX}%'"):
            for alias, version in model.aliases.items():
                if self.seen.get((model.name, alias)) == version:
                    continue
                model_version = client.get_model_version(model.name, version)
                followed = (
                    self._follow(client, model_version)
                    if alias_of(model_version.tags.get("device", "")) == alias
                    else None
                )
                self.seen[model.name, alias] = version
                if followed is not None:
                    yield followed

    def _follow(self, client: MlflowClient, version: ModelVersion) -> Predictor | None:
        """The predictor of a version, made current; None where it is that already, or is none that can be read."""
        digest = version.tags.get(DIGEST, "")
        registered = self._known(version.tags["device"], digest)
        try:
            if registered is not None:
                if registered.current:
                    return None
                self.registry.promote(registered)
                return self.registry.load(registered.path)
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(client.download_artifacts(str(version.run_id), "model", scratch))
                card = next(folder.rglob(CARD), None)
                return None if card is None else self.registry.register(load(card.parent))
        except PredictorError:
            return None

    def _known(self, device_id: str, digest: str) -> Entry | None:
        """The version of the own registry with these very arrays."""
        for entry in self.registry.list():
            if entry.device_id == device_id and digest and entry.card.get("sha256") == digest:
                return entry
        return None

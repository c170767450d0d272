"""A trained model of one op kind on one device and backend: predicts, saves and loads without pickle.

On disk a predictor is a folder: ``card.json`` (what it is, how good, the hash of its arrays) and ``model.npz``.
Loading one and predicting needs numpy only.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..datasets.devices import Device, DeviceError
from ..datasets.reading import read_json
from ..datasets.vocabulary import Op, OpColumns, iterate_groups
from .analytical import latency_us
from .correction import Correction, nested, part
from .envelope import Envelope
from .features import FEATURES_VERSION, Frame, feature_names, frame
from .features.device import device_distance
from .forest import ForestError
from .intervals import Intervals, classes_of, partly_physics

FORMAT = 2
CARD, MODEL = "card.json", "model.npz"
MEND = "train it again, or remove its folder for others to answer"
CHUNK = 16_384  # ops that one thread answers at a time
# no law of latency reads these
UNTIMED = (
    *("id", "name", "die", "sm", "sources", "idle_w", "memory_w", "steady_tflops", "boost_tflops", "alpha", "reuse"),
)
FIGURES = tuple(each.name for each in fields(Device) if each.name not in UNTIMED)
MEMO = 100_000  # answers to single ops that are kept
NEAR = 0.75  # octaves between figures of devices that count as alike: H100 and H200, not H100 and B200
ANY = "any"  # the device id of a predictor that was learned from several devices, for all of them


class PredictorError(ValueError):
    """A predictor that is missing, damaged or of another version. The message names it and what to do."""


@dataclass(frozen=True)
class Prediction:
    """Answers for n ops: latency with the interval of stated coverage, us; whether the op is like training's."""

    latency_us: np.ndarray
    low_us: np.ndarray
    high_us: np.ndarray
    in_envelope: np.ndarray

    def __len__(self) -> int:
        return len(self.latency_us)


@dataclass(frozen=True, eq=False)
class Predictor:
    """``device`` holds the figures it was trained with; ``card`` everything worth knowing, ready for JSON."""

    kind: str
    device: Device
    backend: str
    version: str
    correction: Correction
    intervals: Intervals
    envelope: Envelope
    card: Mapping[str, Any] = field(default_factory=dict)
    _memo: dict[tuple[Op, str], tuple[Any, ...] | None] = field(default_factory=dict, init=False, repr=False)

    @property
    def device_id(self) -> str:
        return self.device.id

    @property
    def name(self) -> str:
        """``gemm@torch/h100_sxm``: what reports print beside the version."""
        return f"{self.kind}@{self.backend}/{self.device_id}"

    @property
    def coverage(self) -> float:
        """The stated chance that the truth lies within an interval."""
        return self.intervals.coverage

    def predict(
        self,
        columns: Mapping[str, np.ndarray],
        dtype: str,
        out_dtype: str | None = None,
        device: Device | None = None,
        cache: str = "warm",
    ) -> Prediction:
        """Latency of n ops of one dtype: ``columns`` holds an array of n values per dim.

        Many ops are answered in parts of a fixed size on all cores, so that answers depend on neither.
        The correction is only right on top of the analytical time it was learned from. So the predictor's own device
        with other figures (a what-if) is answered with those of training, times what physics says that the figures
        change of each op, outside the envelope; a measured machine's differ from probe to probe, and stay those of
        training. Another device is taken as given and is outside the envelope. To a predictor of any device, those far
        from all that it learned from are outside; its interval was calibrated on devices left out and stays as wide.
        """
        same_device = device is None or device.id == self.device.id
        in_domain = same_device or self.device.id == ANY
        target = self.device if device is None or same_device else device
        prediction = self._in_parts(columns, dtype, out_dtype, target, cache, in_domain)
        if not same_device and in_domain and not self._near(target, dtype):
            prediction.in_envelope[:] = False
        if device is not None and same_device and not self._as_trained(device):
            query = OpColumns(self.kind, columns, dtype, out_dtype, cache)
            change = latency_us(query, device) / latency_us(query, self.device)
            nowhere = np.zeros(len(prediction), dtype=bool)
            return Prediction(
                prediction.latency_us * change, prediction.low_us * change, prediction.high_us * change, nowhere
            )
        return prediction

    def _as_trained(self, device: Device) -> bool:
        """Whether a device of the predictor's id has the figures of training, as far as they are no measurement."""
        if device is self.device or device.synchronous:
            return True
        return all(getattr(device, name) == getattr(self.device, name) for name in FIGURES)

    def _in_parts(
        self,
        columns: Mapping[str, np.ndarray],
        dtype: str,
        out_dtype: str | None,
        device: Device,
        cache: str,
        in_domain: bool,
    ) -> Prediction:
        def answer(chunk: Mapping[str, np.ndarray]) -> Prediction:
            return self.predict_frame(frame(OpColumns(self.kind, chunk, dtype, out_dtype, cache), device), in_domain)

        return in_parts(columns, answer, [self.correction])

    def _near(self, device: Device, dtype: str) -> bool:
        """Whether a device is like one of those it learned from."""
        return any(device_distance(device, donor, dtype) <= NEAR for donor in self._donors)

    @cached_property
    def _donors(self) -> list[Device]:
        return [Device.from_dict(figures) for figures in self.card.get("device_figures", ())]

    def predict_frame(self, ops: Frame, known_device: bool = True) -> Prediction:
        """The same for features that are already there."""
        latency = ops.analytical_us * np.exp(self.shortfall(ops, ops.analytical_us))
        latency = np.maximum(latency, 1e-3)
        excess = self.envelope.excess(ops.matrix) + (0.0 if known_device else 2.0)
        classes = classes_of(feature_names(self.kind), ops.matrix)
        widths = self.intervals.widths(ops.analytical_us, excess, classes)
        spread = np.exp(partly_physics(widths, self.seen(ops.analytical_us)))
        return Prediction(latency, latency / spread, latency * spread, excess <= 0.0)

    @property
    def hidden_us(self) -> float:
        """What takes less was timed with the host's dispatch, and left out of training; 0 where nothing was."""
        return float(self.card.get("hidden_us", 0.0))

    def shortfall(self, ops: Frame, law_us: np.ndarray) -> np.ndarray:
        """ln(latency / analytical) of n ops that take ``law_us`` by physics on the device that was learned from.

        Of ops that physics has far below :attr:`hidden_us`, training saw those alone that took many times longer. So
        what it says of them counts as far as physics reaches up to there.
        """
        return np.asarray(self.correction.predict(ops.matrix) * self.seen(law_us))

    def seen(self, law_us: np.ndarray) -> np.ndarray:
        """How far physics reaches up to :attr:`hidden_us` [n]: the rest of an answer is physics alone."""
        return np.minimum(law_us / self.hidden_us, 1.0) if self.hidden_us else np.ones(len(law_us))

    def predict_ops(self, ops: Sequence[Op], device: Device | None = None, cache: str = "warm") -> Prediction:
        """Latency of a list of ops of this kind, dtypes mixed; an op asked about before is answered from memory.

        PredictorError for an op of another kind.
        """
        as_trained = device is None or (device.id == self.device.id and self._as_trained(device))
        memo = self._memo if as_trained else {}
        answers = {op: memo.get((op, cache)) for op in ops}
        missing = [op for op, answer in answers.items() if answer is None]
        for kind_name, dtype, out_dtype, positions, columns in iterate_groups(missing):
            if kind_name != self.kind:
                raise PredictorError(f"{self.name} was asked about {kind_name}")
            figures = _columns(self.predict(columns, dtype, out_dtype, device, cache))
            for position, *answer in zip(positions.tolist(), *(column.tolist() for column in figures), strict=True):
                memo[missing[position], cache] = answers[missing[position]] = tuple(answer)
        if len(memo) > MEMO:
            memo.clear()
        table = np.array([answers[op] for op in ops], dtype=np.float64).reshape(len(ops), 4)
        latency, low, high, inside = table.T
        return Prediction(latency, low, high, inside > 0)

    def save(self, directory: Path | str) -> Path:
        """Write into ``directory`` (made by this call) all or nothing.

        FileExistsError when it is there already, PredictorError when the disk does not take it.
        """
        directory = Path(directory)
        staging: Path | None = None
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
            payload = self.model_bytes()
            digest = hashlib.sha256(payload).hexdigest()
            _write(staging / MODEL, payload)
            _write(staging / CARD, json.dumps(self.to_card(digest), indent=1, sort_keys=True).encode() + b"\n")
            staging.chmod(0o755)
            os.rename(staging, directory)  # fails on a folder with content: no version is overwritten
        except OSError as failed:
            if staging is not None:
                shutil.rmtree(staging, ignore_errors=True)
            if directory.exists():
                raise FileExistsError(str(directory)) from None
            reason = f"{failed.strerror or failed}; free or choose a place that can be written"
            raise PredictorError(f"cannot write {directory}: {reason}") from None
        return directory

    def to_card(self, digest: str) -> dict[str, Any]:
        """The card as written: identity, formats and hash on top of ``card``."""
        return {
            "trained_at": datetime.now(UTC).date().isoformat(),
            **self.card,
            "format": FORMAT,
            "features_version": FEATURES_VERSION,
            "feature_names": list(feature_names(self.kind)),
            "kind": self.kind,
            "device_id": self.device_id,
            "device": self.device.to_dict(),
            "backend": self.backend,
            "version": self.version,
            "sha256": digest,
        }

    def model_bytes(self) -> bytes:
        """The arrays as the bytes of an .npz: the same model gives the same bytes."""
        arrays = {
            **nested("correction", self.correction.arrays()),
            **nested("intervals", self.intervals.arrays()),
            **nested("envelope", self.envelope.arrays()),
        }
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(arrays):
                member = io.BytesIO()
                np.lib.format.write_array(member, np.asarray(arrays[name]), allow_pickle=False)
                archive.writestr(zipfile.ZipInfo(f"{name}.npy"), member.getvalue(), zipfile.ZIP_DEFLATED)
        return buffer.getvalue()


def in_parts(
    columns: Mapping[str, np.ndarray],
    answer: Callable[[Mapping[str, np.ndarray]], Prediction],
    corrections: Sequence[Correction],
) -> Prediction:
    """Answers to n ops by parts of a fixed size on all cores, so that they depend on neither."""
    count = len(np.atleast_1d(next(iter(columns.values()))))
    if count <= CHUNK:
        return answer(columns)
    for correction in corrections:
        correction.expect(count)
    starts = range(0, count, CHUNK)
    split = ({name: values[start : start + CHUNK] for name, values in columns.items()} for start in starts)
    with ThreadPoolExecutor(min(_cores(), len(starts))) as pool:
        parts = list(pool.map(answer, split))
    return Prediction(*(np.concatenate(correction) for correction in zip(*map(_columns, parts), strict=True)))


def load(directory: Path | str) -> Predictor:
    """A saved predictor. PredictorError when it is missing, tampered with, or of another format or feature set."""
    directory = Path(directory)
    card = read_card(directory)
    title = f"predictor {card.get('kind')} v{card.get('version')} in {directory}"
    if card.get("format") != FORMAT or card.get("features_version") != FEATURES_VERSION:
        theirs = f"format {card.get('format')}, features {card.get('features_version')}"
        raise PredictorError(f"{title} has {theirs}; this opcast reads {FORMAT} and {FEATURES_VERSION}: {MEND}")
    try:
        payload = (directory / MODEL).read_bytes()
    except OSError as error:
        raise PredictorError(f"{title} lacks {MODEL}: {error.strerror}; {MEND}") from None
    if hashlib.sha256(payload).hexdigest() != card.get("sha256"):
        raise PredictorError(f"{title} does not match its hash: damaged or tampered with; {MEND}")
    try:
        return _assemble(card, payload)
    except (KeyError, ValueError, TypeError, ForestError, DeviceError, zipfile.BadZipFile) as error:
        raise PredictorError(f"{title} is incomplete ({error}); {MEND}") from None


def read_card(directory: Path | str) -> dict[str, Any]:
    """The card of a saved predictor, without its arrays. PredictorError when there is none that can be read."""
    try:
        card = read_json(Path(directory) / CARD, PredictorError, CARD)
    except PredictorError as error:
        raise PredictorError(f"{directory} holds no predictor: {error}; {MEND}") from None
    if not isinstance(card, dict):
        raise PredictorError(f"{directory} holds no predictor: {CARD} is not an object; {MEND}")
    return card


def _assemble(card: Mapping[str, Any], payload: bytes) -> Predictor:
    with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if list(feature_names(card["kind"])) != card["feature_names"]:
        raise ValueError("its feature columns differ from this opcast's")
    return Predictor(
        card["kind"],
        Device.from_dict(card["device"]),
        card["backend"],
        card["version"],
        Correction.from_arrays(part(arrays, "correction")),
        Intervals.from_arrays(part(arrays, "intervals")),
        Envelope.from_arrays(part(arrays, "envelope")),
        card,
    )


def _columns(prediction: Prediction) -> tuple[np.ndarray, ...]:
    return prediction.latency_us, prediction.low_us, prediction.high_us, prediction.in_envelope


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

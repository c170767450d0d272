"""The one place where a question finds what answers it: stores, registries, devices, clusters and engines.

A :class:`Workbench` is made from the sources that a request names. It keeps what it built from question to question,
for as long as no measurement or predictor is added to them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.clusters import Cluster
from ..datasets.devices import Device, DeviceError, load_device
from ..datasets.own_warnings import own_warnings
from ..datasets.store import Store
from ..models import power
from ..models.clocks import COLUMNS, with_own_clocks
from .engines import FusedEngine, build_engine
from .engines.backends import check_backend
from .engines.network import NetworkEngine
from .predict.ops import predict_ops, with_power
from .question.canonical import RequestError
from .question.network import NetworkChoice
from .question.place import LOCAL, THIS_MACHINE
from .question.predictions import PredictRequest
from .question.sources import Sources

if TYPE_CHECKING:
    from .chips.answer import ChipsReport
    from .chips.request import CompareRequest
    from .job.answer import PlanReport
    from .job.request import PlanRequest
    from .post_training.answer import PostTrainReport
    from .post_training.request import PostTrainRequest
    from .predict.links import Links
    from .question.plan import Plan
    from .question.requests import CalibrateRequest, SimulateRequest, ValidateRequest
    from .question.serving import ServingRequest
    from .report.answer import InferenceReport, OpPrediction, StepReport
    from .report.workload_file import FileReport
    from .search.compare import ComparedPoints
    from .search.question import SearchQuestion
    from .search.result import SearchReport
    from .search.spread import Crew
    from .serving.serve import Keeping, ServedTraffic
    from .upgrade.answer import UpgradeReport
    from .upgrade.request import UpgradeRequest
    from .validation import Validation, ValidationSettings
    from .validation.calibrate import Calibrating

PACKAGE = Path(__file__).resolve().parent.parent
SHIPPED_STORE = PACKAGE / "datasets" / "measured"
SHIPPED_PREDICTORS = PACKAGE / "models" / "shipped"
Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
MOST = 32  # engines, and devices, that are kept
OF_A_MACHINE = ("compute_units", "clock_mhz", "steady_tflops")  # figures that rows of its clocks stand for


@dataclass(frozen=True)
class Answered:
    """The report of a step, and the device and engines behind it, as pictures of it need them."""

    report: StepReport | InferenceReport | FileReport
    device: Device
    engine: FusedEngine


class Workbench:
    """Answers requests from the same sources.

    ``machine`` names the device that ``device="cpu"`` is, ``node`` the machine whose device ``device="local"`` is.

    Raises StoreError for a store that is none, EngineError for an engine or backend that does not exist.
    """

    def __init__(
        self, sources: Sources, machine: Callable[[], str] | None = None, node: Callable[[], str] | None = None
    ) -> None:
        self.sources = sources
        self.machine = machine
        self.node = node
        self.stores = [Path(sources.store).expanduser(), SHIPPED_STORE]
        self.registries = [Path(sources.predictors).expanduser(), SHIPPED_PREDICTORS]
        self._stamp: tuple[int, ...] = ()
        self._engines: dict[str, FusedEngine] = {}
        self._devices: dict[str, Device] = {}

    # --- what is known ---------------------------------------------------------------------------------

    def device(self, given: Device | str, cluster: Cluster | None = None) -> Device:
        """The figures of a device: those given, or of its name in a store or as shipped.

        In a cluster ``cpu`` stands for the cluster's device. Raises DeviceError for an unknown one, RequestError for
        this machine when nobody measured it yet.
        """
        self._refresh()
        name = cluster.device if cluster is not None and given == THIS_MACHINE else given
        key = repr(name)
        if key not in self._devices:
            if len(self._devices) >= MOST:
                self._devices.clear()
            known = name if isinstance(name, Device) else self._find_device(name)
            self._devices[key] = self._with_own_clocks(known)
        return self._devices[key]

    def _with_own_clocks(self, device: Device) -> Device:
        """The device with the rates that it sustains by the first store with rows of it; one that is not real as given.

        What those rows say holds for the machine that they are of: not for more units, or other clocks.
        """
        stores = (Store(path) for path in self.stores if path.is_dir() and not device.synchronous)
        store = next((candidate for candidate in stores if candidate.files("gemm", device.id)), None)
        try:
            stored = None if store is None else store.known_device(device.id)
        except DeviceError:
            return device
        if store is None or any(getattr(device, name) != getattr(stored, name) for name in OF_A_MACHINE):
            return device
        return with_own_clocks(
            device, [(kind, store.read(kind, device.id, columns=names)) for kind, names in COLUMNS.items()]
        )

    def _find_device(self, name: str) -> Device:
        local = name == THIS_MACHINE and self.machine is not None
        device_id = self.machine() if local and self.machine is not None else name
        if name == LOCAL:
            device_id = self._measured_here()
        for path in self.stores:
            stored = Store(path).device(device_id) if path.is_dir() else None
            if stored is not None:
                return stored
        if local:
            raise RequestError(
                f"this machine ({device_id}) is not measured yet in {self.sources.store}; "
                "run `opcast quickstart`, or name another device=… (`opcast list devices`)"
            )
        try:
            return load_device(device_id)
        except DeviceError as error:
            raise DeviceError(f"{error} or measure it with `opcast profile`") from None

    def _measured_here(self) -> str:
        """The id of what this machine was last measured on."""
        machines = (Store(path).machine(self.node()) for path in self.stores if self.node is not None and path.is_dir())
        device_id = next((machine for machine in machines if machine is not None), None)
        if device_id is None:
            raise RequestError(
                f"nothing was measured on this machine yet in {self.sources.store}; run `opcast quickstart` or "
                "`opcast profile`, or name another device=… (`opcast list devices`)"
            )
        return device_id

    def engine(self, device: Device, cluster: Cluster | None = None) -> FusedEngine:
        """The engines of the sources' order for a device, alone or in a cluster; kept from question to question."""
        self._refresh()
        key = f"{device!r} {cluster!r}"
        if key not in self._engines:
            backend = check_backend(self.sources.backend, device, self.stores, self.registries)
            if len(self._engines) >= MOST:
                self._engines.clear()
            order: Any = self.sources.order
            self._engines[key] = build_engine(device, self.stores, self.registries, order, backend, cluster)
        return self._engines[key]

    def formula(self, device: Device, cluster: Cluster) -> NetworkEngine:
        """The formula of collectives on a cluster: that of its engines, where they have one."""
        families = NetworkEngine.families
        for candidate in self.engine(device, cluster).engines:
            if isinstance(candidate, NetworkEngine) and candidate.families == families:
                return candidate
        return NetworkEngine(device, cluster, [Store(path) for path in self.stores if path.is_dir()])

    def engine_with_links(
        self, device: Device, cluster: Cluster | None, network: NetworkChoice, plan: Plan | None = None
    ) -> FusedEngine:
        """The engines, before them the flows of a plan's groups where links are simulated.

        TopologyError for a link that is not there, or a fabric that falls apart.
        """
        engine = self.engine(device, cluster)
        fidelity = network.on_cluster(cluster)
        if cluster is None or fidelity == "analytical":
            return engine
        from .engines.flow import FlowEngine

        flows = FlowEngine(self.formula(device, cluster), engine, plan, fidelity=fidelity)
        faults = network.on(flows.base.topology)
        if faults:
            flows = flows.with_faults(faults)
            flows.topology  # noqa: B018  what is not there, or falls apart, shows here
        return FusedEngine([flows, *engine.engines])

    def links(self, device: Device, cluster: Cluster, network: NetworkChoice) -> Links:
        """The links of a cluster with their faults. TopologyError for what is not there."""
        from .predict.links import Links

        links = Links(self.formula(device, cluster), "flow" if network.fidelity == "auto" else network.fidelity)
        faults = network.on(links.healthy.topology) if network.named else ()
        return Links(links.formula, links.fidelity, faults) if faults else links

    @property
    def graphs(self) -> Path:
        """The folder of traced graphs, made where it is missing. RequestError for what can be none."""
        folder = Path(self.sources.graphs).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"graphs={self.sources.graphs} can be no folder ({error.strerror}); name another"
            ) from None
        return folder

    @property
    def stamp(self) -> tuple[int, ...]:
        """What changes when a measurement or predictor is added to the sources."""
        return tuple(_changes((self.sources.store, self.sources.predictors)))

    def _refresh(self) -> None:
        """Forgets what was built when a measurement or predictor was added since."""
        stamp = self.stamp
        if stamp != self._stamp:
            self._stamp = stamp
            self._engines.clear()
            self._devices.clear()

    # --- answers ---------------------------------------------------------------------------------------

    @own_warnings()
    def predict(self, request: PredictRequest) -> list[OpPrediction]:
        """The prediction of each op in order, or the one of all transfers.

        Raises OpError, DeviceError, PowerError, TransferError and TopologyError.
        """
        device = self.device(request.device, request.cluster)
        cluster, network = request.cluster, request.network
        if cluster is None:
            predictions = predict_ops(request.ops, device, self.engine(device), request.cache)
        else:
            from .predict.cluster import predict_collectives, predict_moves

            links = self.links(device, cluster, network) if request.transfers or request.of_links() else None
            if request.transfers and links is not None:
                return [predict_moves(request, links)]
            formula = links.formula if links is not None else self.formula(device, cluster)
            flows = partial(self.engine_with_links, device, cluster, network)
            predictions = predict_collectives(request, device, self.engine(device, cluster), formula, links, flows)
        return with_power(predictions, request.ops, device, self.registries, request.limits, self.sources.backend)

    def simulate(self, request: SimulateRequest) -> StepReport | InferenceReport | FileReport:
        """The report of a step. Raises WorkloadError, PlanError, DeviceError, TopologyError, those of tracing."""
        return self.answered(request).report

    @own_warnings()
    def answered(self, request: SimulateRequest) -> Answered:
        """The report of a step, with the device and engines behind it."""
        from .question.requests import plan_of

        device = power.capped(self.device(request.device, request.cluster), request.power_cap_w)
        if request.file is not None:
            return self._workload_file(request, device)
        from .simulate import simulate

        plan = plan_of(request, device)
        engine = self.engine_with_links(device, request.cluster, request.network, plan)
        study: Any = request.network.faults_study
        report = simulate(request.model, request.work, plan, device, engine, self.graphs, study)
        return Answered(report, device, engine)

    def _workload_file(self, request: SimulateRequest, device: Device) -> Answered:
        """The step that a workload file describes. FormatError for what is no such file."""
        from .simulate import simulate_workload
        from .step.workload_file import plan_of

        assert request.file is not None
        assert request.cluster is not None
        workload, rates = request.file.read()
        plan = plan_of(workload, request.cluster)
        engine = self.engine_with_links(device, request.cluster, request.network, plan)
        study: Any = request.network.faults_study
        report = simulate_workload(workload, plan, engine, request.file.name, rates, request.file.vpp, study)
        return Answered(report, device, engine)

    @own_warnings()
    def search(
        self,
        request: SearchQuestion,
        workers: int | Crew = 1,
        points: str | Path | None = None,
        progress: Progress | None = None,
    ) -> SearchReport:
        """The best layouts of a step, or ways to serve, simulated by so many processes or a crew (the answer is the
        same).

        ``points`` is where all points are kept as Parquet, and from which a search that was ended goes on: a folder of
        layouts, a file of ways to serve. Raises RequestError for an empty space, and the errors of models and clusters.
        """
        from .search.kinds import kind_of
        from .search.spread import Crew

        crew = Crew(workers) if isinstance(workers, int) else workers
        with crew.ready():
            return kind_of(request).search(request, self, crew, _path(points), progress or silent)

    def launch(
        self, request: SearchQuestion, point: Mapping[str, Any], framework: str | None = None
    ) -> tuple[str, str]:
        """The text that starts a point under a framework (None: the usual one), and what to say where that runs
        something else than was searched. Raises LaunchError for what the framework cannot be told."""
        from .search.kinds import kind_of

        return kind_of(request).launch(request, point, framework)

    @own_warnings()
    def compare(
        self, request: SearchQuestion, one: str, other: str, points: str | Path | None = None
    ) -> ComparedPoints:
        """How two points of a search differ, each a rank of those kept in ``points``, or axes (``tp=8 pp=2``)."""
        from .search.kinds import kind_of

        return kind_of(request).compare(request, self, (one, other), _path(points))

    @own_warnings()
    def plan(self, request: PlanRequest) -> PlanReport:
        """A whole training job: days, GPU-hours, price and energy. Raises RequestError and the errors of a step."""
        from .job.run import plan_job

        return plan_job(request, self)

    @own_warnings()
    def posttrain(self, request: PostTrainRequest) -> PostTrainReport:
        """Post-training, phase by phase. Raises RequestError, KvError and the errors of a step."""
        from .post_training.run import post_train

        return post_train(request, self)

    @own_warnings()
    def compare_chips(self, request: CompareRequest) -> ChipsReport:
        """One workload on several chips and power caps. Raises RequestError and the errors of a step."""
        from .chips.run import compare_chips

        return compare_chips(request, self)

    @own_warnings()
    def upgrade(self, request: UpgradeRequest) -> UpgradeReport:
        """What new releases may move in a step, and what to measure of it. Raises RequestError and the errors of a
        step."""
        from .upgrade.run import plan_upgrade

        return plan_upgrade(request, self)

    @own_warnings()
    def serving(
        self, request: ServingRequest, keep: Keeping | None = None, progress: Progress | None = None
    ) -> ServedTraffic:
        """What comes of traffic on the replicas of a served model; requests and iterations as far as ``keep`` says.

        Raises RequestError, RequestTraceError, KvError, and the errors of :meth:`simulate`.
        """
        from .serving.connect import replicas_of
        from .serving.serve import serve_with_intervals

        replica, decoder = replicas_of(request, self)
        with (progress or silent)(request.traffic.requests) as advance:
            return serve_with_intervals(request, replica, decoder, keep, advance)

    @own_warnings()
    def calibrate(self, request: CalibrateRequest, progress: Progress | None = None) -> Calibrating:
        """Effects on the times of steps, fitted on the rows of tables, and how well they answer what was left out."""
        from .validation.calibrate import calibrate

        tables = [Path(table).expanduser() for table in request.tables]
        return calibrate(tables, self.validation(request.rules), request.rows, progress or silent, request.start)

    @own_warnings()
    def validate(self, request: ValidateRequest, progress: Progress | None = None) -> Validation:
        """The errors of every row of a table. ``progress`` opens a bar of so many rows, which is told of those done."""
        from ..datasets.truth import read_table
        from ..datasets.truth.halves import UNSEEN, only_half
        from .validation import validate

        setting = replace(
            self.validation(request.rules), device=request.device, cluster=request.cluster, stack=request.stack
        )
        table = read_table(Path(request.truth).expanduser(), request.limit, rules=setting.rules)
        if request.half:
            table = only_half(table, request.half)
        with (progress or silent)(len(table.rows) + len(table.by_outcome)) as advance:
            scored = validate(table, setting, request.rival, request.details, advance)
        return replace(scored.without_rows() if request.half == UNSEEN else scored, half=request.half)

    def validation(self, rules: str = "") -> ValidationSettings:
        """What validation is told of these sources; ``rules`` is a folder (empty: that of a checkout)."""
        from .validation import ValidationSettings

        folder = Path(rules).expanduser() if rules else None
        calibration = self.sources.calibration
        return ValidationSettings(self.engine, self.graphs, calibration=calibration, stamp=self.stamp, rules=folder)


def _path(text: str | Path | None) -> Path | None:
    return None if text is None else Path(text).expanduser()


@contextmanager
def silent(count: int) -> Iterator[Callable[[int], None]]:
    """Progress that nobody looks at."""
    yield lambda done: None


@lru_cache(maxsize=MOST)
def workbench(
    sources: Sources, machine: Callable[[], str] | None = None, node: Callable[[], str] | None = None
) -> Workbench:
    """The workbench of some sources, the same one for every question."""
    return Workbench(sources, machine, node)


def _changes(roots: Iterable[str]) -> Iterable[int]:
    """When each folder last changed in which a measurement or a predictor would appear."""
    for root in roots:
        path = os.path.expanduser(root)
        yield _changed(path)
        for folder in _inside(path):
            yield _changed(folder)
            yield from map(_changed, _inside(folder))


def _inside(folder: str) -> list[str]:
    try:
        return sorted(entry.path for entry in os.scandir(folder) if entry.is_dir())
    except OSError:
        return []


def _changed(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0

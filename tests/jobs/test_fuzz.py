"""Random words after every verb, and random files in their settings: always an exit code and a line, never a surprise.

``OPCAST_FUZZ_TRIALS=1000 OPCAST_FUZZ_SEED=7 pytest tests/jobs/test_fuzz.py`` tries more, with other random numbers;
what is drawn from stands in :mod:`.fuzzing`, calls of the service in :mod:`.service.test_fuzz`. A trial fails when it
ends in another exit code than 0, 1, 2 and 130, when an exception reaches the net of the command line, when it prints a
traceback, when ``format=json`` prints no object or NaN, when it takes longer than LIMIT_S, or when it writes anything
but its home and what its words name. Verbs that measure or serve end where that would begin.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType

import pytest

from opcast.datasets.reading import read_json, read_yaml
from opcast.harness.plan import CampaignPlan, build_plan
from opcast.jobs import cli, onboard, profile, quickstart, quickstart_all
from opcast.jobs.service import serve, tools
from opcast.jobs.show import BadInputError
from opcast.simulator.formats.simai import read_busbw, read_workload
from opcast.simulator.network.build import read_topology as read_topology
from opcast.simulator.network.query import read_transfers as read_transfers
from opcast.simulator.question.predictions import PredictRequest
from opcast.simulator.question.requests import SimulateRequest, ValidateRequest
from opcast.simulator.search.launch_reading import settings_of_launch
from opcast.simulator.search.served.servers import settings_of_servers

from .fuzzing import CONTENTS, JSON_VALUES, SERVED, STARTS, STEP, body_of, command_of, damaged, with_odd_word

TRIALS = int(os.environ.get("OPCAST_FUZZ_TRIALS", "2000"))
SEED = int(os.environ.get("OPCAST_FUZZ_SEED", "20"))
LIMIT_S = 20
BLOCKS = 4
OF_COMMANDS = 0.1  # of all trials: a command takes as long as twenty files
READERS: dict[str, Callable[[Path], object]] = {
    "links.yaml": read_topology,
    "astra.yaml": read_topology,
    "jobs.yaml": lambda path: read_transfers(path, 16),
    "simai.txt": lambda path: read_workload(path.read_text()),
    "busbw.txt": lambda path: read_busbw(path.read_text()),
    "plan.json": CampaignPlan.from_json,
    "campaign.yaml": lambda path: build_plan(read_yaml(path, FileError)),
    "predict.json": lambda path: PredictRequest.from_json(path.read_text()),
    "simulate.json": lambda path: SimulateRequest.from_json(path.read_text()),
    "validate.json": lambda path: ValidateRequest.from_json(path.read_text()),
    "config.json": lambda path: read_json(path, FileError),
    **{
        name: lambda path: settings_of_launch(path, "tiny_llama_100m")
        for name in ("titan.toml", "accelerate.yaml", "megatron.sh")
    },
    **dict.fromkeys(("start.sh", "start.yaml"), settings_of_servers),
}


class FileError(ValueError):
    """A file that a reader refuses."""


class TooLongError(BaseException):
    """A trial that does not end."""


class StrayError(OSError):
    """A write to a place that nothing named."""


@pytest.fixture
def nets(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The exceptions that nobody foresaw."""
    met: list[BaseException] = []
    said = cli.unforeseen

    def noted(error: Exception) -> str:
        met.append(error)
        return said(error)

    monkeypatch.setattr(cli, "unforeseen", noted)
    return met


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ends a trial that takes too long; a BaseException, which nothing on the way takes for its own."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGPROF, ring)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a process imports and compiles once is no part of a trial: without bytecode torch alone takes LIMIT_S."""
    home = tmp_path_factory.mktemp("warm")
    for words in (f"simulate {STEP}", f"serving {SERVED}", "train device=h100_sxm tracking=null"):
        cli.main([*words.split(), f"home={home}"])


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured and nothing served: such verbs are read and checked until then."""

    def refused(*_: object, **__: object) -> int:
        raise BadInputError("a fuzzer measures nothing")

    async def silent(*_: object) -> None:
        return None

    for module, name in ((profile, "measure"), (onboard, "measure"), (onboard, "measured_device")):
        monkeypatch.setattr(module, name, refused)
    monkeypatch.setattr(quickstart, "run_one", refused)
    monkeypatch.setattr(quickstart_all, "run", refused)
    monkeypatch.setattr(serve, "bound", refused)
    monkeypatch.setattr(tools, "answer", silent)


class Watch:
    """What this process writes outside of a folder, but for compiled code and what words name; it is kept from it."""

    folder = ""
    words: tuple[str, ...] = ()
    named: tuple[str, ...] = ()  # folders elsewhere
    strays: tuple[str, ...] = ()
    begun = False
    CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
    WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def __call__(self, event: str, about: tuple[object, ...]) -> None:
        if not self.folder or not (event == "open" or event in self.CHANGES):
            return
        place = about[0]
        if not isinstance(place, (str, bytes)) or (event == "open" and not int(str(about[2] or 0)) & self.WRITING):
            return
        path = os.path.abspath(os.fsdecode(place))
        if path.startswith((self.folder, "/dev/null", "/proc/", "/dev/shm/joblib")) or "__pycache__" in path:
            return
        if any(word in path for word in self.words) or f"{path}/".startswith(self.named):
            raise PermissionError(13, "a fuzzer writes nothing elsewhere", path)
        self.strays = (*self.strays, path)
        raise StrayError(13, "nothing named it", path)


WATCH = Watch()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with all that a command may write to: a home, a user's folder, one for temporary files."""
    for name, variable in (("home", "OPCAST_HOME"), ("user", "HOME"), ("tmp", "TMPDIR")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    monkeypatch.chdir(tmp_path)
    if not WATCH.begun:
        WATCH.begun = True
        sys.addaudithook(WATCH)
    WATCH.folder = str(tmp_path)
    yield tmp_path
    WATCH.folder = ""


def wrong(arguments: list[str], nets: list[BaseException], capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with how a command ended; "" where nothing is."""
    nets.clear()
    WATCH.strays = ()
    values = [word.partition("=")[2].strip("' ") for word in arguments]
    WATCH.words = tuple(plain for value in values if len(plain := value.strip("'/.~ ")) > 2)
    elsewhere = [os.path.abspath(os.path.expanduser(value)) for value in values if value.startswith(("/", "..", "~"))]
    WATCH.named = tuple(f"{folder.rstrip('/')}/" for folder in elsewhere)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        code = cli.main(arguments)
    except TooLongError:
        return f"took more than {LIMIT_S} s"
    except BaseException as error:
        return f"ended in {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        out, err = capsys.readouterr()
    if WATCH.strays:
        return f"would write {', '.join(WATCH.strays)}, which nothing named"
    if nets:
        return f"unforeseen {type(nets[0]).__name__}: {nets[0]}"
    if code not in (0, 1, 2, 130):
        return f"exit code {code}"
    if "Traceback" in err or "Traceback" in out:
        return "printed a traceback"
    if code == 2 and "opcast: " not in err:
        return "exit code 2 without a line"
    plain = arguments[0] != "mcp" and not any(word.startswith("-") for word in arguments)  # its lines are a protocol
    if plain and [word for word in arguments if word.startswith("format=")][-1:] == ["format=json"]:
        try:
            answer = json.loads(out, parse_constant=no_constant)
        except ValueError:
            return f"format=json printed no object: {out[:100]!r}"
        if code == 2 and "error" not in answer:
            return "exit code 2 without an error in its object"
    return ""


def no_constant(name: str) -> None:
    raise ValueError(name)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """When and how large the files of a folder are."""
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()}


def strays(folder: Path, arguments: list[str], before: dict[str, tuple[int, int]]) -> str:
    """What is new in a folder, or changed among its files, and is not named by words; what is new is taken away."""
    usual = "sweep.parquet sweep-jobs" if arguments[0] == "sweep" else ""
    named = " ".join((*arguments, usual, "multirun" if {"-m", "--multirun"} & set(arguments) else ""))
    extra = [path for path in sorted(folder.iterdir()) if path.name not in ("files", "home", "user", "tmp")]
    for path in extra:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    after = listing(folder / "files")
    touched = [path.name for path in extra] + [name for name in after if after[name] != before.get(name)]
    unnamed = [name for name in touched if name not in named and f"{folder / 'files'}" not in arguments_of(named)]
    return f"wrote {', '.join(unnamed)}, which nothing named" if unnamed else ""


def arguments_of(named: str) -> set[str]:
    """The values of words."""
    return {word.partition("=")[2].rstrip("/") for word in named.split()}


def test_every_verb_is_tried():
    assert STARTS.keys() == cli.VERBS.keys() | set(cli.PAIRS.values())


def test_a_case_changes_nothing_of_another() -> None:
    before = repr(JSON_VALUES)
    for trial in range(3000):
        body_of(Random(trial), {"traffic": {"rate": 1}}, ("model", "tp"))
    assert repr(JSON_VALUES) == before


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_words_and_no_files_surprise_the_command(
    block: int,
    nets: list[BaseException],
    warm: None,
    alarm: None,
    still: None,
    place: Path,
    capsys: pytest.CaptureFixture[str],
):
    failed = []
    files = place / "files"
    for trial in range(round(TRIALS * OF_COMMANDS) // BLOCKS):
        random = Random(f"{SEED} {block} {trial}")
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir()
        for name, content in CONTENTS.items():
            (files / name).write_bytes(damaged(random, content) if random.random() < 0.5 else content)
        arguments, before = command_of(random, files), listing(files)
        if said := wrong(arguments, nets, capsys) or strays(place, arguments, before):
            failed.append(f"opcast {' '.join(map(repr, arguments))}: {said}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("folder", ["/", "../x"])
def test_what_words_name_is_no_stray(
    folder: str, nets: list[BaseException], alarm: None, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wrong(["simulate", *STEP.split(), f"graphs={folder}"], nets, capsys) == ""


@pytest.mark.parametrize("name", READERS)
def test_no_content_surprises_a_reader(name: str, alarm: None, tmp_path: Path):
    failed = []
    for trial in range(round(TRIALS * (1 - OF_COMMANDS) / 2) // len(READERS)):
        random = Random(f"{SEED} {name} {trial}")
        content = damaged(random, CONTENTS[name]) if random.random() < 0.2 else with_odd_word(random, CONTENTS[name])
        (tmp_path / name).write_bytes(content)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            READERS[name](tmp_path / name)
        except (Exception, TooLongError) as error:
            refused = type(error).__module__.startswith("opcast") and isinstance(error, ValueError)
            if not refused and not isinstance(error, (UnicodeDecodeError, FileError)):
                failed.append(f"{content[:500]!r}: {type(error).__name__}: {str(error)[:200]}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    assert not failed, "\n".join(failed)

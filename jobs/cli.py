"""``opcast VERB [group=choice] [key=value] …``: finds the verb, composes its configuration with Hydra, runs it.

What follows the verb is Hydra's grammar. A plain call composes in this process, so that an answer comes at
once and a wrong value is one line; ``--multirun`` and other Hydra flags go through Hydra's own
application.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ..datasets.collecting import collect_seldom
from ..datasets.installing import install_command
from ..datasets.loading import nearest
from ..datasets.own_warnings import own_warnings
from ..datasets.version import __version__
from . import helping
from .complaints import explain, no_word
from .composing import any_help, as_override, compose, composed, plain, register
from .settings import by_alias, check, command, readable
from .show import CONFIG_DIRECTORY, BadInputError, json_lines, one_line, print_json

# verb -> (module of this folder, what it does)
VERBS: dict[str, tuple[str, str]] = {
    "quickstart": (
        "quickstart",
        "the whole job here: profile, train, simulate, run, compare",
    ),
    "profile": ("profile", "run a measurement campaign into a store; a killed one resumes"),
    "import": ("importing", "foreign measurements into a store, in its units and conventions"),
    "data": ("data", "what a store holds; `opcast data check` looks for bad rows"),
    "train": ("train", "fit predictors for a device, evaluate on unseen shapes, register"),
    "onboard": ("onboard", "a new device in one command: measure, train, say what to trust"),
    "predict": ("predict", "the latency of an op, of all ops in a file, or of a collective"),
    "simulate": ("simulate", "one training or inference step of a model on a device"),
    "compare": ("compare", "one workload on several chips and power caps: speed, price, energy"),
    "serving": ("serving", "traffic on a served model: latencies, throughput, capacity"),
    "search": ("search", "the best layouts of a training step, and why they are best"),
    "plan": ("plan", "a whole training job: days, price and energy, with failures"),
    "upgrade": ("upgrade", "what a new engine, driver or NCCL may move, and what to measure"),
    "posttrain": ("posttrain", "SFT, LoRA, DPO, PPO, GRPO: rollout, training, weight sync"),
    "sweep": ("sweep", "one question many times, here, on Ray or Slurm: one table"),
    "validate": ("validate", "every row of a table of published results, simulated and scored"),
    "calibrate": ("calibrate", "what known runs teach of steps, scored on tables left out"),
    "trace": ("trace", "traces (Chakra, PyTorch): check, convert, analyse, explain"),
    "api": ("service.serve", "an HTTP service and web page over the same questions"),
    "mcp": ("service.tools", "the same questions as tools for AI assistants (MCP)"),
    "new": ("new", "a device or cluster of your own, to edit, from a known one"),
    "list": ("listing", "the devices, models, ops or predictors opcast knows"),
    "completion": ("completing", "what makes bash, zsh or fish complete verbs, settings and choices"),
}
ALSO = {"post-train": "posttrain", "post_train": "posttrain", "post-training": "posttrain", "rl": "posttrain"}
"""Other names that a verb is guessed by."""
# a verb and the word after it -> the module and configuration of their own that they have
PAIRS: dict[tuple[str, ...], str] = {
    ("search", "serving"): "search_serving",
    ("serving", "observe"): "serving_observe",
    ("profile", "coverage"): "profile_coverage",
}
# Hydra's flags -> the words that may follow it ("*": any); a flag with words that is no INFO needs one
HYDRA_FLAGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("--help", "-h", "--hydra-help", "--multirun", "-m", "--resolve"), ()),
    **dict.fromkeys(("--cfg", "-c"), ("job", "hydra", "all")),
    **dict.fromkeys(("--info", "-i"), ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")),
    **dict.fromkeys(("--package", "-p"), ("*",)),
}
INFO = ("--info", "-i")
HELP = {"--help", "-h"}
INTERRUPTED = 130
AGAIN_S = 0.02  # after which a Ctrl-C that was lost comes again
EXTRAS = {
    "torch": "hf",
    "transformers": "hf",
    "mlflow": "mlflow",
    "numba": "fast",
    "httpx": "observe",
}  # package -> what brings it
OF_STDOUT = (errno.EPIPE, errno.ENOSPC, errno.EIO)
OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)  # with a file's name: what a user can mend
LONGEST = 500  # characters of an unforeseen exception's own words
DEBUG = "OPCAST_DEBUG"
"""The environment variable with which what nobody foresaw keeps its traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``opcast`` command; returns the exit code (0 done, 1 failure, 2 bad input, 130 Ctrl-C)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        sys.unraisablehook = again_if_lost
        collect_seldom()  # the process is the command's own
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(helping.usage(VERBS))
        return 0
    if arguments[0] in ("--version", "version") or "--version" in arguments:
        print(f"opcast {__version__}")
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that is no Unicode can be shown
    try:
        with own_warnings():
            code = answered(lambda: run(arguments[0], arguments[1:]), "format=json" in arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        if argv is None:  # one that comes again while the process ends would be its end by signal
            import signal

            signal.signal(signal.SIGINT, signal.SIG_IGN)
            exec("")  # Python notes a Ctrl-C inside an exec, as dataclasses have, and ends by it unless another follows
        print("opcast: interrupted; what was measured is kept", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # who reads has seen enough: what is left goes nowhere
        quiet_stdout()
        return 0
    except OSError as error:  # of stdout itself, such as a full disk behind it
        quiet_stdout()
        print(f"opcast: the answer cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1


def again_if_lost(lost: Any) -> None:
    """Ctrl-C that comes while Python ends an import or a weak reference is an exception that nobody sees: once more."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    import signal
    import threading

    threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT)).start()


def quiet_stdout() -> None:
    """Send stdout nowhere, so that Python's last flush does not fail."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:
        return


def answered(job: Callable[[], int], as_json: bool = False) -> int:
    """The job's exit code; 2 and one line on stderr for bad input, 1 and one line for whatever nobody foresaw.

    Bad input is a ValueError of an opcast module. Of anything else the traceback shows only with ``OPCAST_DEBUG=1``.
    ``as_json`` prints the line as the one object ``{"error": …}`` too.
    """
    try:
        return job()
    except OSError as error:
        if error.filename is None and error.errno in OF_STDOUT:
            raise  # :func:`main` says it
        if error.filename is not None and error.errno in OF_A_DISK:
            return failed(f"{error.filename}: {error.strerror}; free or choose another place", 2, as_json)
        return failed(unforeseen(error), 1, as_json)
    except ValueError as error:
        if not type(error).__module__.startswith("opcast"):
            return failed(unforeseen(error), 1, as_json)
        return failed(one_line(error), 2, as_json)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(str(error.name).partition(".")[0])
        if extra is None:
            return failed(unforeseen(error), 1, as_json)
        return failed(f"this needs {error.name}, which is not installed: {install_command(extra)}", 2, as_json)
    except Exception as error:
        return failed(unforeseen(error), 1, as_json)


def failed(line: str, code: int, as_json: bool) -> int:
    """Say why there is no answer; returns the exit code."""
    print(f"opcast: {line}", file=sys.stderr)
    if as_json:
        print_json({"error": line})
    return code


def unforeseen(error: Exception) -> str:
    """The one line of an exception that no part of opcast foresaw; the traceback goes to stderr where it is wanted."""
    if os.environ.get(DEBUG, "0") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'input or output'}: {error.strerror} ({DEBUG}=1 shows where)"
    if isinstance(error, MemoryError):
        return f"out of memory: this question is too big for this machine ({DEBUG}=1 shows where)"
    message = "" if one_line(error) == type(error).__name__ else f": {one_line(error)}"
    return f"unexpected {type(error).__name__}{message[:LONGEST]}, please report; {DEBUG}=1 shows the traceback"


def run(verb: str, arguments: list[str]) -> int:
    """Run one verb; BadInputError when it or an argument is unknown."""
    verb = ALSO.get(verb, verb)
    if verb not in VERBS and verb not in PAIRS.values():
        raise BadInputError(f"unknown verb {verb!r}; {nearest(verb, VERBS, 'one of')}")
    name = VERBS[verb][0] if verb in VERBS else verb
    if (pair := PAIRS.get((verb, *arguments[:1]))) is not None:
        verb, name, arguments = pair, pair, arguments[1:]
    module = importlib.import_module(f".{name}", __package__)
    flags, settings = parted(verb, getattr(module, "words", list)(arguments))
    for text in settings:
        readable(text)
    words = [text for text in settings if text and "=" not in text and text[0] not in "~+"]
    if len(words) > 1 and hasattr(module, "SUBJECT"):
        raise BadInputError(f"`{command(verb)}` takes one of {', '.join(words)} at a time")
    if words and not hasattr(module, "SUBJECT"):
        subjects = [second for first, second in PAIRS if first == verb] + list(getattr(module, "WORDS", ()))
        raise BadInputError(no_word(verb, words[0], subjects))
    if HELP & set(flags) and "--hydra-help" not in flags:
        part = [text.partition("=")[2] for text in arguments if text.partition("=")[0] in HELP][-1]
        print(helping.help_of(verb, [by_alias(text) for text in settings], part))
        return 0
    overrides = [as_override(module, text) for text in last_choices(module, settings)]
    if flags:
        return through_hydra(verb, module, [*flags, *overrides])
    return module.run(compose(verb, overrides))


def last_choices(module: ModuleType, settings: Sequence[str]) -> list[str]:
    """The settings with only the last ``device=…`` of several, and the like: a choice leaves nothing of an earlier."""
    settings_left = list(settings)
    for group in getattr(module, "FREE_CHOICE", {}):
        choices = [text for text in settings_left if text.startswith(f"{group}=")]
        settings_left = [text for text in settings_left if text not in choices[:-1] or text == choices[-1]]
    return settings_left


def parted(verb: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their words, and the settings. BadInputError for a flag that is none."""
    flags: list[str] = []
    settings: list[str] = []
    waiting = list(arguments)
    while waiting:
        text = waiting.pop(0)
        if not text.startswith("-"):
            settings.append(text)
            continue
        flag, equals, word = text.partition("=")
        if flag not in HYDRA_FLAGS:
            raise BadInputError(f"{text} is no flag of `{command(verb)}`: settings are name=value; --help lists them")
        words = HYDRA_FLAGS[flag]
        flags.append(flag)
        if flag in HELP:  # --help=GROUP
            equals = ""
        if not words and equals:
            raise BadInputError(f"{flag} takes no value, but got {word!r}")
        if words and not equals and waiting and (flag not in INFO or waiting[0] in words):
            equals, word = "=", waiting.pop(0)
        if words and words != ("*",) and word not in words and (equals or flag not in INFO):
            raise BadInputError(f"{flag} takes {', '.join(words)}" + (f", not {word!r}" if word else ""))
        if words == ("*",) and not word:
            raise BadInputError(f"{flag} needs the name of a part of the configuration")
        flags += [word] if equals else ["all"] if flag in INFO else []
    if "--resolve" in flags and not {"--cfg", "-c", "--help", "-h"} & set(flags):
        raise BadInputError("--resolve goes with --cfg job: it shows the configuration with all references filled in")
    return flags, settings


def through_hydra(verb: str, module: ModuleType, arguments: list[str]) -> int:
    """Help, sweeps and launchers: Hydra's own application around the verb."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

    register(verb, [])
    codes: list[int] = []

    def job(values: dict[str, Any]) -> int:
        check(verb, values)
        return module.run(values)

    def task(config: DictConfig) -> int:
        values = plain(config)
        with json_lines():
            codes.append(answered(lambda: job(values), values.get("format") == "json"))
        return codes[-1]

    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)  # --info makes Hydra log what it does, also to later calls
    before, sys.argv = sys.argv, [command(verb), *arguments]
    full = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # what Hydra refuses comes here and becomes one line
    try:
        with any_help():
            hydra.main(config_path=str(CONFIG_DIRECTORY), config_name=verb, version_base="1.3")(task)()
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:  # of jobs :func:`answered` tells
        raise BadInputError(explain(verb, error, arguments, composed)) from None
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
        root.setLevel(level)
        root.handlers[:] = handlers
        os.environ.pop("HYDRA_FULL_ERROR")
        os.environ.update({} if full is None else {"HYDRA_FULL_ERROR": full})
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())

"""``opcast VERB [group=choice] [key=value] …``: finds the verb, composes its configuration with Hydra, runs it.

What follows the verb is Hydra's grammar. A plain call composes in this process, so that an answer comes at
once and a wrong value is one line; ``--help``, ``--multirun`` and other Hydra flags go through Hydra's own
application, which also brings its launchers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .. import __version__
from .show import CONFIG_DIRECTORY, BadInputError, one_line

# verb -> (module of this folder, what it does)
VERBS: dict[str, tuple[str, str]] = {
    "quickstart": (
        "quickstart",
        "the whole job on this machine: profile, train, simulate, run for real, compare",
    ),
    "profile": ("profile", "run a measurement campaign into a store; a killed one resumes"),
    "import": ("importing", "foreign measurements into a store, in its units and conventions"),
    "data": ("data", "what a store holds; `opcast data check` looks for bad rows and files"),
    "train": ("train", "fit predictors for a device, evaluate on unseen shapes, register in MLflow"),
    "predict": ("predict", "the latency of one op, of every op in a file, or of collectives on a cluster"),
    "simulate": ("simulate", "one training or inference step of a model on a device"),
    "validate": ("validate", "every row of a table of published results, simulated and scored"),
    "list": ("listing", "the devices, models, ops or predictors opcast knows"),
}
HYDRA_FLAGS = {
    "--help",
    "-h",
    "--hydra-help",
    "--multirun",
    "-m",
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--resolve",
    "--package",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``opcast`` command; returns the exit code (0 done, 1 failure, 2 bad input)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(usage())
        return 0
    if arguments[0] in ("--version", "version"):
        print(f"opcast {__version__}")
        return 0
    try:
        return answered(lambda: run(arguments[0], arguments[1:]))
    except KeyboardInterrupt:
        print("opcast: interrupted; what was measured is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def answered(job: Callable[[], int]) -> int:
    """The job's exit code; 2 and one line on stderr when what the user gave cannot be used.

    Every such error is a ValueError of an opcast module; any other exception is our fault and keeps its traceback.
    """
    try:
        return job()
    except ValueError as error:
        if not type(error).__module__.startswith("opcast"):
            raise
        print(f"opcast: {one_line(error)}", file=sys.stderr)
        return 2


def run(verb: str, arguments: list[str]) -> int:
    """Run one verb; BadInputError when it or an argument is unknown."""
    if verb not in VERBS:
        import difflib

        near = difflib.get_close_matches(verb, VERBS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(VERBS)}"
        raise BadInputError(f"unknown verb {verb!r}; {hint}")
    module = importlib.import_module(f".{VERBS[verb][0]}", __package__)
    overrides = [as_override(module, text) for text in arguments]
    if any(text.split("=")[0] in HYDRA_FLAGS for text in arguments):
        return through_hydra(verb, module, overrides)
    return module.run(compose(verb, overrides))


def as_override(module: ModuleType, text: str) -> str:
    """A bare word is the verb's subject (``opcast list devices``); ``ADDED`` settings need no ``+`` to be new."""
    subject = getattr(module, "SUBJECT", None)
    if text.startswith(getattr(module, "ADDED", ())):
        return f"++{text}"
    if subject and text and not text.startswith("-") and "=" not in text and text[0] not in "~+":
        return f"{subject}={text}"
    for group, free in getattr(module, "FREE_CHOICE", {}).items():
        choice = text.removeprefix(f"{group}=")
        if choice == text or "," in choice:  # another setting, or a sweep over Hydra's own choices
            continue
        if not (CONFIG_DIRECTORY / group / f"{choice}.yaml").is_file():
            return f"{free}={quoted(choice)}"
    return text


def quoted(value: str) -> str:
    """A value that Hydra's grammar takes as one string, whatever stands in it."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def compose(verb: str, overrides: list[str]) -> dict[str, Any]:
    """The verb's configuration as plain values; BadInputError in one line for what Hydra refuses."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    register_ops(verb, [text for text in overrides if text.startswith("op=")])
    try:
        with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
            config = hydra_compose(verb, overrides=overrides)
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: a group that is null
        raise BadInputError(explain(verb, error)) from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def explain(verb: str, error: Exception) -> str:
    """Hydra's complaint in one line with the way out."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "Could not find" in lines[0]:
        group, _, choice = lines[0].split("'")[-2].rpartition("/")
        options = []
        for line in lines[2:]:
            if line.startswith("Config search path"):
                break
            options.append(line)
        import difflib

        near = difflib.get_close_matches(choice, options, 3, 0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(options)}"
        return f"{group}={choice} does not exist; {hint}"
    if lines[0].startswith("Could not override"):
        return f"{lines[0].split(chr(39))[1]} is no setting of `opcast {verb}`; `opcast {verb} --help` lists them"
    if lines[0].startswith("Ambiguous value"):
        name, _, value = lines[0].partition("'")[2].rpartition("'")[0].partition("=")
        return f"{name}={value} is ambiguous: write a list as {name}=[{value}], and several runs with --multirun"
    return f"{lines[0]} (see `opcast {verb} --help`)"


def register_ops(verb: str, chosen: list[str]) -> None:
    """For ``predict``, make the op kinds a Hydra group, so that ``op=gemm op.m=…`` composes: a choice per kind.

    Of other verbs ``op`` is a plain setting.
    """
    from hydra.core.config_store import ConfigStore

    from ..datasets.ops import KINDS

    store = ConfigStore.instance()
    store.repo.pop("op", None)
    if verb != "predict":
        return
    for name, kind in KINDS.items():
        if chosen and f"op={name}" not in chosen and any(text[3:] in KINDS for text in chosen):
            continue
        dims = {dim.name: "???" if dim.default is None else dim.default for dim in kind.dims}
        store.store(group="op", name=name, node={"kind": name, **dims, "dtype": "bf16", "out_dtype": None})


def through_hydra(verb: str, module: ModuleType, overrides: list[str]) -> int:
    """Help, sweeps and launchers: Hydra's own application around the verb."""
    import hydra
    from omegaconf import DictConfig, OmegaConf

    register_ops(verb, [])
    codes: list[int] = []

    def task(config: DictConfig) -> int:
        values = OmegaConf.to_container(config, resolve=True)
        plain = {str(k): v for k, v in dict(values).items()}  # type: ignore[arg-type]
        codes.append(answered(lambda: module.run(plain)))
        return codes[-1]

    sys.argv = [f"opcast {verb}", *overrides]
    hydra.main(config_path=str(CONFIG_DIRECTORY), config_name=verb, version_base="1.3")(task)()
    return max(codes, default=0)


def usage() -> str:
    """The text of ``opcast --help``."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in VERBS.items())
    return f"""opcast {__version__}: how long will it take?

usage: opcast VERB [group=choice] [key=value] …

{verbs}

opcast VERB --help shows the groups and settings of a verb; format=json prints one JSON object.
Try:  opcast quickstart
      opcast predict op=gemm op.m=4096 op.n=4096 op.k=4096 op.dtype=bf16 device=h100_sxm
      opcast simulate workload=train model=llama3_8b device=h200_sxm"""


if __name__ == "__main__":
    sys.exit(main())

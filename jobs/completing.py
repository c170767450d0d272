"""``opcast completion bash|zsh|fish``: the script a shell reads, and what it then asks at each Tab.

What a setting may be is Hydra's own knowledge: its completion reads the groups of ``conf/`` and composes the
configuration of the words before.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from ..datasets.near import meant
from . import helping
from .settings import read
from .show import CONFIG_DIRECTORY, BadInputError, print_json, wants_json

SUBJECT = "shell"
SCRIPTS = {
    "bash": """_opcast() {
  local line="${COMP_LINE:0:COMP_POINT}" word IFS=$'\\n'
  word="${line##* }"
  COMPREPLY=($(opcast completion "line='${line//\\'/}'" 2>/dev/null))
  # bash splits words at "=": what stands before the last one is not to be given again
  [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#${word%=*}=}")
  [[ ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
}
complete -F _opcast opcast
""",
    "zsh": """_opcast() {
  local -a found
  found=("${(@f)$(opcast completion "line='${LBUFFER//\\'/}'" 2>/dev/null)}")
  compadd -Q -S '' -- $found
}
compdef _opcast opcast
""",
    "fish": """function __opcast
  opcast completion "line='"(string replace -a "'" '' -- (commandline -cp))"'" 2>/dev/null
end
complete -c opcast -f -a '(__opcast)'
""",
}


def run(config: dict[str, Any]) -> int:
    """Print a shell's script, or what may follow ``line``."""
    as_json = wants_json(config)
    shell, line = config["shell"], config["line"]
    if line is not None:
        words = following(str(line))
        if as_json:
            print_json({"words": words})
        else:
            print("\n".join(words))
        return 0
    if str(shell) not in SCRIPTS:
        complaint = f", not {shell!r}{meant(shell, SCRIPTS)}" if shell else ""
        raise BadInputError(f"`opcast completion` takes {', '.join(SCRIPTS)}{complaint}")
    if as_json:
        print_json({"shell": shell, "script": SCRIPTS[shell]})
    else:
        print(SCRIPTS[shell], end="")
    return 0


def following(line: str) -> list[str]:
    """What the last word of a line such as ``opcast simulate model=lla`` may become; [] where nothing fits."""
    from .cli import HYDRA_FLAGS, PAIRS, VERBS

    before, _, word = line.lstrip().rpartition(" ")
    words = before.split()[1:]
    if not words:
        return [verb for verb in VERBS if verb.startswith(word)]
    verb, settings = words[0], words[1:]
    if verb not in VERBS:
        return []
    pairs = [second for first, second in PAIRS if first == verb and not settings]
    module = VERBS[verb][0]
    if (verb, *settings[:1]) in PAIRS:
        verb = module = PAIRS[verb, settings.pop(0)]
    if word.startswith("--help="):
        return [f"--help={part}" for part in helping.parts(verb) if part.startswith(word.partition("=")[2])]
    if word.startswith("-"):
        return [flag for flag in HYDRA_FLAGS if flag.startswith(word)]
    name, equals, start = word.partition("=")
    if equals:
        values = _values(verb, settings, name)
        if values:
            return [f"{name}={value}" for value in values if value.startswith(start)]
    subject = getattr(importlib.import_module(f".{module}", __package__), "SUBJECT", None)
    bare = [*pairs, *_values(verb, settings, subject)] if subject and not equals else pairs
    return sorted({*_by_hydra(verb, settings, word), *(value for value in bare if value.startswith(word))})


def _values(verb: str, settings: Sequence[str], name: str) -> list[str]:
    """What a setting takes: the choices of a group, or the words in the comment beside it (``# warm | cold``)."""
    files = (CONFIG_DIRECTORY / f"{verb}.yaml", CONFIG_DIRECTORY / "base.yaml")
    groups = helping.chosen_groups(read(files[0]))
    if name in groups:
        return helping.choices(name)
    group, dot, setting = name.partition(".")
    if dot and group in groups:
        named = [text.partition("=")[2] for text in settings if text.startswith(f"{group}=")]
        choice = [groups[group], *named][-1]
        text, name = helping.settings_of(group, choice) if choice in helping.choices(group) else "", setting
    else:
        text = "\n".join([*map(helping.body, files), helping.text_of(helping.of_command(verb))])
    match = re.search(rf"^{re.escape(name)}:.*?#\s*([\w.-]+(?: \| [\w.-]+)+)", text, flags=re.MULTILINE)
    return match[1].split(" | ") if match else []


def _by_hydra(verb: str, settings: Sequence[str], word: str) -> list[str]:
    """Names of settings that begin so, or the value a setting has."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.plugins.completion_plugin import DefaultCompletionPlugin
    from omegaconf.errors import OmegaConfBaseException

    from .composing import register

    register(verb, [text for text in settings if text.startswith("op=")])
    named = [text for text in settings if "=" in text]
    with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
        plugin = DefaultCompletionPlugin(GlobalHydra.instance().config_loader())
        try:
            candidates = plugin._query(verb, " ".join([*named, word]))
        except (HydraException, OmegaConfBaseException, ValueError, TypeError):
            return []
    groups = helping.chosen_groups(read(CONFIG_DIRECTORY / f"{verb}.yaml"))
    others = {f"{path.name}=" for path in CONFIG_DIRECTORY.iterdir() if path.is_dir() and path.name not in groups}
    return [
        candidate for candidate in candidates if candidate not in others and not candidate.startswith(("hydra", "_"))
    ]

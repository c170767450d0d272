"""Help: the verbs by what people come for, and a verb's settings as its file in conf/ has them."""

import pytest

from opcast.jobs import helping
from opcast.jobs.cli import PAIRS, VERBS, main
from opcast.jobs.composing import compose
from opcast.jobs.show import CONFIG_DIRECTORY


def test_every_verb_stands_in_one_section() -> None:
    named = [verb for names in helping.SECTIONS.values() for verb in names]
    assert sorted(named) == sorted(VERBS)


def test_the_first_screen_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 52
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", [command for _, command in helping.WANTED])
def test_the_commands_it_shows_compose(command: str) -> None:
    verb, *words = command.split()[1:]
    compose(verb, [word.replace("=h100", "=h100_sxm").replace("=h200", "=h200_sxm") for word in words])


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_every_setting(verb: str) -> None:
    text = helping.help_of(verb)
    from opcast.jobs.settings import names

    groups = helping.chosen_groups(helping.read(helping.CONFIG_DIRECTORY / f"{verb}.yaml"))
    missing = [name for name in names(verb) if name not in groups and f"  {name}:" not in text]
    assert not missing
    assert all(f"  {group}=" in text for group in groups)
    assert len(text.splitlines()) <= helping.MOST_LINES == 230
    full = helping.help_of(verb, group="all")
    assert all(f"  {name}:" in full for name in names(verb) if name not in groups)


@pytest.mark.parametrize("verb", [*VERBS, *PAIRS.values()])
def test_help_of_a_group_has_all_that_help_leaves_out(verb: str) -> None:
    from opcast.jobs.questions import of_command

    full = helping.help_of(verb, group="all").splitlines()
    shown = set(helping.help_of(verb).splitlines())
    left_out = [line for line in full if line not in shown]
    of_groups = [helping.help_of(verb, group=name) for name in helping.folded_groups(verb)]
    assert set(left_out) <= {line for text in of_groups for line in text.splitlines()}
    for setting in of_command(verb):
        if setting.path in helping.folded_groups(verb):
            text = helping.help_of(verb, group=setting.path)
            assert all(f"    {within.name}:" in text for within in setting.inside)


def test_serving_names_the_groups_that_its_help_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serving", "--help"]) == 0
    text = capsys.readouterr().out
    assert "12 settings" in text
    assert "--help=lora" in text
    assert "max_loras" not in text
    assert "--help=all" in text
    assert main(["serving", "--help=lora"]) == 0
    assert "max_loras: null" in capsys.readouterr().out
    assert main(["serving", "--help=parallel"]) == 0
    assert "tp: 1" in capsys.readouterr().out
    assert main(["serving", "--help=all"]) == 0
    assert "max_loras: null" in capsys.readouterr().out
    assert main(["serving", "--help=loras"]) == 2
    assert "did you mean lora?" in capsys.readouterr().err


def test_help_of_a_choice_has_its_settings() -> None:
    assert "batch: 1" in helping.help_of("simulate", ["workload=decode"])
    assert "head_dim" in helping.help_of("predict", ["op=attention_decode"])
    assert "Settings of workload=fly" not in helping.help_of("simulate", ["workload=fly"])


@pytest.mark.parametrize("verb", [*VERBS, "search_serving"])
def test_examples_fit_a_terminal_and_stay_the_same_commands(verb: str) -> None:
    header = helping.read(CONFIG_DIRECTORY / f"{verb}.yaml")["hydra"]["help"]["header"].rstrip()
    made = helping.fold(header)
    one_word = (line for line in made.splitlines() if len(line) > helping.WIDTH)
    assert all(len(helping.WORDS.findall(line.rstrip("\\"))) == 1 for line in one_word)
    joined = [line.partition("#")[0] for line in made.replace(" \\\n", " ").splitlines() if "#" not in line[:7]]
    for line in header.splitlines():
        if line.strip().startswith("opcast ") and line[0] == " ":
            assert line.partition("  # ")[0].split() in [each.split() for each in joined]

"""A key is declared once: hydra's defaults, the checks and the README's table follow from its declaration."""

import doctest
import pickle
import sys
from copy import deepcopy
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config import keys, resume_sizes
from recipe.partial_rollout.config.choices import Choice, Mode
from recipe.partial_rollout.config.keys import ConfigError, declarations, defaults_of, read, refuse_unknown
from recipe.partial_rollout.config.settings import ROOT, PartialRolloutConfig, check_keys, default_of
from recipe.partial_rollout.tools.keys import FIRST, TableError, meaning, table, with_tables
from recipe.partial_rollout.tools.keys import main as keys_tool

README = Path(main_ppo.__file__).with_name("README.md")
KEYS = list(declarations(PartialRolloutConfig))
NAMES = [declared.name for declared in KEYS]


def node(name, value):
    """A config with one key of ``partial_rollout``."""
    return OmegaConf.create({ROOT: OmegaConf.from_dotlist([f"{name}={value}"])})


def test_every_key_has_words():
    for declared in KEYS:
        words = declared.key.words
        assert len(words) > 15 and words.endswith(".") and "  " not in words, declared.name


def choices(kind=Choice):
    for each in kind.__subclasses__():
        yield from each


def test_choice_has_words_and_survives_a_journey():
    for choice in choices():
        assert len(choice.words) > 10 and not choice.words.endswith(".")
        assert any(f"`{choice}`: {choice.words}" in meaning(declared) for declared in KEYS)
        assert pickle.loads(pickle.dumps(choice)) is choice and deepcopy(choice) is choice
        assert str(choice) == choice.value == f"{choice}" and "{" not in repr(choice)


def test_readmes_have_the_tables_of_the_declarations():
    assert len(NAMES) <= 38 and len(FIRST) == 12 and set(FIRST) < set(NAMES)
    for readme, name in ((README, "keys"), (README.parents[2] / "README.md", "first keys")):
        text = readme.read_text()
        assert with_tables(text) == text, f"python -m recipe.partial_rollout.tools keys --write {readme}"
        assert text.count(table(name)) == 1


def test_table_needs_its_marks(tmp_path, capsys):
    with pytest.raises(TableError, match="no table of keys"):
        with_tables("# Keys\n")
    (tmp_path / "page.md").write_text("# Keys\n")
    assert keys_tool(["--write", str(tmp_path / "page.md")]) == 2
    assert capsys.readouterr().err.startswith("error: no table of keys: it goes between")


def test_tool_lists_every_key(capsys):
    assert keys_tool([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("=")[0] for line in lines if line.startswith(ROOT)] == [f"{ROOT}.{name}" for name in NAMES]


def test_no_file_of_conf_declares_a_key_of_its_own(composed_config):
    """They only set some: hydra's node has the declared keys, and ``conf/partial_rollout.yaml`` sets none."""
    assert ROOT not in OmegaConf.load(main_ppo.CONF_DIR / "partial_rollout.yaml")
    for path in main_ppo.CONF_DIR.glob("*.yaml"):
        if "hydra:" in path.read_text():
            check_keys(composed_config(path.stem))
    plain = composed_config("ppo_partial_rollout")
    assert OmegaConf.to_container(plain[ROOT]) == defaults_of(PartialRolloutConfig)


def test_defaults_are_within_their_limits():
    values = read(PartialRolloutConfig, defaults_of(PartialRolloutConfig), ROOT)
    assert values["mode"] is Mode.WINDOW and values["deadlines"].stall_s == 1800.0
    assert default_of("max_staleness") == 4 and default_of("deadlines.grant_s") == 7200


def test_key_that_an_old_run_lacks_has_its_default():
    values = read(PartialRolloutConfig, {"max_staleness": 2}, ROOT)
    assert (values["max_staleness"], values["probe_s"], values["failures"].sample_retries) == (2, 0, 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_stalenes", "no such key; did you mean partial_rollout.max_staleness?"),
        ("schedulng.policy", "no such key; did you mean partial_rollout.scheduling.policy?"),
        ("deadlines.stal_s", "no such key; did you mean partial_rollout.deadlines.stall_s?"),
        ("stall_s", "no such key; did you mean partial_rollout.deadlines.stall_s?"),
        ("xyz", "no such key; python -m recipe.partial_rollout.tools keys lists all"),
    ],
)
def test_misspelt_key_is_refused_with_the_nearest(monkeypatch, capsys, name, message):
    monkeypatch.setattr(sys, "argv", ["main_ppo", "--config-name", "quickstart_cpu", f"partial_rollout.{name}=8"])
    with pytest.raises(SystemExit) as caught:
        main_ppo.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"config error: partial_rollout.{name}=8: {message}\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_stalenes", "partial_rollout.max_stalenes=8: no such key; did you mean partial_rollout.max_staleness?"),
        ("failures.retries", "partial_rollout.failures.retries=8: no such key; did you mean partial_rollout.failures."),
    ],
)
def test_misspelt_key_of_a_config_file_is_refused(name, message):
    with pytest.raises(ConfigError) as caught:
        refuse_unknown(PartialRolloutConfig, node(name, 8)[ROOT], ROOT)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("deadlines", "null", "partial_rollout.deadlines=None: its keys: stall_s, grant_s, reward_s"),
        ("deadlines.grant_s", "soon", "partial_rollout.deadlines.grant_s=soon: seconds above 0"),
        ("deadlines.reward_s", "true", "partial_rollout.deadlines.reward_s=True: seconds above 0"),
        ("slots_per_replica", "0", "partial_rollout.slots_per_replica=0: an integer of at least 1, or null"),
        ("probe_s", "inf", "partial_rollout.probe_s=inf: seconds of at least 0"),
        ("overlap", "null", "partial_rollout.overlap=None: a number of at least 0, or auto"),
        ("failures.max_masked_fraction", "1.5", "failures.max_masked_fraction=1.5: at most 1: a share of the batch"),
        ("mode", "null", "partial_rollout.mode=None: one of window, ssim, april"),
    ],
)
def test_value_out_of_its_limits_is_refused_in_one_line(name, value, message):
    with pytest.raises(ConfigError) as caught:
        read(PartialRolloutConfig, node(name, value)[ROOT], ROOT)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("module", [keys, resume_sizes])
def test_examples_in_docstrings_hold(module):
    found = doctest.testmod(module)
    assert found.attempted and not found.failed

"""A key is declared once: hydra's defaults, the checks and the README's table follow from its declaration."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config.keys import ConfigError, declarations, defaults_of, read
from recipe.partial_rollout.config.settings import ROOT, Mode, PartialRolloutConfig
from tests.generated import FIRST, table, with_tables

README = Path(main_ppo.__file__).with_name("README.md")
KEYS = list(declarations(PartialRolloutConfig))
NAMES = [declared.name for declared in KEYS]


def test_pages_have_the_tables_of_the_declarations():
    assert len(NAMES) <= 26 and len(FIRST) == 8 and set(FIRST) < set(NAMES)
    for readme, name in ((README, "keys"), (README.parents[2] / "docs" / "own_job.md", "first keys")):
        text = readme.read_text()
        assert with_tables(text) == text, f"python -m tests.generated keys {readme}"
        assert text.count(table(name)) == 1


def test_no_file_of_conf_declares_a_key_of_its_own(composed_config):
    """They only set some: hydra's node has the declared keys, and ``conf/partial_rollout.yaml`` sets none."""
    assert ROOT not in OmegaConf.load(main_ppo.CONF_DIR / "partial_rollout.yaml")
    for path in main_ppo.CONF_DIR.glob("*.yaml"):
        if "- ppo_trainer" in path.read_text():
            PartialRolloutConfig.from_config(composed_config(path.stem))
    plain = composed_config("ppo_partial_rollout")
    assert OmegaConf.to_container(plain[ROOT]) == defaults_of(PartialRolloutConfig)


def test_key_that_an_old_run_lacks_has_its_default():
    values = read(PartialRolloutConfig, {"max_staleness": 2}, ROOT)
    assert values == read(PartialRolloutConfig, {**defaults_of(PartialRolloutConfig), "max_staleness": 2}, ROOT)
    assert (values["max_staleness"], values["mode"]) == (2, Mode.WINDOW)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_stalenes", "no such key; did you mean partial_rollout.max_staleness?"),
        ("schedulng.policy", "no such key; did you mean partial_rollout.scheduling.policy?"),
        ("overtake", "no such key; did you mean partial_rollout.scheduling.overtake?"),
        ("xyz", "no such key; python -m recipe.partial_rollout.tools keys lists all"),
    ],
)
def test_misspelt_key_is_refused_with_the_nearest(composed_config, name, message):
    with pytest.raises(ConfigError) as caught:
        PartialRolloutConfig.from_config(composed_config("quickstart_cpu", f"+partial_rollout.{name}=8"))
    assert str(caught.value) == f"partial_rollout.{name}=8: {message}"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("deadlines", "null", "a section with the keys stall_s, reward_s, interrupt_s"),
        ("deadlines.stall_s", "soon", "seconds above 0"),
        ("enable", "0", "true or false"),
        ("trust_region_bounds", "[low,0.3]", "[low, high], each a number above 0, or null"),
        ("slots_per_replica", "0", "an integer of at least 1, or null"),
        ("overlap", "null", "a number above -1"),
        ("failures.max_masked_fraction", "1.5", "a number of at least 0 and at most 1"),
        ("mode", "null", "one of window, ssim, april"),
    ],
)
def test_value_out_of_its_limits_is_refused_in_one_line(name, value, words):
    with pytest.raises(ConfigError) as caught:
        read(PartialRolloutConfig, OmegaConf.from_dotlist([f"{name}={value}"]), ROOT)
    assert str(caught.value).startswith(f"partial_rollout.{name}=") and "\n" not in str(caught.value)
    assert f": {words}" in str(caught.value)

"""What a run survives is said on the terminal."""

import logging

import pytest

from recipe.partial_rollout import main_ppo


@pytest.fixture
def ours():
    """The recipe's logger, as it was afterwards."""
    logger = logging.getLogger("recipe.partial_rollout")
    before = logger.level, logger.handlers, logger.propagate
    yield logger
    logger.level, logger.handlers, logger.propagate = before


def test_recipes_warnings_reach_the_terminal_although_a_library_has_muted_the_root_logger(ours, monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    main_ppo.show_warnings()
    logging.getLogger("recipe.partial_rollout.rollout.workers").warning("%s died", "agent_loop_worker_1")
    logging.getLogger("another.library").warning("its own affairs")
    assert capsys.readouterr().out.splitlines() == ["agent_loop_worker_1 died"]

"""The user's own code is loaded before Ray starts: rewards, reward managers, agent loops, tools and datasets."""

import contextlib

import pytest

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight.rows import dataset_of
from recipe.partial_rollout.preflight.user_code import check_code
from tests.unit.shared import check_config, settings_of

P, ROLLOUT, MANAGER = "partial_rollout", "actor_rollout_ref.rollout", "reward.reward_manager"


@pytest.mark.parametrize(
    "key",
    [
        "reward.custom_reward_function.path={}.py",
        f"{ROLLOUT}.multi_turn.function_tool_path={{}}.py",
        f"{MANAGER}.module.path={{}}.py {MANAGER}.source=importlib",
        f"{ROLLOUT}.agent.agent_loop_config_path={{}}.yaml",
        "actor_rollout_ref.model.external_lib=exits",
        f"{P}.scheduling.policy=exits.order",
        "data.custom_cls.path={}.py data.custom_cls.name=Own",
    ],
)
def test_module_that_exits_while_it_is_imported_is_refused_by_its_key(configure, tmp_path, monkeypatch, key):
    (tmp_path / "exits.py").write_text("import sys\n\nsys.exit()\n")
    (tmp_path / "exits.yaml").write_text("- name: mine\n  _target_: exits.Loop\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = configure(*key.format(*[tmp_path / "exits"] * 2).split())
    with pytest.raises(ConfigError, match=rf"^{key.partition('=')[0]}=.*\(SystemExit: "):
        check_config(config)
        dataset_of(config, "train", None)


def test_reward_beside_a_reward_model_must_take_its_address_and_tokenizer(configure, tmp_path):
    """verl hands them to the function of each sample, which would fail."""
    arguments = "data_source, solution_str, ground_truth, extra_info"
    given = (f"{arguments}=None", f"{arguments}, reward_router_address", f"{arguments}, **more")
    for i, (signature, alone, beside) in enumerate(zip(given, (1, 0, 1), (0, 0, 1), strict=True)):
        (tmp_path / f"reward{i}.py").write_text(f"async def compute_score({signature}):\n    return 1.0\n")
        config = configure(f"reward.custom_reward_function.path={tmp_path}/reward{i}.py")
        settings = settings_of()
        for enable, accepted in ((False, alone), (True, beside)):
            config.reward.reward_model.enable = enable
            words = "reward_router_address, reward_model_tokenizer" if enable else "a function that takes data_source"
            with contextlib.nullcontext() if accepted else pytest.raises(ConfigError, match=words):
                assert list(check_code(config, settings)) == []


GIVEN = "data_source, solution_str, ground_truth, extra_info"
JUDGES = {
    f"class compute_score:\n    def __init__(self, {GIVEN}): ...": "verl would take the object that it makes for the score",
    "class Judge:\n    async def __call__(self, **_): ...\ncompute_score = Judge()": "verl would not await its __call__",
    "class Judge:\n    def __call__(self, **_): ...\ncompute_score = Judge()": None,
    "import functools\nasync def judge(weight, **_): ...\ncompute_score = functools.partial(judge, 1.0)": None,
}
"""files with a reward function, and the word of their refusal"""


@pytest.mark.parametrize("code", JUDGES)
def test_reward_whose_answers_verl_would_not_wait_for_is_refused(configure, tmp_path, code):
    (tmp_path / "judge.py").write_text(code)
    config, words = configure(f"reward.custom_reward_function.path={tmp_path}/judge.py"), JUDGES[code]
    with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
        assert list(check_code(config, settings_of())) == []


MANAGERS = {
    "class Own(NaiveRewardManager): ...": None,
    "class Other: ...": r"reward_manager\.module\.path=.*a file with the class Own \(reward\.reward_manager\.name\)",
    "class Own:\n    def __init__(self, tokenizer, num_examine): ...": r"reward_manager\.name=Own: .*compute_score",
    "class Own:\n    def __init__(self, **_): ...": r"reward_manager\.name=Own: .*run_single",
    "class Own(RewardManagerBase):\n    def __init__(self, **_): ...": r"reward_manager\.name=Own: .*run_single",
}
"""files with a reward manager, and the words of their refusal"""


@pytest.mark.parametrize("code", MANAGERS)
def test_reward_manager_of_ones_own_is_loaded_before_ray_starts(configure, tmp_path, code):
    start = "from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase\n"
    start += "from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager\n"
    (tmp_path / "own.py").write_text(start + code)
    own = f"{MANAGER}.source=importlib", f"{MANAGER}.name=Own", f"{MANAGER}.module.path={tmp_path}/own.py"
    with pytest.raises(ConfigError, match=MANAGERS[code]) if MANAGERS[code] else contextlib.nullcontext():
        assert list(check_code(configure(*own), settings_of())) == []


@pytest.mark.parametrize(("target", "accepted"), [("json.loads", True), ("json.decoder", False), ("math.pi", False)])
def test_agent_loop_may_be_anything_that_hydra_can_call(configure, tmp_path, target, accepted):
    (tmp_path / "loops.yaml").write_text(f"- name: mine\n  _target_: {target}\n")
    config = configure(f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path}/loops.yaml")
    words = "a YAML list of agent loops, each with its name and the _target_ of a class or function"
    with contextlib.nullcontext() if accepted else pytest.raises(ConfigError, match=words):
        assert list(check_code(config, settings_of())) == []


def test_tools_file_may_bring_a_format_of_its_own(configure, tmp_path):
    own = tmp_path / "own_tool.py"
    own.write_text(
        "from verl.experimental.agent_loop.tool_parser import ToolParser\n"
        "from verl.tools.function_tool import function_tool\n\n"
        '@function_tool\ndef add(a: int) -> int:\n    """Adds one.\n\n    Args:\n        a: a number.\n    """\n\n'
        '@ToolParser.register("own")\nclass Own(ToolParser):\n'
        "    async def extract_tool_calls(self, responses_ids, tools=None):\n        return '', []\n"
    )
    turns = f"{ROLLOUT}.multi_turn"
    check_config(configure(f"{turns}.format=own", f"{turns}.function_tool_path={own}"))

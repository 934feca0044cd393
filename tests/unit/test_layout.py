"""Imports point one way, and only the outer layers know Ray."""

import ast
from pathlib import Path

import recipe.partial_rollout as package

ROOT = Path(package.__file__).parent
PURE = (
    "types",
    "admission",
    "scheduling",
    "failure_policy",
    "group_filter",
    "length_ledger",
    "ready_groups",
    "manager_state",
    "manager_codec",
    "manager_report",
    "sample_lifecycle",
    "prompts_manager",
    "durable_file",
    "plain_codec",
    "snapshot",
    "manifest",
    "ledger",
    "audit",
    "trace_audit",
)
RAY = {
    "agent_loop_manager",
    "checkpoint_manager",
    "failures",
    "observed_manager",
    "output_store",
    "worker_pool",
    "replica",
    "task_runner",
    "main_ppo",
}
ORDER = ("types", "admission", "scheduling", "prompts_manager", "manager_actor", "agent_loop_worker", "ray_trainer")


def imports(name):
    tree = ast.parse((ROOT / f"{name}.py").read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_state_machine_knows_nothing_of_ray_asyncio_or_torch():
    for name in PURE:
        roots = {module.split(".")[0] for module in imports(name)}
        assert not roots & {"ray", "asyncio", "torch", "verl", "vllm"}, name


def test_only_the_outer_layers_import_ray():
    users = {path.stem for path in ROOT.glob("*.py") if any(m.split(".")[0] == "ray" for m in imports(path.stem))}
    assert users <= RAY


def test_imports_point_one_way():
    for i, name in enumerate(ORDER):
        ours = {module.removeprefix("recipe.partial_rollout.") for module in imports(name)}
        assert not ours & set(ORDER[i + 1 :]), name


def test_patches_of_verl_and_vllm_live_in_verl_ext():
    for path in ROOT.rglob("*.py"):
        assert "register_post_import_hook" not in path.read_text(), path


def test_nothing_at_run_time_reads_the_shared_folder():
    for path in [*ROOT.rglob("*.py"), *(ROOT.parents[1] / "verl_ext").rglob("*.py")]:
        assert "shared/" not in path.read_text(), path

"""Does partial rollout learn what synchronous rollout learns? Reward against trained groups, per arm, over seeds.

``python -m recipe.partial_rollout.tools convergence`` runs whatever runs are missing and writes ``convergence.md`` and
``convergence.png``; ``run_scripts/convergence_cpu.sh`` does so on the embedded task.
"""

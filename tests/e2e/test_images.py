"""A model that sees trains on images, interrupted, killed and resumed on engines that decode while the trainer updates.

Its engine keeps the images' keys and values, and decodes with a tower's new weights.
"""

import asyncio
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recipe.partial_rollout.checkpoint.manifest import read_snapshot
from recipe.partial_rollout.tools.audit import audit
from tests.chaos.victim import kill_session
from tests.e2e.bare_server import serve
from tests.e2e.conftest import ENGINE
from tests.e2e.new_weights import scale_tower
from tests.tiny_vlm import picture

# Two trainings, one after the other, in a fixture.
pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).resolve().parents[2]
FACTOR = 0.25
"""between old and new weights of the tower's norms"""
SMALL = (
    "data.train_batch_size=4",
    "data.train_max_samples=24",
    "data.max_prompt_length=96",
    "data.max_response_length=200",
    "trainer.total_training_steps=4",
    "trainer.save_freq=1",
    "trainer.resume_mode=auto",
    "trainer.test_freq=2",
    "data.val_max_samples=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_model_len=300",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "partial_rollout.max_staleness=3",
    "partial_rollout.resume_kv=keep",
    f"reward.custom_reward_function.path={Path(__file__).with_name('images_reward.py')}",
)


@pytest.fixture(scope="session")
def seeing(tmp_path_factory):
    """A tiny Qwen3-VL, and rows with one or two images each."""
    out = tmp_path_factory.mktemp("seeing")
    subprocess.run([sys.executable, "-m", "tests.tiny_vlm", "qwen3_vl", str(out)], check=True, cwd=ROOT, timeout=300)
    return out


@pytest.fixture(scope="module")
def run(module_start, wait_for, read_run, seeing, tmp_path_factory):
    """A training that is killed after the checkpoint of step 2, and resumed: what its directory and the checkpoint hold."""
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    ours = (
        *SMALL,
        f"trainer.default_local_dir={run_dir}",
        f"actor_rollout_ref.model.path={seeing / 'model'}",
        *(f"data.{split}_files={seeing / 'rows.parquet'}" for split in ("train", "val")),
    )
    state = run_dir / "global_step_2" / "partial_rollout"
    first = module_start(*ours, name="killed")
    wait_for((state / "manifest.json").exists, "a checkpoint of step 2", 400)
    kill_session(first.process)
    saved = {path.name: path.stat().st_size for path in state.iterdir()}
    (path,) = state.glob("manager-*.state")
    manager = read_snapshot(path)
    second = module_start(*ours, "partial_rollout.placement=separate", name="resumed")
    assert second.process.wait(400) == 0, second.terminal()[-3000:]
    return SimpleNamespace(run=read_run(run_dir), directory=run_dir, saved=saved, manager=manager)


def test_interrupted_killed_and_resumed_it_trains_every_prompt_once(run):
    judged, code = audit(run.directory)
    assert code == 0, judged
    assert max(run.run.steps) == 4 and run.run.run["complete"]
    assert max(n for event in run.run.rounds for group in event["trained"] for n in group["segments"]) > 1
    assert all(step["partial_rollout/lost_samples"] == 0 for step in run.run.steps.values())
    assert all(step["partial_rollout/failures/masked_total"] == 0 for step in run.run.steps.values())


def test_trainer_sees_the_images_that_the_engine_has_seen(run):
    """After updates of the tower too."""
    for number, step in run.run.steps.items():
        assert math.isfinite(step["actor/grad_norm"]) and step["actor/grad_norm"] > 0
        # Tokens that were carried over an update at this rate differ by 1e-3 in the mean; those of step 1 do not.
        assert step["training/rollout_probs_diff_mean"] < (1e-5 if number == 1 else 3e-3)


def test_checkpoint_has_images_as_files_and_no_pixels(run):
    in_flight = [*run.manager["backlog"], *(group["prompt"] for group in run.manager["groups"])]
    parts = [
        part for prompt in in_flight for part in prompt["row"]["raw_prompt"][0]["content"] if part["type"] == "image"
    ]
    assert parts and all(part["bytes"].startswith(b"\x89PNG") and "image" not in part for part in parts)
    assert sum(run.saved.values()) < 1 << 20


# -- a tower's new weights -----------------------------------------------------------------------------------------------


def of_trainer(model, processor, prompt, image, tokens):
    """[tokens] log-probs by transformers' model."""
    ids = torch.tensor([[*prompt, *tokens]])
    kinds = (ids == processor.image_token_id).long()
    pixels = processor.image_processor([image], return_tensors="pt")
    with torch.no_grad():
        scores = model(input_ids=ids, mm_token_type_ids=kinds, **pixels).logits[0].log_softmax(-1)
    return np.array([scores[len(prompt) + i - 1, token].item() for i, token in enumerate(tokens)])


async def decoded(path):
    """Log-probs of the engine and of transformers for what the engine answers, before and after the tower has changed."""
    from transformers import AutoModelForImageTextToText
    from verl.utils.tokenizer import hf_processor
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from recipe.partial_rollout.engine.replica import RecipeVLLMServer

    processor, image = hf_processor(path), picture("g")
    own = {
        "skip_tokenizer_init": False,
        "enable_prefix_caching": True,
        "worker_extension_cls": "new_weights.NewWeights",
    }
    options = AsyncEngineArgs(
        model=path, dtype="float32", limit_mm_per_prompt={"image": 1, "video": 0}, **{**ENGINE, **own}
    )
    engine = AsyncLLM.from_engine_args(options)
    try:
        server = serve(engine, RecipeVLLMServer, 40, "keep")
        server.model_config.processor = processor
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        text = processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}],
            add_generation_prompt=True,
        )
        prompt = processor(text=[text], images=[image])["input_ids"][0]
        found = []
        for version in range(2):
            sampling = {"temperature": 0.0, "ignore_eos": True, "logprobs": True, "detokenize": False}
            answer = await server.generate(list(prompt), sampling, f"r{version}", image_data=[image])
            ours = of_trainer(model, processor, prompt, image, answer.token_ids)
            found.append(
                (np.array(answer.log_probs), ours, of_trainer(model, processor, prompt, picture("r"), answer.token_ids))
            )
            await server.hold()
            (changed,) = await engine.collective_rpc("scale_tower", args=(FACTOR,))
            assert changed == scale_tower(model, FACTOR) > 4
            await server.clear_kv_cache()
            server.global_steps = version + 1
            await server.resume_generation()
        return found
    finally:
        engine.shutdown()


def test_engine_decodes_with_the_towers_new_weights(seeing, monkeypatch):
    """The second answer is to an image that the engine has seen under the old weights."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (old, ours, other), (new, ours_new, _) = asyncio.run(decoded(str(seeing / "model")))
    np.testing.assert_allclose(old, ours, atol=1e-4)
    np.testing.assert_allclose(new, ours_new, atol=1e-4)
    assert len(old) == len(new) == 40
    assert np.abs(ours - other).max() > 1e-2 and np.abs(old - new).max() > 1e-2, "or nothing would be tested"

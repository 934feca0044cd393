"""verl's Megatron engine on a CPU computes, trains and resumes as Hugging Face's model with torch's AdamW does."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.chaos.victim import kill_session
from tests.conftest import free_port

pytestmark = pytest.mark.nightly

HERE = Path(__file__).parent
DEADLINE_S = 400
LAYOUTS = {"TP2": (2, 1), "PP2": (1, 2), "DP2": (1, 1)}
# A bridge of mbridge's to a tied model leaves the names of tied weights to all that come after: it is the last.
MODELS = {"untied": "language_model", "critic": "value_model", "tied": "language_model"}
OUTPUTS = {"language_model": {"log_probs": 2e-6, "entropy": 4e-6}, "value_model": {"values": 2e-6}}
TRAINED = {"grad_norm": 1e-5, "weights": 9e-6, "resumed": 9e-6}
"""largest differences from Hugging Face: of outputs; of gradients' norms, as a share; and of weights after three steps,
without a restart and with one"""


@pytest.fixture(scope="module")
def environment(megatron_path):
    """Variables of a process that can import Megatron and train with it on a CPU."""
    plugin = {"VERL_USE_EXTERNAL_MODULES": "tests.megatron.plugin"}
    return {**os.environ, **plugin, "PYTHONPATH": megatron_path, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny Qwen3 models with a tokenizer: ``untied`` and ``tied`` embeddings."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = Tokenizer(
        models.WordLevel({"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 512)}}, unk_token="<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    root = tmp_path_factory.mktemp("models")
    for name in ("untied", "tied"):
        torch.manual_seed(0)
        tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": name == "tied"}
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **tokens)).float()
        # Norms are ones when they are made; others would hide a norm that is not loaded.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, 1.0, 0.05)
        model.save_pretrained(root / name)
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(
            root / name
        )
    return root


def run(script, *arguments, environment, logs, ranks=1):
    """Run ``ranks`` processes of ``script``; all end with the first that fails, and at the deadline."""
    variables = {**environment, "WORLD_SIZE": str(ranks), "MASTER_PORT": str(free_port())}
    started = []
    try:
        for rank in range(ranks):
            with (logs / f"{rank}.log").open("w") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", HERE / script, *map(str, arguments)],
                        env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        codes = [process.wait(DEADLINE_S) for process in started]
    finally:
        for process in started:
            kill_session(process)
    assert not any(codes), [(logs / f"{rank}.log").read_text()[-3000:] for rank in range(ranks)]


@pytest.fixture(scope="module")
def trained(environment, models, tmp_path_factory):
    """By case ``(model, layout)``: the largest difference of each kind over both ranks."""
    out = tmp_path_factory.mktemp("ranks")
    cases = {
        (model, name): f"{kind}:{models / model.replace('critic', 'untied')}:{tp}:{pp}"
        for model, kind in MODELS.items()
        for name, (tp, pp) in LAYOUTS.items()
    }
    run("megatron_rank.py", out, *cases.values(), environment=environment, logs=out, ranks=2)
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
    kinds = {case: {**OUTPUTS[MODELS[case[0]]], **TRAINED} for case in cases}
    return {
        case: {kind: max(rank[key].get(kind, 0) for rank in ranks) for kind in kinds[case]}
        for case, key in cases.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_compute_train_and_resume_as_hugging_face_does(trained, model, layout):
    found = trained[model, layout]
    print(f"{model} {layout}: {found}")
    most = {**OUTPUTS[MODELS[model]], **TRAINED}
    assert {kind: value for kind, value in found.items() if not 0 < value <= most[kind]} == {}


def test_every_replacement_is_still_needed(environment, models, tmp_path):
    run("megatron_without.py", models / "untied", tmp_path, environment=environment, logs=tmp_path)
    found = {path.stem: path.read_text() for path in tmp_path.glob("*.txt")}
    fine = {name for name, text in found.items() if re.match(r"[\d.e-]+$", text) and float(text) <= TRAINED["weights"]}
    assert fine == {"nothing"} and len(found) > 10, found


def output(code, environment):
    """What a process that can import Megatron prints."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=200).stdout


def test_megatrons_wrapper_of_torchs_norm_still_refuses_sequence_parallelism(environment):
    code = (
        "import megatron.core.transformer.torch_norm as norm, inspect; print(inspect.getsource(norm.WrappedTorchNorm))"
    )
    assert "not config.sequence_parallel" in output(code, environment)


def test_bridge_to_a_tied_model_still_renames_the_output_layer_of_every_other(environment):
    """Why the preflight refuses a critic beside tied embeddings: its head would be saved as the embeddings."""
    code = (
        "from mbridge.models.qwen3 import Qwen3Bridge as Bridge; from types import SimpleNamespace\n"
        "tied, other = object.__new__(Bridge), object.__new__(Bridge)\n"
        "tied.hf_config = SimpleNamespace(tie_word_embeddings=True)\n"
        "tied._adjust_mapping_for_shared_weights(); print(other._DIRECT_MAPPING['output_layer.weight'])"
    )
    assert output(code, environment).split()[-1] == "model.embed_tokens.weight"

"""A checkpoint's export is what the page says: rounded weights, and under LoRA those of the base model."""

import json
import re
import shlex
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config
from verl.model_merger.__main__ import main as merger

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "own_job.md").read_text()
SECTION = PAGE[PAGE.index("### Take the weights away") : PAGE.index("## Images")]
IDS = torch.arange(1, 20)[None]
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def saved(directory, model):
    """``model`` as verl's FSDP trainer of one rank saves it."""
    (directory / "huggingface").mkdir(parents=True)
    core = Tokenizer(models.WordLevel({str(i): i for i in range(32)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="0").save_pretrained(directory / "huggingface")
    model.config.save_pretrained(directory / "huggingface")
    torch.save(model.state_dict(), directory / "model_world_size_1_rank_0.pt")
    (directory / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    (directory / "lora_train_meta.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}))


def test_page_makes_one_trained_model_of_what_the_merger_writes_of_lora(tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = Qwen3Config(architectures=["Qwen3ForCausalLM"], **HEADS, **SIZES)
    base = AutoModelForCausalLM.from_config(config).float()
    before = logits(base)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    trained = logits(model)
    saved(tmp_path / "out/global_step_2/actor", model)
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"```bash\n(.*?)\n```", SECTION, re.DOTALL)
    monkeypatch.setattr(sys, "argv", shlex.split(command)[2:])
    merger()
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    exec(compile(code, "docs/own_job.md", "exec"), {})
    merged, whole = (AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in ("merged", "trained"))
    change = (trained - before).abs().max()
    assert (logits(merged) - before).abs().max() < 0.05 * change, "the merger writes the base model, rounded"
    assert (logits(whole) - trained).abs().max() < 0.05 * change
    assert AutoTokenizer.from_pretrained("trained").decode([1, 2, 3])
    rounded = merged.model.layers[0].mlp.up_proj.weight
    assert torch.equal(rounded, rounded.bfloat16().float())

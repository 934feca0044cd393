"""What travels to a GPU, what an experiment prints there, and what the acceptance reads of a run."""

import json
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from recipe.partial_rollout.tasks.trace_task.prepare import main as prepare
from recipe.partial_rollout.tasks.trace_task.prepare import response_budgets, write_model
from recipe.partial_rollout.training.loss import masked_parts
from tests.gpu import figures, judged, pack, parts, stacks
from tests.gpu.cubins import keep_architecture


def test_median_at_the_cap_is_refused(tmp_path, capsys):
    assert prepare(["--out", str(tmp_path), "--median", "10", "--cap", "10"]) == 2
    assert capsys.readouterr().err == "--median=10: must be below --cap=10\n"


def test_sigma_lengthens_the_tail_and_keeps_the_median():
    short, long = (sorted(response_budgets(999, 1000, sigma, 16_384, seed=0)) for sigma in (0.6, 1.2))
    assert 900 < short[499] < 1100 and 900 < long[499] < 1100
    assert long[970] > 2 * short[970] and max(long) <= 16_384


def test_the_random_model_speaks_verls_qwen3_turns(tmp_path):
    write_model(tmp_path, "tiny", vocabulary=32, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 32
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen3")
    assert type(builder).__name__ == "QwenContinuousTokenBuilder"


def logged_step(ages, outside):
    """A step as the trainer logs it, of tokens of these ages; the loss gives the metrics their names."""
    ages, outside = torch.tensor([ages]), torch.tensor([outside])
    masked = masked_parts(outside, torch.ones(outside.shape), age=ages)
    metrics = {name: float(each.float().mean()) for name, each in masked.items()}
    older = float((ages > 0).float().mean())
    return SimpleNamespace(metrics=metrics | {"partial_rollout/off_policy_token_fraction": older})


def test_masked_shares_count_every_age_as_the_loss_logs_them():
    # Of age 0 one of four is outside, of age 1 both, of age 2 and 3 one of two.
    step = logged_step([0, 0, 0, 0, 1, 1, 2, 3], [True, False, False, False, True, True, True, False])
    assert judged.masked_shares([step, step]) == pytest.approx((1 / 4, 3 / 4))


def fatbin(*codes):
    """A fatbin of (kind, architecture, code)."""
    entries = b"".join(
        struct.pack("<HHIQ12xI", kind, 0x101, 64, len(code), architecture).ljust(64, b"\7") + code
        for kind, architecture, code in codes
    )
    return struct.pack("<4sHHQ", b"\x50\xed\x55\xba", 1, 16, len(entries)) + entries


def test_machine_code_of_other_gpus_alone_is_zeroed(tmp_path):
    library = tmp_path / "library.so"
    before, stray = b"other data" * 9, b"\x50\xed\x55\xba the magic number by chance, and no fatbin after it"
    first = fatbin((2, 80, b"A" * 40), (2, 90, b"B" * 48), (1, 120, b"C" * 16))
    library.write_bytes(before + stray + first + b"between" + fatbin((2, 75, b"D" * 8)) + b"end")
    assert keep_architecture(library, 90) == 40 + 16 + 8
    after = library.read_bytes()
    assert after.startswith(before + stray) and after.endswith(b"end")
    assert b"B" * 48 in after and b"between" in after and not any(letter * 8 in after for letter in (b"A", b"C", b"D"))


@pytest.fixture
def packed(tmp_path):
    """The parts of a folder of 3,000 bytes that do not compress, in one folder as they are carried."""
    folder, carried = tmp_path / "folder", tmp_path / "carried"
    folder.mkdir()
    carried.mkdir()
    (folder / "noise").write_bytes(torch.randint(256, (3000,), dtype=torch.uint8).numpy().tobytes())
    for path in parts.pack(folder, "packages", tmp_path / "out", limit=1000):
        for each in path.parent.iterdir():
            each.rename(carried / each.name)
    return folder, carried


def test_parts_make_the_folder_again(packed, tmp_path):
    folder, carried = packed
    assert len(list(carried.glob("packages.[0-9]"))) == 4
    assert parts.unpack("packages", carried, tmp_path / "site")
    assert (tmp_path / "site" / "noise").read_bytes() == (folder / "noise").read_bytes()
    assert not parts.unpack("smollm2", carried, tmp_path / "other")


@pytest.mark.parametrize(
    ("part", "damage", "words"),
    [
        ("packages.2", Path.unlink, r"packages\.2 missing.*carry packages_2"),
        ("packages.json", Path.unlink, "carry the last"),
        ("packages.1", lambda part: part.write_bytes(b"of another pack"), "different packs"),
    ],
)
def test_part_that_is_missing_or_of_another_pack_is_named(packed, tmp_path, part, damage, words):
    _, carried = packed
    damage(carried / part)
    with pytest.raises(parts.PartsError, match=words):
        parts.unpack("packages", carried, tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_pack_leaves_out_what_the_machine_has_and_takes_another_vllm():
    lines = pack.requirements("0.99.0")
    names = {line.split("==")[0] for line in lines}
    assert "vllm==0.99.0" in lines and {"verl", "ray", "transformers", "liger-kernel"} <= names
    assert not names & {"torch", "triton", "flashinfer-python", "antlr4-python3-runtime"}
    assert not any(name.startswith("nvidia-") for name in names)
    assert [line.split("==")[0] for line in pack.sources()] == list(pack.SOURCES)
    locked = {line.split("==")[0] for line in (pack.ROOT / "requirements-gpu.txt").read_text().splitlines()}
    assert {*pack.not_carried(), *pack.SOURCES} <= locked, "a package that is left out is no longer in the lock file"


def test_figures_of_a_run_that_was_cut_off_are_read_but_for_a_torn_line(tmp_path, capsys):
    kept = figures.Figures("pair", tmp_path / "pair")
    kept.emit(arm="PR", step=1)
    assert json.loads(capsys.readouterr().out) == {"experiment": "pair", "arm": "PR", "step": 1}
    with (tmp_path / "pair" / figures.NAME).open("a") as file:
        file.write('{"experiment": "pair", "arm"')
    assert list(figures.read([tmp_path])) == [{"experiment": "pair", "arm": "PR", "step": 1}]


def test_driver_of_a_running_process_is_sampled(tmp_path):
    program = "import time\ndef busy():\n    while True: sum(range(1000))\nprint(flush=True)\nbusy()"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    sampler = stacks.Sampler(tmp_path / "stacks.txt")
    try:
        sampler.attach(process.pid)
        time.sleep(3)
    finally:
        process.kill()
        sampler.stop()
    text = (tmp_path / "stacks.txt").read_text()
    assert text.startswith("== driver\n") and "busy (<string>:3)" in text, text

"""`ForewarnCallback` in TRL's trainers, with LoRA adapters of PEFT."""

import math

import numpy as np
import pytest

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import forewarn
from tests.integrations.test_huggingface import callback, recorded
from tests.integrations.tiny import VOCABULARY, llama, rows, series

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

SETTINGS = {
    "per_device_train_batch_size": 4, "max_steps": 10, "learning_rate": 1e-2, "use_cpu": True, "report_to": [],
    "disable_tqdm": True, "save_strategy": "no", "bf16": False, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1,
    "dataloader_pin_memory": False, "gradient_checkpointing": False, "logging_steps": 1,
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    words = {str(number): number for number in range(VOCABULARY - 1)} | {"<pad>": VOCABULARY - 1}
    plain = Tokenizer(models.WordLevel(words, unk_token="0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="2", bos_token="1")


def texts(number: int) -> list[str]:
    return [" ".join(str(int(token) % (VOCABULARY - 1)) for token in row["input_ids"]) for row in rows(number)]


def check(run, expected):
    """The readings of a run are those computed in float64."""
    norms = [step.norm for step in expected.steps]
    assert series(run, "train/loss") == pytest.approx([step.loss for step in expected.steps], rel=1e-4)
    assert series(run, "gradient/global_norm") == pytest.approx(norms, rel=1e-3)
    assert series(run, "gradient/global_norm_clipped") == pytest.approx([min(norm, 0.1) for norm in norms], rel=1e-3)
    assert set(series(run, "gradient/backward_passes")) == {2}


@pytest.mark.parametrize("adapter", [False, True])
def test_supervised_fine_tuning_is_read_exactly(tmp_path, adapter):
    forewarned = callback()
    trainer = SFTTrainer(
        llama(), SFTConfig(str(tmp_path), **SETTINGS), train_dataset=Dataset.from_dict({"text": texts(40)}),
        processing_class=tokenizer(), peft_config=LoraConfig(r=2, lora_alpha=4) if adapter else None,
        callbacks=[forewarned],
    )  # fmt: skip
    expected = recorded(trainer)
    trainer.train()
    check(tmp_path / "forewarn", expected)
    with forewarn.open_run(tmp_path / "forewarn") as run:
        trained = run.scopes("gradient/norm")
        assert not adapter or all("lora" in name for name in trained if run.series("gradient/norm", name).values[0] > 0)
        assert np.nanmax(run.series("monitor/update_ratio_median").values) < 10  # B starts at zero: it has no ratio yet
    assert not [alert for alert in forewarned.monitor.alerts if alert.name in ("missing-gradient", "frozen-weight")]


def test_preferences_are_trained_with_the_loss_that_is_read(tmp_path):
    answers = texts(24)
    data = Dataset.from_dict({"prompt": ["1 2"] * 24, "chosen": answers, "rejected": answers[::-1]})
    trainer = DPOTrainer(
        get_peft_model(llama(), LoraConfig(r=2, lora_alpha=4)), args=DPOConfig(str(tmp_path), **SETTINGS),
        train_dataset=data, processing_class=tokenizer(), callbacks=[callback()],
    )  # fmt: skip
    trainer.train()
    run = tmp_path / "forewarn"
    logged = [log for log in trainer.state.log_history if "loss" in log]
    assert series(run, "train/loss") == pytest.approx([log["loss"] for log in logged], rel=1e-5)
    assert series(run, "train/loss")[0] == pytest.approx(math.log(2), rel=1e-5)  # model and reference are equal
    assert series(run, "gradient/global_norm") == pytest.approx([log["grad_norm"] for log in logged], rel=1e-4)

"""Fine-tuning a small GPT-2 with transformers' Trainer."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

WHAT = "GPT-2, transformers' Trainer"
STEPS = {"cpu": 60, "cuda": 400}
BATCH, LENGTH, VOCABULARY = 8, 64, 512


class Sentences(Dataset):
    def __init__(self, n):
        self.ids = torch.randint(0, VOCABULARY, (n, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, k):
        return {"input_ids": self.ids[k], "labels": self.ids[k]}


class Tick(TrainerCallback):
    def __init__(self, tick):
        self.tick = tick

    def on_step_end(self, args, state, control, **kwargs):
        self.tick()


def run(jit, device, steps, tick):
    sizes = GPT2Config(n_layer=4, n_head=4, n_embd=128, vocab_size=VOCABULARY, n_positions=LENGTH)
    model = GPT2LMHeadModel(sizes).to(device)
    model = jit(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, use_cpu=device == "cpu",
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=Sentences(BATCH * 64), callbacks=[Tick(tick)]).train()
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in model.state_dict().items()}

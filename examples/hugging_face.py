"""A Hugging Face `Trainer`, TRL or PEFT: one callback."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import brevact
from brevact.trainers import HuggingFaceCallback

model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=64, vocab_size=128, bos_token_id=0, eos_token_id=0))
tokens = torch.randint(128, (32, 64))
data = [{"input_ids": ids, "labels": ids} for ids in tokens]
arguments = TrainingArguments("run", max_steps=2, per_device_train_batch_size=4, logging_steps=1, report_to=[])
trainer = Trainer(model, arguments, train_dataset=data)
HuggingFaceCallback("default").add_to(trainer)
trainer.train()
print(brevact.memory_report(model, {"input_ids": tokens, "labels": tokens}))

"""A language model and LoRA: `quantize_backward` after `get_peft_model`; bytes, time and peak of a step."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import brevact

sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes))  # or from_pretrained
model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
tokens = torch.randint(512, (4, 128))
batch = {"input_ids": tokens, "labels": tokens}
brevact.quantize_backward(model)


def loss(model, batch):
    return model(**batch).loss


print(brevact.memory_report(model, batch, loss))
print(brevact.step_report(model, batch, loss, rounds=3))

"""A Lightning module: one callback."""

import lightning
import torch

from brevact.trainers import LightningCallback


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.SiLU(), torch.nn.Linear(128, 8))

    def training_step(self, batch, batch_idx):
        return self.body(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


callback = LightningCallback("default")
trainer = lightning.Trainer(
    max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[callback]
)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(512, 64), 128))

"""Writes a safetensors file's tensors as a Lightning-like ``.ckpt``: ``make_ckpt.py SOURCE TARGET``.

The tensors are views of the mapped source, so torch streams them through the page cache.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file


def main(source: str, target: str) -> None:
    checkpoint = {
        "epoch": 3,
        "global_step": 12_000,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": load_file(source),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4, "completed": 3}}}},
        "callbacks": {"ModelCheckpoint": {"monitor": "val_loss", "best_model_score": torch.tensor(1.25)}},
        "optimizer_states": [{"state": {}, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.999)}]}],
        "lr_schedulers": [{"last_epoch": 12_000, "_last_lr": [1e-4]}],
        "hparams_name": "kwargs",
        "hyper_parameters": {"hidden_size": 2048, "learning_rate": 1e-4},
    }
    torch.save(checkpoint, target)


if __name__ == "__main__":
    main(*sys.argv[1:])

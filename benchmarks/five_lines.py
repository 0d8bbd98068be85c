"""What people do today: ``five_lines.py SOURCE TARGET DTYPE [check]``."""

import sys

import torch
from safetensors.torch import load_file, save_file

source, target, dtype, *check = sys.argv[1:]
if source.endswith(".safetensors"):
    state = load_file(source)
else:
    state = torch.load(source, map_location="cpu", weights_only=True)["state_dict"]
state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}
if check and not all(torch.isfinite(tensor).all() for tensor in state.values()):
    sys.exit("a value is not finite")
save_file(state, target, metadata={"format": "pt"})

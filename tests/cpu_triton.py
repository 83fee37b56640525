"""Triton's interpreter, where there is no GPU: Triton reads the setting when it is imported, so this comes before."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

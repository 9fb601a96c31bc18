"""Pretrains Llama-family language models with PyTorch's FSDP2.

Start reading at `config/training.py` (what can be set), then `train/loop.py` (the loop) and `train/build.py` (how a
run is put together).
"""

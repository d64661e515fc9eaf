"""The trainer: `deepspeed exgrpo/train/main.py`."""

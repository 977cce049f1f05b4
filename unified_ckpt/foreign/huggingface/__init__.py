"""Reads checkpoints of Hugging Face's Trainer, Accelerate and PEFT."""

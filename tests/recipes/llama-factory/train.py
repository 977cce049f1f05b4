"""Trains as `llamafactory-cli train`, with unified checkpoints: `python train.py train.yaml`."""

from llamafactory.train.tuner import run_exp

from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

if __name__ == "__main__":
    run_exp(callbacks=[UnifiedCheckpointCallback()])

"""The `unified-ckpt` command: one module per verb, and the text and arguments that they share."""

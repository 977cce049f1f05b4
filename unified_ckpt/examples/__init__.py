"""Training scripts to copy; `unified-ckpt demo` runs one."""

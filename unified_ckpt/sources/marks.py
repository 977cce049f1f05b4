"""Files by which folders of other formats are known."""

DCP_METADATA = ".metadata"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

"""Reads FlexCheckpoint folders of PaddlePaddle and PaddleFormers."""

"""What ranks hold beside tensors: encoded, compared between ranks, and merged. Sends nothing."""

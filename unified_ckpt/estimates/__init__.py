"""What a save will write, said before it runs."""

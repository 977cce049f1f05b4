"""Plans a save from the declarations of all ranks. Knows no tensor data and no folder."""

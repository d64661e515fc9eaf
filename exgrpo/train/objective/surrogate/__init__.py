"""Functions `surrogate`, one in each module: how the ratios of tokens enter the loss. See `objective.ratios`."""

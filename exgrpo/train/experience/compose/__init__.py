"""How a batch is made: `compose(supply) -> planned groups`, one function in each file; see `experience.supply`."""

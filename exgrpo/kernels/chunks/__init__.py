"""The way through the tokens that all backends share: chunks, library products, gradients gathered on the way."""

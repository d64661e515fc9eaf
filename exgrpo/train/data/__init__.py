"""Questions: from files, the hub or a built-in task to token ids."""

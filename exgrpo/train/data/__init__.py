"""Questions: from files, a hub or a built-in task to token ids."""

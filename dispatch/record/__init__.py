"""One op that is no hit: its inputs, its state in the trie, or its run at once."""
